"""Processes that do jobs and are watched: one that hangs, crashes or takes too much memory costs its job, and another takes its place."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from tests import quick

Tell = Callable[[Any], None]

#: what is imported before a process that is forked by a server; a module that is not there yet costs each process its import
PRELOADED = ["tests.fuzz.warmed"]
#: bytes of a process's log beyond which it begins anew
LOG = 1 << 20
#: lines of a log that a loss is told with
SAID = 30


class Job(Protocol):
    """What a process is given to do. It can be pickled."""

    def run(self, tell: Tell) -> None: ...


J = TypeVar("J", bound=Job)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """processes: how many at a time. method: how they start: "fork", "forkserver" or "spawn". silence: seconds without a word after which
    a process hangs. memory: bytes that one may hold. renewed: jobs after which one is replaced: what compiling leaves behind is not all
    given back. logs: a folder for what they print; without one it is lost.
    """

    processes: int
    method: str = "forkserver"
    silence: float = 180.0
    memory: int = 6 << 30
    renewed: int = 12
    logs: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Lost:
    """A process that ended before its job did. kind: "hang", "crash" or "memory"."""

    kind: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A job that came to its end. text: of the error that it raised, if it did. spent: the process is of no more use."""

    text: str | None = None
    spent: bool = False


class Spent(Exception):
    """Raised by a job that is done, in a process that can do no other: after an error of CUDA every call fails."""


@dataclass(kw_only=True)
class _Worker(Generic[J]):
    process: Any
    pipe: Any
    log: Path | None
    job: J | None = None
    heard: float = field(default_factory=time.monotonic)
    done: int = 0


def total_memory() -> int:
    """Of this machine, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def events(jobs: Iterator[J], limits: Limits) -> Iterator[tuple[J, Any]]:
    """(job, what it told) as it comes; the last of each job is an Ended or a Lost. Jobs are taken one by one, when a process is free."""
    context = multiprocessing.get_context(limits.method)
    if limits.method == "forkserver":
        context.set_forkserver_preload(PRELOADED)
    numbers = iter(range(sys.maxsize))
    crew: list[_Worker[J]] = []
    waiting: J | None = next(jobs, None)
    try:
        while True:
            while waiting is not None:
                free = next((w for w in crew if w.job is None), None)
                if free is None and len(crew) < limits.processes:
                    crew.append(free := _start(context, limits, next(numbers)))
                if free is None:
                    break
                free.job, free.heard = waiting, time.monotonic()
                # A process that died in the meantime is noticed when it is listened to.
                with contextlib.suppress(OSError):
                    free.pipe.send(waiting)
                waiting = next(jobs, None)
            busy = [w for w in crew if w.job is not None]
            if not busy:
                return
            ready = multiprocessing.connection.wait([w.pipe for w in busy], timeout=1.0)
            for worker in busy:
                yield from _heard(worker, limits) if worker.pipe in ready else _watched(worker, limits)
            crew = [w for w in crew if w.job is not None or not _is_over(w, limits)]
    finally:
        for worker in crew:
            _end(worker, signal.SIGKILL)


def _start(context: Any, limits: Limits, number: int) -> _Worker[Any]:
    ours, its = context.Pipe()
    log = None if limits.logs is None else limits.logs / f"{number:04}.log"
    process = context.Process(target=_serve, args=(its, log), daemon=True)
    process.start()
    its.close()
    return _Worker(process=process, pipe=ours, log=log)


def _heard(worker: _Worker[J], limits: Limits) -> Iterator[tuple[J, Any]]:
    job = worker.job
    assert job is not None
    try:
        told = worker.pipe.recv()
    except (EOFError, OSError):
        worker.process.join(10)
        code = worker.process.exitcode
        yield job, _lost(worker, "crash", f"the process ended with {code}")
        return
    worker.heard = time.monotonic()
    if isinstance(told, Ended):
        worker.job, worker.done = None, limits.renewed if told.spent else worker.done + 1
    yield job, told


def _watched(worker: _Worker[J], limits: Limits) -> Iterator[tuple[J, Any]]:
    assert worker.job is not None
    if time.monotonic() - worker.heard > limits.silence:
        # Its faulthandler prints where it hangs.
        _end(worker, signal.SIGABRT)
        yield worker.job, _lost(worker, "hang", f"nothing was heard for {limits.silence:g} seconds")
    elif (held := _held(worker)) > limits.memory:
        yield worker.job, _lost(worker, "memory", f"the process held {held / 2**30:.1f} GiB")


def _lost(worker: _Worker[Any], kind: str, text: str) -> Lost:
    _end(worker, signal.SIGKILL)
    worker.job = None
    lines = [] if worker.log is None or not worker.log.exists() else worker.log.read_text(errors="replace").splitlines()
    return Lost(kind=kind, text="\n".join([text, *(line[:200] for line in lines[-SAID:])]))


def _is_over(worker: _Worker[Any], limits: Limits) -> bool:
    """Whether a free process is gone, or is to be replaced; it is ended then."""
    if worker.process.is_alive() and worker.done < limits.renewed and _held(worker) < limits.memory / 2:
        return False
    _end(worker, signal.SIGTERM)
    if worker.log is not None and worker.process.exitcode in (0, -signal.SIGTERM):
        worker.log.unlink(missing_ok=True)
    return True


def _end(worker: _Worker[Any], how: signal.Signals) -> None:
    worker.pipe.close()
    for number, seconds in ((how, 5), (signal.SIGKILL, 10)):
        if worker.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.process.pid, number)
            worker.process.join(seconds)


def _held(worker: _Worker[Any]) -> int:
    try:
        pages = int(Path(f"/proc/{worker.process.pid}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


# ---- in the process ----------------------------------------------------------------------------------------------------------


def _serve(pipe: Any, log: Path | None) -> None:
    """Do jobs as they come, until nobody asks any more."""
    _print_to(log)
    while True:
        try:
            job = pipe.recv()
        except (EOFError, OSError):
            return
        if os.fstat(1).st_size > LOG:
            os.ftruncate(1, 0)
        try:
            quick.call(job.run, pipe.send)
            ended = Ended()
        except Spent:
            ended = Ended(spent=True)
        except BaseException as error:  # noqa: BLE001 (whatever it is, it is told)
            ended = Ended(text=f"{type(error).__name__}: {error}"[:2000])
        try:
            pipe.send(ended)
        except OSError:
            return
        if ended.spent:
            return


def _print_to(log: Path | None) -> None:
    """What torch and kernels print is no news: into a file of this process's own."""
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(os.devnull if log is None else log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    faulthandler.enable(file=2)
