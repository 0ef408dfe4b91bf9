"""Rows of models that two processes train: a dry run of each way, and how differences are judged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the cases are models of transformers: pip install -e '.[models]'")

from torch.distributed.device_mesh import init_device_mesh

from benchmarks import bench_parallel, harness, parallel_cases
from benchmarks.bench_parallel import COLUMNS, Job
from benchmarks.parallel_cases import WAYS, Context
from tests.distributed import processes
from tests.thinned import asked_for, further

#: of the others tests/distributed and tests/integrations have the like
JOBS = {
    way: Job(way=way, model=model, rounds=2, dry=True) for way, model in (("ddp", "llama"), ("tp_sequence", "gemma3"))
}


def rows_of(jobs: Mapping[str, Job]) -> dict[str, dict[str, str]]:
    """Of each process."""
    mesh = init_device_mesh("cpu", (processes.SIZE,))
    rows = {}
    for name, job in jobs.items():
        torch.compiler.reset()
        rows[name] = bench_parallel.measure(job, Context(name=job.model, size=job.size, mesh=mesh, device="cpu"))
    return rows


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> list[dict[str, dict[str, str]]]:
    return processes.run(rows_of, {way: JOBS[way] for way in asked_for(request, "way")})


@pytest.mark.parametrize("way", further(JOBS, daily=()))
@pytest.mark.parametrize("rank", range(processes.SIZE))
def test_a_dry_run_finds_and_proves_every_attention(rows: list[dict[str, dict[str, str]]], way: str, rank: int) -> None:
    row = rows[rank][way]
    assert set(row) <= set(COLUMNS)
    assert (row["attentions"], row["sites"], row["misses"]) == ("2", "2", "0")
    assert (row["proved"], row["dense"]) == (row["sites"], "0")
    assert "key padding" in row["masks"]
    assert (int(row["graphs"]) > 1) == (way == "ddp")
    assert row["numerics"] == "ok"
    assert float(row["gradient_difference"]) < 1e-4
    if rank == 0:
        assert not bench_parallel.is_short({"way": way, **row, "ratio": "1"})


def test_processes_have_data_of_their_own_or_the_same() -> None:
    first, second = (parallel_cases.batch("llama", "small", "cpu", seed) for seed in range(2))
    assert not first["input_ids"].equal(second["input_ids"])
    assert not first["attention_mask"].all()
    assert (first["labels"][first["attention_mask"] == 0] == -100).all()
    assert {name for name, way in WAYS.items() if way.own_data} == {"ddp", "fsdp", "fsdp_layers"}


# ---- rows -----------------------------------------------------------------------------------------------------------


def test_ours_may_be_twice_as_far_from_the_uncompiled_step_as_inductor() -> None:
    exact = torch.randn(64)

    def numbers(ours: float, inductors: float) -> Any:
        off = {"": 0.0, harness.BACKEND: ours, harness.BASELINE: inductors}
        return {side: (torch.tensor(1.0), {"w": exact * (1 + by), "v": exact}) for side, by in off.items()}

    found = bench_parallel._differences(numbers(0.02, 0.01))
    assert found["numerics"] == "ok"
    assert found["gradient_difference"] == "0.02"
    assert found["inductor_gradient_difference"] == "0.01"
    assert bench_parallel._differences(numbers(0.03, 0.01))["numerics"] == "WRONG"


def test_a_gradient_that_is_missing_is_no_small_difference() -> None:
    w = torch.ones(2)
    assert parallel_cases.largest_difference({"w": w}, {"w": w, "v": w}) == float("inf")
    assert parallel_cases.largest_difference({"w": w, "v": w * 1.5}, {"w": w, "v": w}) == pytest.approx(0.5)
