"""Processes that are lost cost their job, and nothing else."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fuzz import crew
from tests.fuzz.crew import Ended, Limits, Lost, Spent, Tell


@dataclass(frozen=True)
class Do:
    what: str

    def run(self, tell: Tell) -> None:
        tell(f"began {self.what}")
        if self.what == "sleep":
            time.sleep(60)
        if self.what == "exit":
            os._exit(3)
        if self.what == "raise":
            raise ValueError("as asked")
        if self.what == "spend":
            raise Spent
        if self.what == "hold":
            held = bytearray(5 << 28)
            time.sleep(60)
            del held
        os.write(1, b"a line\n" * 20)


@pytest.mark.further
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_every_job_comes_to_an_end(method: str, tmp_path: Path) -> None:
    # A fork begins with all that this process has loaded.
    pages = int(Path("/proc/self/statm").read_text().split()[1]) if method == "fork" else 0
    memory = (1 << 30) + pages * os.sysconf("SC_PAGE_SIZE")
    limits = Limits(processes=2, method=method, silence=12.0, memory=memory, renewed=2, logs=tmp_path)
    jobs = [Do(what) for what in ("a", "exit", "raise", "spend", "hold", "sleep", "b", "c", "d")]
    told = list(crew.events(iter(jobs), limits))
    assert [job for job, x in told if isinstance(x, str)] != []
    ends = {job.what: x for job, x in told if isinstance(x, Ended | Lost)}
    assert ends.keys() == {job.what for job in jobs}
    assert all(ends[name] == Ended() for name in "abcd")
    assert ends["raise"] == Ended(text="ValueError: as asked")
    assert ends["spend"] == Ended(spent=True)
    kinds = {name: x.kind for name, x in ends.items() if isinstance(x, Lost)}
    assert kinds == {"exit": "crash", "hold": "memory", "sleep": "hang"}
    assert "with 3" in str(ends["exit"].text)
    assert "in run" in str(ends["sleep"].text)
