"""Cases that are prepared (compiled, checked) in several processes at a time, and timed one after another while the others wait.

Compiling takes one core for half a minute; timing wants the GPU alone for a second. So each wave is prepared by as many processes as
there are, and once all of them are done or given up, each finishes its own in turn. A process that dies or is too late costs its own
case alone, which becomes a row with the failure.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

Row = dict[str, str]
#: what is left of a case once it is prepared: gives its row, or None where there is no such case
Finish = Callable[[], Row | None]
#: a case and a lock, which is held where a lot of the GPU's memory is needed
Prepare = Callable[[Any, AbstractContextManager[Any]], Finish]

_CONTEXT = multiprocessing.get_context("spawn")
_READY = "ready"


@dataclass(kw_only=True)
class Worker:
    """A process that waits for cases."""

    process: BaseProcess
    connection: Connection

    @classmethod
    def start(cls, prepare: Prepare, lock: Any) -> Worker:
        """A new one."""
        here, there = _CONTEXT.Pipe()
        process = _CONTEXT.Process(target=_serve, args=(there, prepare, lock), daemon=True)
        process.start()
        there.close()
        return cls(process=process, connection=here)

    def is_ready(self, deadline: float) -> bool:
        """Whether its case is prepared before that time. Raises EOFError where it died."""
        return self.connection.poll(max(deadline - time.monotonic(), 0.0)) and self.connection.recv() == _READY

    def finish(self, seconds: float) -> Row | None:
        """The row of its case. Raises EOFError where it died, TimeoutError where it takes longer."""
        self.connection.send(_READY)
        if not self.connection.poll(seconds):
            raise TimeoutError(f"timing took more than {seconds:.0f} s")
        row: Row | None = self.connection.recv()
        return row

    def end(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.join()
        self.connection.close()


def _serve(connection: Connection, prepare: Prepare, lock: Any) -> None:
    while (case := connection.recv()) is not None:
        finish = prepare(case, lock)
        connection.send(_READY)
        connection.recv()
        connection.send(finish())


def add_arguments(parser: argparse.ArgumentParser, *, budget_seconds: float) -> None:
    """What a script asks for that runs its cases in waves. budget_seconds: unless told otherwise."""
    parser.add_argument(
        "--budget-seconds", type=float, default=budget_seconds, help="start no case after this (%(default)s)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="compile so many cases at a time (%(default)s)")
    parser.add_argument("--wave-seconds", type=float, default=120.0, help="how long these may compile (%(default)s)")


def run(
    cases: Sequence[Any],
    prepare: Prepare,
    *,
    jobs: int,
    until: float,
    wave_seconds: float,
    finish_seconds: float = 60.0,
) -> Iterator[tuple[Any, Row | None]]:
    """Each case with its row, as soon as it is there. prepare: a function of a module; what it raises ends its process.

    until: of time.monotonic(); no wave begins later. wave_seconds: how long the cases of a wave may be prepared.
    """
    lock = _CONTEXT.Lock()
    workers: dict[int, Worker] = {}
    try:
        for start in range(0, len(cases), jobs):
            if time.monotonic() > until:
                return
            wave = cases[start : start + jobs]
            for place, case in enumerate(wave):
                workers[place] = workers.get(place) or Worker.start(prepare, lock)
                workers[place].connection.send(case)
            deadline = time.monotonic() + wave_seconds
            late = dict(_late(workers, len(wave), deadline))
            for place in late:
                workers.pop(place).end()
            for place, case in enumerate(wave):
                yield case, {"failure": late[place]} if place in late else _row(workers, place, finish_seconds)
    finally:
        for worker in workers.values():
            worker.end()


def _late(workers: Mapping[int, Worker], count: int, deadline: float) -> Iterator[tuple[int, str]]:
    """The places of those that are not ready in time, and why."""
    for place in range(count):
        try:
            if not workers[place].is_ready(deadline):
                yield place, "it was not compiled in time"
        except EOFError:
            yield place, "its process died"


def _row(workers: dict[int, Worker], place: int, seconds: float) -> Row | None:
    try:
        return workers[place].finish(seconds)
    except (EOFError, OSError, TimeoutError) as failure:
        workers.pop(place).end()
        return {"failure": f"{type(failure).__name__}: {failure}"[:200]}
