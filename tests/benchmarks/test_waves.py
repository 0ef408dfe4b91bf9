"""Cases are prepared side by side and finished in turn; one that dies or is late costs itself alone."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from benchmarks import waves


def prepare(case: str, lock: AbstractContextManager[Any]) -> waves.Finish:
    """Of processes: each case says what it does."""
    if case == "dies":
        os._exit(1)
    if case == "late":
        time.sleep(60)
    if case == "late with the lock":
        with lock:
            time.sleep(60)
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


def run(cases: list[str], jobs: int, *, wave_seconds: float = 30.0, until: float = float("inf")) -> list[Any]:
    return list(waves.run(cases, prepare, jobs=jobs, until=until, wave_seconds=wave_seconds))


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
    start = time.monotonic()
    found = dict(run(["late", "a"], 2, wave_seconds=5.0))
    assert found["late"] == {"failure": "it was not compiled in time"}
    assert "pid" in found["a"]
    assert time.monotonic() - start < 30


def test_no_wave_begins_after_its_time() -> None:
    assert run(["a"], 1, until=time.monotonic() - 1) == []


def test_a_wave_may_hold_more_cases_than_are_prepared_at_a_time() -> None:
    cases = ["a", "b", "c"]
    found = dict(waves.run(cases, prepare, jobs=1, until=float("inf"), wave_seconds=30.0, wave_cases=3))
    rows = [found[case] for case in cases]
    assert len({row["pid"] for row in rows if row}) == 3
    prepared = [float(row["prepared"]) for row in rows if row]
    assert prepared == sorted(prepared)
    assert prepared[-1] < min(float(row["begun"]) for row in rows if row)


def test_what_was_not_begun_in_time_says_so() -> None:
    found = dict(waves.run(["late", "a"], prepare, jobs=1, until=float("inf"), wave_seconds=5.0, wave_cases=2))
    assert found == {case: {"failure": "it was not compiled in time"} for case in ("late", "a")}


def test_processes_may_begin_with_modules() -> None:
    found = dict(waves.run(["a"], prepare, jobs=1, until=float("inf"), wave_seconds=30.0, imports=("torch",)))
    assert found["a"] is not None
    assert "pid" in found["a"]


def test_what_a_late_one_held_is_free_again() -> None:
    found = dict(run(["late with the lock", "a", "b"], 1, wave_seconds=6.0))
    assert found["late with the lock"] == {"failure": "it was not compiled in time"}
    assert "pid" in found["a"]
    assert "pid" in found["b"]


def test_cases_of_a_wave_are_finished_in_turns() -> None:
    """Forwards, then backwards; one that dies has that as its row, and its worker's next case another worker."""

    def merge(rows: Sequence[waves.Row]) -> waves.Row:
        return {"begun": " ".join(row.get("begun", row.get("failure", "")) for row in rows)}

    cases = ["a", "dies later", "b", "c"]
    given: dict[str, Any] = {"jobs": 3, "until": float("inf"), "wave_seconds": 30.0, "turns": 2, "merge": merge}
    found = {case: row["begun"] for case, row in waves.run(cases, prepare, **given) if row}
    assert found["dies later"].startswith("EOFError")
    times = sorted((float(time), case) for case in ("a", "b", "c") for time in found[case].split())
    assert [case for _, case in times] == ["a", "b", "b", "a", "c", "c"]
