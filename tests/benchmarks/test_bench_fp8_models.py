from __future__ import annotations

import dataclasses

import torch

from benchmarks import bench_fp8_models
from benchmarks.bench_fp8_models import SCENARIOS


def test_models_have_the_sizes_that_their_rows_say() -> None:
    small = dataclasses.replace(SCENARIOS[0], hidden=64, heads=2, batch=1, seqlen=64, layers=1)
    assert small.columns["head_dim"] == "32"
    model = bench_fp8_models.model_of(small, "cpu")
    assert model.training
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_rows_have_their_columns() -> None:
    assert set(SCENARIOS[0].columns) | {"side"} == set(bench_fp8_models.KEYS)
    bench_fp8_models.print_table([SCENARIOS[0].columns | {"side": "bfloat16", "p50_ms": "1"}])


def test_ratios_are_those_to_the_mean_of_both_runs_in_bfloat16() -> None:
    times = (("bfloat16", "3"), ("fp8, per block", "2"), ("fp8, per tensor", None), ("bfloat16", "1"))
    found = [
        (
            bench_fp8_models.Job(scenario=SCENARIOS[0], side=side, device="cuda", seconds=0.1),
            None if time is None else {"p50_ms": time},
        )
        for side, time in times
    ]
    rows = bench_fp8_models.rows_of(found)
    assert [row.get("ratio") for row in rows] == ["0.667", "1.000", None, "2.000"]
    assert rows[2]["failure"]
    assert all(set(row) <= set(bench_fp8_models.COLUMNS) for row in rows)
