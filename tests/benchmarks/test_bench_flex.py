"""Rows of FlexAttention models: a dry run of them, and what makes a row fall short."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the cases name models of transformers: pip install -e '.[models]'")

from benchmarks import bench_flex, compare, flex_cases, harness
from benchmarks.bench_flex import COLUMNS, Way
from benchmarks.flex_cases import FlexCase

# After each row its tensors are given back by a collection of garbage.
pytestmark = pytest.mark.usefixtures("little_to_look_through")

DRY = Way(device="cpu", seconds=0.0, dry=True)
MS = {"inductor_p50_ms": "3", "attn_compiler_p50_ms": "2"}
GOOD = {"sites": "2", "attentions": "2", "numerics": "ok", "ratio": "1.5", **MS}


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


def test_a_side_that_fails_is_named_and_what_was_found_before_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_parts = flex_cases.compile_parts

    def broken(model: Any, backend: str, options: Any, **further: Any) -> Any:
        def fail(**_: Any) -> Any:
            raise RuntimeError("no such thing\nmore")

        return fail if backend == harness.BACKEND else compile_parts(model, backend, options, **further)

    monkeypatch.setattr(flex_cases, "compile_parts", broken)
    row = row_of("documents_inside", "prefill")
    assert row == {"attentions": "2", "failure": "SideFailed: attn_compiler: RuntimeError: no such thing"}


@pytest.mark.parametrize(
    ("changed", "short"),
    [
        ({}, False),
        ({"sites": "1"}, True),
        ({"ratio": "0.9"}, True),
        ({"numerics": "WRONG"}, True),
        ({"failure": "out of memory"}, True),
    ],
)
def test_what_falls_short(changed: dict[str, str], short: bool) -> None:
    assert bench_flex.is_short(GOOD | changed) == short
    assert bench_flex.said(FlexCase(model="llama", call="train", length=8), GOOD | changed).startswith("llama/train/8")


def test_a_call_has_so_many_tokens_whatever_its_length() -> None:
    cases = bench_flex.all_cases(["llama", "gpt_oss"], ["train", "prefill"], [8192, 2048])
    assert [case.words for case in cases[:3]] == ["llama/prefill/2048", "gpt_oss/prefill/2048", "llama/train/2048"]
    assert {case.batch("full") * case.length for case in cases if case.training} == {8192}
    assert {case.batch("full") * case.length for case in cases if not case.training} == {16384}


def test_what_would_write_too_many_scores_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    large = {
        case.words
        for case in bench_flex.all_cases(flex_cases.MODELS, flex_cases.CALLS, bench_flex.LENGTHS)
        if case.scores("full") > bench_flex.MOST_SCORES
    }
    assert large == {"gpt_oss/prefill/8192", "gpt_oss/train/8192"}
    monkeypatch.setattr(bench_flex, "MOST_SCORES", -1)
    row = row_of("documents_inside", "prefill")
    assert row["numerics"] == compare.NO_MEMORY
    assert "difference" not in row


def test_too_little_memory_is_tried_again_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    first_steps, tries = bench_flex.first_steps, []
    lock = threading.Lock()

    def short_of_memory(*args: Any) -> Any:
        tries.append(lock.locked())
        if len(tries) == 1:
            raise torch.OutOfMemoryError("no memory")
        return first_steps(*args)

    monkeypatch.setattr(bench_flex, "first_steps", short_of_memory)
    monkeypatch.setattr(bench_flex, "MOST_SCORES", -1)
    case = FlexCase(model="documents_inside", call="prefill", length=130)
    row = bench_flex.prepare((case, DRY), lock)()
    assert row is not None
    assert "ratio" in row
    assert tries == [False, True]


def test_rows_are_on_disk_and_left_out_by_a_further_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "flex.csv"
    asked: list[list[str]] = []

    def measured(cases: list[FlexCase], way: Way, **_: Any) -> Any:
        asked.append([case.words for case in cases])
        return ((case, GOOD) for case in cases)

    monkeypatch.setattr(bench_flex, "measured", measured)
    command = ["bench_flex", "--tiny", "--output", str(path), "--models", "llama", "gemma2"]
    for further in (["--cases", "llama/train/*"], ["--append"]):
        monkeypatch.setattr("sys.argv", [*command, *further])
        assert bench_flex.main() == 0
    assert asked == [["llama/train/160"], ["llama/prefill/160", "gemma2/prefill/160", "gemma2/train/160"]]
    assert [row["model"] for row in harness.read(path)] == ["llama", "llama", "gemma2", "gemma2"]
    assert bench_flex.mean(harness.read(path)) == "4 rows: geometric mean 1.500, smallest 1.500"
