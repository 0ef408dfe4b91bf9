"""Rows of peers: what a side gives is held against float64."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from benchmarks import bench_peers
from benchmarks.bench_peers import CASES, Job
from benchmarks.kernel_cases import Problem
from benchmarks.peer_sides import Peer
from tests.benchmarks.peer_stand_ins import stand_ins  # noqa: F401 - a fixture

ON_CPU = ("triton", "fa4", "cudnn_flex", "flex")


def job_of(place: int, folder: Path, sides: tuple[str, ...] = ON_CPU, **further: object) -> Job:
    given: dict[str, object] = {"device": "cpu", "seconds": 0.001, "by": float("inf"), **further}
    return Job(case=CASES[place].small, sides=sides, progress=str(folder / "side"), **given)  # type: ignore[arg-type]


def rows_of(job: Job) -> list[dict[str, str]]:
    return bench_peers.rows_of(job, bench_peers.prepare(job, threading.Lock())())


@pytest.mark.in_turns(3)
@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("place", range(3))
def test_every_side_is_checked_and_timed(place: int, tmp_path: Path) -> None:
    job = job_of(place, tmp_path)
    rows = rows_of(job)
    assert [(row["side"], row["pass"]) for row in rows] == [(s, p) for s in ON_CPU for p in bench_peers.PASSES]
    # FlexAttention has no backward on a CPU.
    assert [(row["side"], row["pass"]) for row in rows if row.get("failure")] == [("flex", "both")]
    ran = [row for row in rows if not row.get("failure")]
    assert [row for row in ran if float(row["error"]) > 1e-5] == []
    assert [row for row in ran if row["side"] != "triton" and float(row["differs"]) > 1e-5] == []
    assert all(float(row["tflops"]) >= 0 and float(row["p50_us"]) > 0 for row in ran)
    assert {row["side"] for row in rows if row.get("plan_us")} == {"cudnn_flex", "flex"}
    assert job.under_way == "timing"
    assert set().union(*rows) <= set(bench_peers.COLUMNS)
    bench_peers.print_table(rows)
    assert bench_peers.failures(rows) == 0


@pytest.mark.further
def test_a_wrong_side_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(problem: Problem) -> Peer:
        peer = bench_peers.PEERS["triton"](problem)
        return Peer(side=peer.side, pairs=peer.pairs, whole=lambda x: x * 1.05)

    monkeypatch.setattr(bench_peers, "PEERS", {**bench_peers.PEERS, "fa4": wrong})
    rows = rows_of(job_of(0, tmp_path, ("triton", "fa4")))
    marked = {(row["side"], row["pass"]) for row in rows if "WRONG" in bench_peers._cell(row)}
    assert marked == {("fa4", "forward"), ("fa4", "both")}
    assert bench_peers.failures(rows) == 0
    assert bench_peers.failures([row | {"side": "hopper"} for row in rows]) == 1
