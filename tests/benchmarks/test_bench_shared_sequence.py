"""Rows of sequences that two processes share: dry runs of an attention and of a model, and which rows there are."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the model is transformers' own: pip install -e '.[models]'")

from torch.distributed.device_mesh import init_device_mesh

from benchmarks import bench_shared_sequence, harness, members, shared_sequence_cases
from benchmarks.bench_shared_sequence import COLUMNS, MODEL, Job, Place
from tests.distributed import processes

LENGTH = 32
JOBS = (
    Job(form="documents", length=LENGTH, method="all_gather", order="head_tail", rounds=1, dry=True),
    Job(form=MODEL, length=LENGTH, method="all_to_all", order="head_tail", rounds=1, dry=True),
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
def rows() -> list[list[dict[str, str]]]:
    return processes.run(rows_of, JOBS)


@pytest.mark.parametrize("at", range(len(JOBS)))
def test_a_dry_run_gives_the_numbers_of_one_process(rows: list[list[dict[str, str]]], at: int) -> None:
    job, (first, second) = JOBS[at], (of_rank[at] for of_rank in rows)
    assert set(first) <= set(COLUMNS)
    assert first["numerics"] == second["numerics"] == "ok"
    assert first["output_difference"] == second["output_difference"]
    assert job.method in first["note"]
    # Both ranks tell the slowest of both.
    assert (first["whole_step_ms"], first["shared_step_ms"]) == (second["whole_step_ms"], second["shared_step_ms"])
    share = float(first["whole_step_ms"]) / processes.SIZE / float(first["shared_step_ms"])
    assert float(first["efficiency_step"]) == pytest.approx(share, rel=0.02, abs=1e-3)


def _asked(**changed: Any) -> argparse.Namespace:
    given = {
        "forms": ["causal"],
        "lengths": [64],
        "methods": ["all_gather"],
        "overlaps": [""],
        "ranks": 2,
        "rounds": 1,
        "tiny": True,
    }
    return argparse.Namespace(**given | changed)


def test_which_rows_there_are() -> None:
    peers = list(shared_sequence_cases.PEERS)
    both = bench_shared_sequence.jobs(_asked(forms=["causal", "window", MODEL], methods=["auto", peers[0]]))
    found = [(job.form, job.method, job.order) for job in both]
    assert found == [
        ("causal", "auto", "head_tail"),
        ("causal", peers[0], "head_tail"),
        ("window", "auto", "contiguous"),
        ("window", "auto", "head_tail"),
        (MODEL, "auto", "head_tail"),
    ]
    overlaps = bench_shared_sequence.jobs(_asked(forms=["causal", MODEL], overlaps=["", "reorder"]))
    assert [(job.form, job.overlap) for job in overlaps] == [("causal", ""), (MODEL, ""), (MODEL, "reorder")]


def test_rows_are_on_disk_and_a_peer_s_failure_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = next(iter(shared_sequence_cases.PEERS))
    answers = {"all_gather": {"numerics": "ok"}, peer: {"failure": "no kernel"}, "auto": {"numerics": "WRONG"}}

    def rows(jobs: list[Job], *_: Any, **__: Any) -> Any:
        return ((job, answers[job.method]) for job in jobs)

    monkeypatch.setattr(members, "rows", rows)
    path = tmp_path / "rows.csv"
    arguments = ["bench_shared_sequence", "--tiny", "--output", str(path), "--lengths", "64", "--append", "--methods"]
    for methods, expected in ((["all_gather", peer], 0), (["auto"], 1)):
        monkeypatch.setattr("sys.argv", [*arguments, *methods])
        assert bench_shared_sequence.main() == expected
    assert [row["method"] for row in harness.read(path)] == ["all_gather", peer, "auto"]


def test_a_nan_is_no_small_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        bench_shared_sequence.dist, "all_gather_object", lambda into, own: into.__setitem__(slice(None), [own, own])
    )
    monkeypatch.setattr(bench_shared_sequence.dist, "get_world_size", lambda: 2)
    x = torch.ones(3)
    for found, expected in ((x, "ok"), (x * 1.1, "WRONG"), (x * float("nan"), "WRONG")):
        assert bench_shared_sequence._differences([(x, x), (found, x)], "cpu")["numerics"] == expected
