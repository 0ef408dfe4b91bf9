from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attn_compiler import DelayedScaling, Fp8Recipe
from benchmarks import fp8_gradients, harness
from benchmarks.fp8_gradients import BASELINE, COLUMNS, RECIPES, causal, compare, compiled, gradients, inputs


def test_a_bias_is_told_from_noise() -> None:
    exact = torch.randn(100_000, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    noise = torch.randn(100_000, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    assert compare(0.9 * exact, exact) == pytest.approx((0.1, -0.1))
    error, slope = compare(exact + 0.1 * noise, exact)
    assert error == pytest.approx(0.1, rel=2e-2)
    assert abs(slope) < 1e-3


def test_means_are_where_they_are_said_to_be() -> None:
    _, k, v = inputs("keys around 3", 256, 16)
    assert 1.5 < float(k.mean(2).square().mean().sqrt()) < 6
    assert float(v.mean(2).square().mean().sqrt()) < 0.2


def test_no_recipe_biases_gradients() -> None:
    rows = list(fp8_gradients.measure("normal", inputs("normal", 128, 32), "cpu", "reference_fp8"))
    assert [row["recipe"] for row in rows] == [BASELINE, *RECIPES, "delayed"]
    for row in rows:
        for x in "qkv":
            assert float(row[f"error_{x}"]) < (0.01 if row["recipe"] == BASELINE else 0.08)
            assert abs(float(row[f"slope_{x}"])) < 0.01


def test_delayed_scaling_has_seen_its_inputs() -> None:
    given = inputs("normal", 64, 16)
    # Beyond what fits before any scale is known.
    upstream = torch.ones(given[0].shape, dtype=torch.bfloat16)
    q, k, v = (x.bfloat16() * factor for x, factor in zip(given, (1.0, 1.0, 1000.0), strict=True))
    found = gradients(compiled(Fp8Recipe(scaling=DelayedScaling()), "reference_fp8"), (q, k, v), upstream)
    exact = gradients(causal, (q.double(), k.double(), v.double()), upstream.double())
    assert compare(found[0], exact[0])[0] < 0.1


def test_rows_are_written(tmp_path: Path) -> None:
    arguments = [str(tmp_path / "a.csv"), "--inputs", "both around 1", "--seqlen", "64", "--head-dim", "16"]
    assert fp8_gradients.main(arguments) == 0
    rows = harness.read(tmp_path / "a.csv")
    assert len(rows) == len(RECIPES) + 2
    assert set(COLUMNS) < set(rows[0])
