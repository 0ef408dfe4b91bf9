"""Rows of sequences that two processes share: dry runs of an attention and of a model."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="the model is transformers' own: pip install -e '.[models]'")

from torch.distributed.device_mesh import init_device_mesh

from benchmarks import bench_shared_sequence
from benchmarks.bench_shared_sequence import COLUMNS, DECODE, MODEL, Job, Place
from tests.distributed import processes
from tests.thinned import asked_for, further

LENGTH = 32
JOBS = (
    Job(form="documents", length=LENGTH, method="all_gather", order="head_tail", rounds=1, dry=True),
    Job(form=MODEL, length=LENGTH, method="all_to_all", order="head_tail", rounds=1, dry=True),
    Job(form=DECODE, length=LENGTH, method="auto", order="head_tail", rounds=1, dry=True),
)


def rows_of(jobs: tuple[Job, ...]) -> list[dict[str, str]]:
    """Of each process."""
    place = Place(mesh=init_device_mesh("cpu", (processes.SIZE,)), device="cpu")
    found = []
    for job in jobs:
        torch.compiler.reset()
        found.append(bench_shared_sequence.measure(job, place))
    return found


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> dict[int, list[dict[str, str]]]:
    asked = asked_for(request, "at")
    by_rank = processes.run(rows_of, tuple(JOBS[at] for at in asked))
    return {at: [found[i] for found in by_rank] for i, at in enumerate(asked)}


@pytest.mark.parametrize("at", further(range(len(JOBS)), daily=()))
def test_a_dry_run_gives_the_numbers_of_one_process(rows: dict[int, list[dict[str, str]]], at: int) -> None:
    job, (first, second) = JOBS[at], rows[at]
    assert set(first) <= set(COLUMNS)
    assert first["numerics"] == second["numerics"] == "ok"
    assert first["output_difference"] == second["output_difference"]
    assert ("attends to the keys that it keeps" if job.form == DECODE else job.method) in first["note"]
    # Both ranks tell the slowest of both.
    what = "forward" if job.form == DECODE else "step"
    times = [[row[f"{side}_{what}_ms"] for side in ("whole", "shared")] for row in (first, second)]
    assert times[0] == times[1]
    share = float(times[0][0]) / processes.SIZE / float(times[0][1])
    assert float(first[f"efficiency_{what}"]) == pytest.approx(share, rel=0.02, abs=1e-3)


def test_a_nan_is_no_small_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        bench_shared_sequence.dist, "all_gather_object", lambda into, own: into.__setitem__(slice(None), [own, own])
    )
    monkeypatch.setattr(bench_shared_sequence.dist, "get_world_size", lambda: 2)
    x = torch.ones(3)
    for found, expected in ((x, "ok"), (x * 1.1, "WRONG"), (x * float("nan"), "WRONG")):
        assert bench_shared_sequence._differences([(x, x), (found, x)], "cpu")["numerics"] == expected
