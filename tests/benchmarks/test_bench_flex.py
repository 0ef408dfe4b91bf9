"""Rows of FlexAttention models: a dry run of them."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the cases name models of transformers: pip install -e '.[models]'")

from benchmarks import bench_flex
from benchmarks.bench_flex import COLUMNS, Way
from benchmarks.flex_cases import FlexCase

# After each row its tensors are given back by a collection of garbage.
pytestmark = pytest.mark.usefixtures("little_to_look_through")

DRY = Way(device="cpu", seconds=0.0, dry=True)


def row_of(model: str, call: Any, length: int = 130) -> dict[str, str]:
    row = bench_flex.prepare((FlexCase(model=model, call=call, length=length), DRY), contextlib.nullcontext())()
    assert row is not None
    assert set(row) <= set(COLUMNS)
    return row


@pytest.mark.parametrize(("model", "call"), [("documents_inside", "prefill"), ("documents_outside", "train")])
def test_a_dry_run_compares_both_sides_with_plain_attention(model: str, call: str) -> None:
    row = row_of(model, call)
    assert not row.get("failure")
    assert row["numerics"] == "ok"
    assert float(row["difference"]) < 1e-5
    assert float(row["inductor_difference"]) < 1e-5
    assert row["attentions"] == "2"
    assert int(row["sites"]) + int(row["misses"]) == 2
    if model == "documents_inside":
        assert (row["sites"], row["proved"], row["dense"]) == ("2", "2", "0")
        assert "causal ∧ document" in row["masks"]
    assert min(float(row[name]) for name in (*bench_flex.FIRST, "ratio")) > 0


def test_a_model_of_transformers_has_all_its_attentions_proved() -> None:
    row = row_of("gemma2", "train")
    assert not row.get("failure")
    assert row["numerics"] == "ok"
    assert row["attentions"] == row["sites"] == row["proved"] == "2"
    assert row["masks"].count("causal") == 2
