"""Compilation of Triton kernels in threads, beside whatever else compiles. Imports triton, so this module is imported late.

Threads and no processes: Triton works without Python's lock but for its first step, which reads the kernel's syntax tree. Of the 1.3 to
2.7 s that a kernel took offline for sm90 (Triton 3.7.1, two cores), 0.1 s were that step (0.5 of the first kernel). C++ held the lock for
0.06 to 0.14 s. A process of its own takes 3 to 5 s there only to import torch and triton. Eleven kernels of five families had
the same machine code from six threads at once as from one, with Triton 3.6.0 and 3.7.1.

The result is in Triton's own caches, in memory and on disk: a launch finds it there, as if a launch had compiled it. A
launch that comes early waits (`wait_for`). A kernel that a thread could not compile is compiled by its launch.
"""

from __future__ import annotations

import atexit
import contextvars
import functools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import triton

from attn_compiler.lowerings.shared.launching import cache_keys

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """One variant of a kernel. seconds: time that it took; next to nothing where it was on disk."""

    kernel: str
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A compilation that Triton would do. key: the same for identical variants."""

    key: str
    compile: Callable[[], Any]
    finish: Callable[[Any], None]


Job = tuple["Future[Compiled]", Callable[[], Compiled]]


class Threads:
    """Threads that do one job after the other. At exit running jobs are awaited and the others dropped; ThreadPoolExecutor does them
    all."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._is_over = False

    def submit(self, work: Callable[[], Compiled]) -> Future[Compiled]:
        future: Future[Compiled] = Future()
        if self._is_over:  # No thread would do the job, so waiting for it would never end.
            future.cancel()
            future.set_running_or_notify_cancel()
            return future
        self._jobs.put((future, work))
        if len(self._threads) < self._number:
            self._threads.append(thread := threading.Thread(target=self._run, name="attn_compiler", daemon=True))
            thread.start()
        return future

    def end(self) -> None:
        """Cancel jobs that have not begun, and wait for the rest."""
        self._is_over = True
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, work = job
            if self._is_over:
                future.cancel()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 (it belongs to whoever asks for the result)
                future.set_exception(error)


class InTurn(Threads):
    """A thread whose jobs are awaited at once. Jobs still run in a thread: the caller is tracing, and tracing state is local to a
    thread."""

    def __init__(self) -> None:
        super().__init__(1)

    def submit(self, work: Callable[[], Compiled]) -> Future[Compiled]:
        future = super().submit(work)
        wait([future])
        return future


@dataclass(kw_only=True)
class Workers:
    """Threads that compile.

    started: by variant, running compilations.
    waited: by kernel, compilations that its launches wait for.
    beginning: guards against two threads, each compiling a graph, that begin the same variant.
    """

    threads: Threads
    started: dict[str, Future[Compiled]] = field(default_factory=dict)
    waited: dict[int, list[Future[Compiled]]] = field(default_factory=dict)
    beginning: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, kernel: Any, positional: Sequence[Any], named: dict[str, Any]) -> list[Future[Compiled]]:
        """Compile a kernel for such arguments, on the current device. Returns new compilations, without existing and begun variants."""
        asked = variants(kernel, positional, named)
        with self.beginning:
            return [self._begun(kernel, one) for one in asked if one.key not in self.started]

    def _begun(self, kernel: Any, asked: Asked) -> Future[Compiled]:
        self.started[asked.key] = future = self.threads.submit(functools.partial(_compile, kernel.fn.__name__, asked))
        self.waited.setdefault(id(kernel), []).append(future)
        future.add_done_callback(functools.partial(self._done, id(kernel), asked.key))
        return future

    def _done(self, kernel: int, key: str, future: Future[Compiled]) -> None:
        self.waited[kernel].remove(future)
        self.started.pop(key)


_workers: Workers | None = None


def workers(number: int) -> Workers:
    """Return the threads of this process. number: kernels compiled at a time, read at the first call; 1: a graph waits for each."""
    global _workers
    if _workers is None:
        _workers = Workers(threads=Threads(number) if number > 1 else InTurn())
    return _workers


def wait_for(kernel: Any) -> None:
    """Wait until no variant of a kernel is being compiled ahead."""
    if _workers is not None and (begun := _workers.waited.get(id(kernel))):
        wait(list(begun))


def _forget() -> None:
    """Drop the threads: a forked process has none of them."""
    global _workers
    _workers = None


def _end() -> None:
    if _workers is not None:
        _workers.threads.end()


os.register_at_fork(after_in_child=_forget)
atexit.register(_end)


def variants(kernel: Any, positional: Sequence[Any], named: dict[str, Any]) -> list[Asked]:
    """Return the compilations that Triton would do to launch a kernel on the current device with such arguments; empty if none is left to
    do.

    Triton itself is asked, as at a launch: it inspects the arguments, and passes compilations to the active mode.
    """
    cache_keys.settle(kernel)
    mode = _Asking()
    # The mode ends with this context. Its own __exit__ would wait for the compilations.
    contextvars.Context().run(_ask, mode, kernel, positional, named)
    return mode.asked


class _Asking(triton.AsyncCompileMode):  # type: ignore[misc]
    """A mode that compiles nothing. To Triton that is a kernel that failed to compile, and nothing is kept. cleanup_fn, of Triton 3.9,
    would clear an entry after a failure."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []

    def submit(
        self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None], cleanup_fn: Any = None
    ) -> None:
        self.asked.append(Asked(key=key, compile=functools.partial(_ready_to_launch, compile_fn), finish=finalize_fn))


def _ready_to_launch(compile_kernel: Callable[[], Any]) -> Any:
    """Compile a kernel and its launcher. Triton 3.6 builds a C module for each kernel, at its first launch, that reads the launch's
    arguments. It takes a C compiler 0.11 to 0.18 s, and is on disk after that. Later versions have one module for all kernels."""
    kernel = compile_kernel()
    triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
    return kernel


def _ask(mode: _Asking, kernel: Any, positional: Sequence[Any], named: dict[str, Any]) -> None:
    mode.__enter__()
    kernel.warmup(*positional, grid=(1,), **named)


def _compile(name: str, asked: Asked) -> Compiled:
    """Compile in a thread. Raises what Triton raises."""
    log.info("compiling %s", name)
    begin = time.perf_counter()
    asked.finish(asked.compile())
    seconds = time.perf_counter() - begin
    log.info("compiled %s in %.2f s", name, seconds)
    return Compiled(kernel=name, seconds=seconds)
