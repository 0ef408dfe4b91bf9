"""Rows of models that two processes train: a dry run of each way, and that a process that fails costs its own row alone."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the cases are models of transformers: pip install -e '.[models]'")

from torch.distributed.device_mesh import init_device_mesh

from benchmarks import bench_parallel, harness, parallel_cases
from benchmarks.bench_parallel import COLUMNS, KEYS, Job
from benchmarks.parallel_cases import WAYS, Context
from tests.distributed import processes

GOOD = {
    "way": "tp",
    "model": "llama",
    "attentions": "4",
    "sites": "4",
    "misses": "0",
    "proved": "4",
    "dense": "0",
    "lowerings": "triton x4",
    "why": "",
    "ratio": "1.5",
    "inductor_p50_ms": "3",
    "attn_compiler_p50_ms": "2",
    **dict.fromkeys(bench_parallel.DIFFERENCES, "0.001"),
    "numerics": "ok",
}
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
def rows() -> list[dict[str, dict[str, str]]]:
    return processes.run(rows_of, JOBS)


@pytest.mark.parametrize("way", JOBS)
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


# ---- a process that fails -------------------------------------------------------------------------------------------


def one_raises(rank: int, folder: str, job: Job) -> None:
    bench_parallel._joined = _raising if rank else _waiting
    bench_parallel.member(rank, folder, job)


def _raising(*_: Any) -> dict[str, str]:
    raise RuntimeError("no such thing\nmore")


def _waiting(*_: Any) -> dict[str, str]:
    time.sleep(3600)
    return {}


def one_dies(rank: int, folder: str, job: Job) -> None:
    if rank:
        os._exit(7)
    time.sleep(3600)


def both_wait(rank: int, folder: str, job: Job) -> None:
    time.sleep(3600)


def both_answer(rank: int, folder: str, job: Job) -> None:
    bench_parallel._joined = _answering
    bench_parallel.member(rank, folder, job)


def _answering(rank: int, *_: Any) -> dict[str, str]:
    return {"ratio": str(rank)}


@pytest.mark.parametrize(
    ("target", "seconds", "row"),
    [
        (both_answer, 600.0, {"ratio": "0"}),
        (one_raises, 600.0, {"failure": "rank 1: RuntimeError: no such thing"}),
        (one_dies, 600.0, {"failure": "a process died, exit codes [-9, 7]"}),
        (both_wait, 1.0, {"failure": "TimeoutError: not done after 1 s"}),
    ],
)
def test_what_fails_is_a_row_and_nothing_is_left(
    target: Any, seconds: float, row: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the targets are in. A server of forks that runs already has imported something else: each process imports this then.
    monkeypatch.setattr(bench_parallel, "IMPORTS", (__name__,))
    assert bench_parallel.measured(JOBS["ddp"], seconds, target) == row


# ---- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "short"),
    [
        ({}, False),
        ({"sites": "3"}, True),
        ({"sites": "1", "way": "fsdp"}, False),
        ({"sites": "0", "way": "fsdp"}, True),
        ({"misses": "1"}, True),
        ({"dense": "1"}, True),
        ({"ratio": "0.9"}, True),
        ({"numerics": "WRONG"}, True),
        ({"pinned": "NO"}, True),
        ({"failure": "out of memory"}, True),
    ],
)
def test_what_falls_short(changed: dict[str, str], short: bool) -> None:
    row = GOOD | changed
    assert bench_parallel.is_short(row) == short
    assert ("FAILED" in bench_parallel.said(row)) == ("failure" in changed)


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


def test_ways_and_models_are_chosen_and_rows_are_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def measured(job: Job, seconds: float) -> dict[str, str]:
        asked.append((job.way, job.model))
        return {name: x for name, x in GOOD.items() if name not in KEYS}

    monkeypatch.setattr(bench_parallel, "measured", measured)
    path = tmp_path / "rows.csv"
    for further in (["--models", "gemma3"], ["--append"], ["--append", "--budget-seconds", "-1", "--ways", "ddp"]):
        arguments = ["bench_parallel", "--tiny", "--output", str(path), "--ways", "tp", *further]
        monkeypatch.setattr("sys.argv", arguments)
        assert bench_parallel.main() == 0
    assert asked == [("tp", "gemma3"), ("tp", "llama")]
    rows = harness.read(path)
    assert [(row["way"], row["model"], row["ratio"]) for row in rows] == [
        ("tp", "gemma3", "1.5"),
        ("tp", "llama", "1.5"),
    ]
    assert bench_parallel.means(rows) == ["tp: 2 rows, ratio 1.500", "all: 2 rows, ratio 1.500"]
