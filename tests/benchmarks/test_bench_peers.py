"""Rows of peers: what a side gives is held against float64, and one that fails, hangs or kills its process costs itself alone."""

from __future__ import annotations

import csv
import json
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks import bench_peers, waves
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


def test_what_is_not_there_or_is_not_begun_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    rows = rows_of(job_of(5, tmp_path, ("hopper", "fa4", "triton"), failed={"triton": "it hung"}))
    said = {row["side"]: row["failure"] for row in rows}
    assert said["triton"] == "it hung"
    assert said["hopper"].startswith("ValueError")
    assert "flash_attn" in said["fa4"]
    assert bench_peers.failures(rows) == 1
    late = rows_of(job_of(5, tmp_path, ("triton",), by=time.monotonic() - 1))
    assert {row["failure"] for row in late} == {"no time was left to compile it"}


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


def test_a_case_whose_side_broke_its_process_is_tried_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [job_of(place, tmp_path, ("triton", "flex")) for place in (0, 1)]
    jobs = [bench_peers.replace(job, progress=f"{job.progress}{i}") for i, job in enumerate(jobs)]
    asked: list[list[Job]] = []

    def run(given: list[Job], prepare: object, **further: object) -> list[tuple[Job, waves.Row | None]]:
        asked.append(list(given))
        found: list[tuple[Job, waves.Row | None]] = []
        for i, job in enumerate(given):
            is_first = len(asked) == 1 and i == 0
            job.begin("flex" if is_first else "timing")
            row = {"side": "flex", "failure": job.failed.get("flex", "")}
            found.append((job, {"failure": "it died"} if is_first else {"rows": json.dumps([job.case.columns | row])}))
        return found

    monkeypatch.setattr(waves, "run", run)
    in_time = time.monotonic() + 100
    rows = list(bench_peers.results(jobs, until=in_time, at_once=2, wave_seconds=1))
    assert [(row["case"], row["failure"]) for (row,) in rows] == [(CASES[1].name, ""), (CASES[0].name, "it died")]
    assert asked[1][0].failed == {"flex": "it died"}
    asked.clear()
    rows = list(bench_peers.results(jobs, until=time.monotonic() + 1, at_once=2, wave_seconds=1))
    assert [row["failure"] for (row,) in rows] == ["", "it died"]
    assert len(asked) == 1
    assert list(bench_peers.results([], until=in_time, at_once=2, wave_seconds=1)) == []


def test_a_run_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "peers.csv"
    arguments = [
        "--device",
        "cpu",
        "--size",
        "small",
        "--seconds",
        "0.001",
        "--commit",
        "abc",
        "--cases",
        "causal_d128*",
    ]
    monkeypatch.setattr(sys, "argv", ["bench_peers", *arguments, "--sides", "triton", "--output", str(output)])

    def run(given: list[Job], prepare: object, **further: object) -> list[tuple[Job, waves.Row | None]]:
        return [(job, bench_peers.prepare(job, threading.Lock())()) for job in given]

    monkeypatch.setattr(waves, "run", run)
    assert bench_peers.main() == 0
    with output.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["case"] for row in rows} == {"causal_d128_s8192", "causal_d128_s2048"}
    assert {(row["side"], row["commit"]) for row in rows} == {("triton", "abc")}


def test_cases_are_those_of_the_issue() -> None:
    assert len({case.name for case in CASES}) == len(CASES) == 10
    assert all(case.batch * case.seqlen == 16384 for case in CASES)
    assert all(case.head_dim in (64, 128) for case in CASES)
