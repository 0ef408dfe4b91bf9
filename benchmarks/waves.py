"""Cases that are prepared (compiled, checked) in several processes at a time, and timed one after another while the others wait.

Compiling takes one core for half a minute; timing wants the GPU alone for a second. So each case of a wave has a process, so many of which
prepare theirs at a time, and once all of them are done or given up, each finishes its own in turn. A process that dies or is too late costs
its own case alone, which becomes a row with the failure. In several turns, each case of a wave is finished once a turn, so that a drift of
the machine falls on all of them: its clock falls as it warms up.

Where told what to import, processes are forked from one that has imported it: no GPU may be touched by importing that.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any

Row = dict[str, str]
#: what is left of a case once it is prepared: gives its row, or None where there is no such case
Finish = Callable[[], Row | None]
#: a case and a lock, which is held where a lot of the GPU's memory is needed
Prepare = Callable[[Any, AbstractContextManager[Any]], Finish]

#: each case with its row
Found = Iterator[tuple[Any, Row | None]]

_SPAWN, _FORKSERVER = multiprocessing.get_context("spawn"), multiprocessing.get_context("forkserver")
_Context = SpawnContext | ForkServerContext
_READY, _FINISH, _DONE = "ready", "finish", "done"


@dataclass(kw_only=True)
class Worker:
    """A process that waits for cases."""

    process: BaseProcess
    connection: Connection

    @classmethod
    def start(cls, context: _Context, prepare: Prepare, lock: Any) -> Worker:
        """A new one."""
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(there, prepare, lock), daemon=True)
        process.start()
        there.close()
        return cls(process=process, connection=here)

    def is_ready(self) -> bool:
        """Whether its case is prepared, once it says something. Raises EOFError where it died."""
        return bool(self.connection.recv() == _READY)

    def finish(self, seconds: float) -> Row | None:
        """The row of its case. Raises EOFError where it died, TimeoutError where it takes longer."""
        self.connection.send(_FINISH)
        if not self.connection.poll(seconds):
            raise TimeoutError(f"timing took more than {seconds:.0f} s")
        row: Row | None = self.connection.recv()
        return row

    def let_go(self) -> None:
        """Of its case: it may have another."""
        self.connection.send(_DONE)

    def end(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.join()
        self.connection.close()


def _serve(connection: Connection, prepare: Prepare, lock: Any) -> None:
    while (case := connection.recv()) is not None:
        finish = prepare(case, lock)
        connection.send(_READY)
        while connection.recv() == _FINISH:
            connection.send(finish())


def asked(given: argparse.Namespace) -> dict[str, Any]:
    """Of the options of a `Bench` with jobs, what `run` takes."""
    return {"jobs": given.jobs, "wave_seconds": given.wave_seconds, "wave_cases": given.wave_cases}


def rows_of(given: Row | None) -> list[Row]:
    """Those that a finished case gave as JSON; none where it failed."""
    found: list[Row] = json.loads((given or {}).get("rows", "[]"))
    return found


def run(
    cases: Sequence[Any],
    prepare: Prepare,
    *,
    jobs: int,
    until: float,
    wave_seconds: float,
    wave_cases: int | None = None,
    imports: Sequence[str] = (),
    finish_seconds: float = 60.0,
) -> Found:
    """Each case with its row, as soon as it is there. prepare: a function of a module; what it raises ends its process.

    until: of time.monotonic(); no wave begins later. wave_seconds: how long the cases of a wave may be prepared. wave_cases: how
    many cases it has, of which the first ones are prepared first (None: jobs). imports: modules that processes begin with.
    """
    context: _Context = _FORKSERVER if imports else _SPAWN
    _FORKSERVER.set_forkserver_preload(list(imports))
    # With flash-attn, transformers asks for GPUs when it is imported; asked through CUDA, processes forked later could not use one.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    lock = context.Lock()
    workers: dict[int, Worker] = {}
    try:
        for start in range(0, len(cases), wave_cases or jobs):
            if time.monotonic() > until:
                return
            wave = cases[start : start + (wave_cases or jobs)]
            deadline = time.monotonic() + wave_seconds
            start_one = functools.partial(Worker.start, context, prepare, lock)
            late = _prepare(wave, workers, start_one, jobs, deadline)
            ended = [workers.pop(place) for place in late.keys() & workers.keys()]
            for worker in ended:
                worker.end()
            prepared = [place for place in range(len(wave)) if place not in late]
            for place, case in enumerate(wave):
                yield case, {"failure": late[place]} if place in late else _row(workers, place, finish_seconds)
            for worker in (workers[place] for place in prepared if place in workers):
                worker.let_go()
            if ended:
                # One of them may have held the lock, which nobody gives back then: those who know it end, too.
                for worker in workers.values():
                    worker.end()
                workers.clear()
                lock = context.Lock()
    finally:
        for worker in workers.values():
            worker.end()


def _prepare(
    wave: Sequence[Any], workers: dict[int, Worker], start: Callable[[], Worker], jobs: int, deadline: float
) -> dict[int, str]:
    """Prepare the cases of a wave, so many at a time. The places of those that are not ready before the deadline, and why."""
    late = dict.fromkeys(range(len(wave)), "it was not compiled in time")
    waiting, busy = iter(enumerate(wave)), dict[Any, int]()
    while (left := deadline - time.monotonic()) > 0:
        for place, case in itertools.islice(waiting, jobs - len(busy)):
            workers[place] = workers.get(place) or start()
            workers[place].connection.send(case)
            busy[workers[place].connection] = place
        if not busy:
            break
        for connection in multiprocessing.connection.wait(list(busy), left):
            place = busy.pop(connection)
            try:
                if workers[place].is_ready():
                    del late[place]
            except EOFError:
                late[place] = "its process died"
    return late


def _row(workers: dict[int, Worker], place: int, seconds: float) -> Row | None:
    try:
        return workers[place].finish(seconds)
    except (EOFError, OSError, TimeoutError) as failure:
        workers.pop(place).end()
        return {"failure": f"{type(failure).__name__}: {failure}"[:200]}
