"""Rows of models that two processes train: a dry run of each way, and what is told of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the cases are models of transformers: pip install -e '.[models]'")

from torch.distributed.device_mesh import init_device_mesh

from benchmarks import bench_parallel, harness, members, parallel_cases
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

    def rows(jobs: Sequence[Job], *_: Any, until: float, **__: Any) -> Iterator[tuple[Job, dict[str, str]]]:
        for job in jobs if until > time.monotonic() else ():
            asked.append((job.way, job.model))
            yield job, {name: x for name, x in GOOD.items() if name not in KEYS}

    monkeypatch.setattr(members, "rows", rows)
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
