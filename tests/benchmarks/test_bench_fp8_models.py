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
    grouped = bench_fp8_models.model_of(dataclasses.replace(small, group=2), "cpu")
    sizes = {n: p.shape[0] for n, p in grouped.named_parameters() if n.endswith(("q_proj.weight", "k_proj.weight"))}
    assert sorted(sizes.values()) == [32, 64]
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_ratios_are_those_of_each_turn() -> None:
    """The last turn is on a machine that became slow."""
    times = {
        "bfloat16": [[3.0, 3.0], [3.0, 9.0, 3.0], [9.0]],
        "fp8, per block": [[2.0, 2.0], [2.0], [6.0, 6.0]],
        "fp8, per tensor": None,
    }
    found = [
        (
            bench_fp8_models.Job(scenario=SCENARIOS[0], side=side, device="cuda", seconds=0.1),
            None
            if turns is None
            else bench_fp8_models.merge([{"times": str(turn), "memory_gb": "1"} for turn in turns]),
        )
        for side, turns in times.items()
    ]
    rows = bench_fp8_models.rows_of(found)
    assert [row.get("ratio") for row in rows] == ["1.000", "1.500", None]
    assert [row.get("p50_ms") for row in rows] == ["3.000", "2.000", None]
    assert (rows[1]["rounds"], rows[1]["memory_gb"]) == ("5", "1")
    assert rows[2]["failure"]
    assert all(set(row) <= set(bench_fp8_models.COLUMNS) for row in rows)
