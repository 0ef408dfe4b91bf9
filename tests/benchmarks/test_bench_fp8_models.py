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


def test_a_job_that_died_is_a_row_with_the_failure() -> None:
    job = bench_fp8_models.Job(scenario=SCENARIOS[0], device="cuda", seconds=0.1, sides=("bfloat16",))
    (row,) = bench_fp8_models.rows_of(job, None)
    assert set(row) <= set(bench_fp8_models.COLUMNS)
