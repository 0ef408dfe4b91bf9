"""Cases that groups of processes measure: turns, and that what fails costs its own row alone."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import members
from benchmarks.members import Limits, Row

LONG = 600.0


def member(rank: int, folder: str, case: str) -> None:
    """What the case says: "answer", "raise" (the second process), "die" (the second process), "late" or "slow"."""
    if case == "die":
        if rank:
            os._exit(7)
        time.sleep(3600)
    members.write(rank, folder, lambda: _measured(rank, folder, case), lambda error: f"{type(error).__name__}: {error}")


def _measured(rank: int, folder: str, case: str) -> Row:
    if case == "raise" and rank:
        raise RuntimeError("no such thing")
    if case in ("raise", "late"):
        time.sleep(3600)
    members.wait_for_turn(rank, folder)
    if case == "slow":
        time.sleep(3600)
    begin = time.monotonic()
    time.sleep(0.2)
    return {"rank": str(rank), "begin": str(begin), "end": str(time.monotonic())}


def run(cases: list[str], **limits: Any) -> list[tuple[str, Row]]:
    given = Limits(**{"together": 2, "seconds": LONG, "turn_seconds": LONG, **limits})
    # What the target is in. A server of forks that runs already has imported something else: each process imports this then.
    found = members.rows(cases, member, processes=2, limits=given, until=time.monotonic() + LONG, imports=(__name__,))
    return list(found)


@pytest.mark.further
@pytest.mark.parametrize(
    ("case", "limits", "failure"),
    [
        ("raise", {}, "rank 1: RuntimeError: no such thing"),
        ("die", {}, "a process died, exit codes [-9, 7]"),
        ("late", {"seconds": 1.0}, "TimeoutError: not ready after 1 s"),
        ("slow", {"turn_seconds": 1.0}, "TimeoutError: not timed within 1 s"),
    ],
)
def test_what_fails_is_a_row_and_nothing_is_left(case: str, limits: dict[str, float], failure: str) -> None:
    assert run([case], **limits) == [(case, {"failure": failure})]


def test_one_group_is_timed_at_a_time_and_a_failure_costs_no_other() -> None:
    found = run(["answer", "raise", "answer"], together=3)
    assert [case for case, _ in found] == ["answer", "raise", "answer"]
    assert found[1][1] == {"failure": "rank 1: RuntimeError: no such thing"}
    first, last = found[0][1], found[2][1]
    assert first["rank"] == last["rank"] == "0"
    assert float(first["end"]) <= float(last["begin"])


def test_no_wave_begins_after_the_budget(tmp_path: Path) -> None:
    limits = Limits(together=1, seconds=LONG, turn_seconds=LONG)
    left = members.rows(["answer"], member, processes=2, limits=limits, until=time.monotonic() - 1, imports=(__name__,))
    assert not list(left)
