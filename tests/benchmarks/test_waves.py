"""Cases are prepared side by side and finished in turn; one that dies or is late costs itself alone."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from benchmarks import waves

#: seconds that no test waits, however busy the machine is
NEVER = 3600.0


def prepare(case: str, lock: AbstractContextManager[Any]) -> waves.Finish:
    """Of processes: each case says what it does."""
    if case == "dies":
        os._exit(1)
    if case == "late":
        time.sleep(NEVER)
    if case == "late with the lock":
        with lock:
            time.sleep(NEVER)
    with lock:
        prepared = time.monotonic()

    def finish() -> waves.Row | None:
        if case == "dies later":
            os._exit(1)
        begun = time.monotonic()
        time.sleep(0.1)
        times = {"prepared": str(prepared), "begun": str(begun), "ended": str(time.monotonic())}
        return None if case == "none" else {"pid": str(os.getpid()), **times}

    return finish


def run(cases: list[str], jobs: int, *, until: float = float("inf"), **further: Any) -> list[Any]:
    given: dict[str, Any] = {"wave_seconds": NEVER, "finish_seconds": NEVER, **further}
    return list(waves.run(cases, prepare, jobs=jobs, until=until, **given))


def run_beside_a_late_one(cases: list[str], jobs: int, **further: Any) -> dict[str, Any]:
    """Waves that end before a late one does, and are long enough for the others on this machine, as it is now."""
    seconds, others = 1.25, [case for case in cases if not case.startswith("late")]
    while True:
        found = dict(run(cases, jobs, wave_seconds=seconds, **further))
        if seconds > NEVER / 20 or all("pid" in (found[case] or ()) for case in others):
            return found
        seconds *= 4


def test_a_wave_is_prepared_whole_before_its_cases_are_finished_one_by_one() -> None:
    found = run(["a", "b", "c"], 2)
    assert [case for case, _ in found] == ["a", "b", "c"]
    first, second, third = (row for _, row in found)
    assert first["pid"] != second["pid"]
    assert first["pid"] == third["pid"]
    assert float(second["prepared"]) < float(first["begun"])
    assert float(first["ended"]) < float(second["begun"])
    assert float(second["ended"]) < float(third["prepared"])


def test_one_that_dies_costs_its_own_case() -> None:
    found = dict(run(["dies", "none", "dies later", "a"], 2))
    assert found["dies"] == {"failure": "its process died"}
    assert found["none"] is None
    assert found["dies later"]["failure"].startswith("EOFError")
    assert "pid" in found["a"]


def test_one_that_is_late_is_left_behind() -> None:
    found = run_beside_a_late_one(["late", "a"], 2)
    assert found["late"] == {"failure": "it was not compiled in time"}
    assert "pid" in found["a"]


def test_what_a_late_one_held_is_free_again() -> None:
    found = run_beside_a_late_one(["late with the lock", "a", "b"], 1)
    assert found["late with the lock"] == {"failure": "it was not compiled in time"}
    assert "pid" in found["a"]
    assert "pid" in found["b"]


def test_cases_of_a_wave_are_finished_in_turns() -> None:
    """Forwards, then backwards; one that dies has that as its row, and its worker's next case another worker."""

    def merge(rows: Sequence[waves.Row]) -> waves.Row:
        return {"begun": " ".join(row.get("begun", row.get("failure", "")) for row in rows)}

    cases = ["a", "dies later", "b", "c"]
    found = {case: row["begun"] for case, row in run(cases, 3, turns=2, merge=merge) if row}
    assert found["dies later"].startswith("EOFError")
    times = sorted((float(time), case) for case in ("a", "b", "c") for time in found[case].split())
    assert [case for _, case in times] == ["a", "b", "b", "a", "c", "c"]
