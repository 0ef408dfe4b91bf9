"""Cells measured in processes of their own, several at a time, each tied to two cores that no other has. Linux."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import harness
from benchmarks.harness import Row, arg

#: of a benchmark that measures so
OPTIONS = (
    harness.PATTERNS,
    arg("--jobs", type=int, default=1, help="processes, each on two cores of its own (%(default)s)"),
    arg("--group", help="cells to measure in this process, as JSON: how the command calls itself"),
)
#: how a process answers: a row as JSON behind it
_ROW = "row "
#: seconds more for what a process has begun
_GRACE = 60.0


@dataclass(frozen=True, kw_only=True)
class SideBySide:
    """module: of the benchmark, which calls `answer` where it is asked for a group. group: what cells of one process share.
    environment: what such a process is started with."""

    module: str
    group: Callable[[Any], tuple[str, ...]]
    environment: Callable[[Any, Namespace], Mapping[str, str]]

    def rows(self, cells: Sequence[Any], given: Namespace) -> Iterator[Iterator[Row]]:
        """Those of each cell, as they come; groups begin in their order."""
        groups: dict[tuple[str, ...], list[Any]] = {}
        for cell in cells:
            groups.setdefault(self.group(cell), []).append(cell)
        waiting: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        for group in groups.values():
            waiting.put(group)
        found: queue.SimpleQueue[list[Row] | None] = queue.SimpleQueue()
        mine = sorted(os.sched_getaffinity(0))
        jobs = max(1, min(given.jobs, len(mine) // 2))

        def work(cores: Sequence[int]) -> None:
            while time.monotonic() < given.until:
                try:
                    group = waiting.get_nowait()
                except queue.Empty:
                    break
                for rows in self._of_process(group, cores, given):
                    found.put(rows)
            found.put(None)

        for job in range(jobs):
            threading.Thread(target=work, args=(mine[2 * job : 2 * job + 2],), daemon=True).start()
        while jobs:
            rows = found.get()
            jobs -= rows is None
            if rows is not None:
                yield iter(rows)

    def _of_process(self, group: Sequence[Any], cores: Sequence[int], given: Namespace) -> Iterator[list[Row]]:
        left = given.until - time.monotonic()
        command = [
            *("taskset", "-c", ",".join(map(str, cores)), sys.executable, "-m", self.module),
            *("--group", json.dumps([asdict(cell) for cell in group])),
            *("--seconds", str(given.seconds), "--budget-seconds", str(left)),
        ]
        told = {**os.environ, **self.environment(group[0], given)}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=told)
        assert process.stdout is not None
        errors = process.stderr
        timer = threading.Timer(left + _GRACE, process.kill)
        timer.start()
        said: list[str] = []
        reader = threading.Thread(target=lambda: said.extend(errors or ()), daemon=True)
        reader.start()
        yield from (json.loads(line.removeprefix(_ROW)) for line in process.stdout if line.startswith(_ROW))
        process.wait()
        timer.cancel()
        reader.join()
        if process.returncode:
            sys.stderr.write("".join(said[-5:]))


def answer(given: Namespace, cell: type[Any], measured: Callable[[Any, Namespace], list[Row]]) -> int | None:
    """In a process that was started for a group, print the rows of its cells while there is time; None in any other. What fails of a cell
    is its row."""
    if given.group is None:
        return None
    for fields in json.loads(given.group):
        one = cell(**fields)
        if time.monotonic() > given.until:
            break
        start = time.monotonic()
        try:
            rows = measured(one, given)
        except Exception as error:  # noqa: BLE001 (what fails of a cell is its row)
            rows = [{"failure": harness.failure(error)}]
        took = f"{time.monotonic() - start:.1f}"
        sys.stdout.write(_ROW + json.dumps([{**one.names, **row, "took_s": took} for row in rows]) + "\n")
        sys.stdout.flush()
    return 0
