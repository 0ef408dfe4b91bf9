"""Time that a GPU takes for each of several computations, without the time that the host takes to start them.

A kernel that spins holds the GPU until the host has enqueued all calls. No CUDA graph is recorded: a recording that fails breaks PyTorch's
random numbers for the rest of the process.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from attn_compiler.lowerings.choice.timed.values import NoValues

_CALLS, _ROUNDS = 8, 5
#: tries of one round, in each of which the kernel spins twice as long as before
_MOST_TRIES = 4
#: clock cycles of a GPU in a second, at most
_CYCLES = 2e9
#: seconds that the kernel spins, at most; a computation that takes the host longer is not timed
_LONGEST = 0.1
#: seconds that a process waits for others on its GPU
_PATIENCE = 60.0
#: GPUs that a process waited for in vain: a model has many sites, and each would wait again for one that hangs
_IN_VAIN: set[str] = set()


def microseconds(computations: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Return the time of one call of each computation: the median of rounds, in turns. Each has run before.

    A computation that takes the host long, or waits for the GPU, is missing. Raises NoValues where other processes time without end.
    """
    with alone_on(str(torch.cuda.get_device_properties(device).uuid)):
        return _in_turns(computations, device)


@contextmanager
def alone_on(gpu: str) -> Iterator[None]:
    """Let one process of a user at a time go on: two that time on one GPU would measure each other. gpu: its name.

    Raises NoValues after a minute, then at once until the GPU is free, and where the lock's file can't be written.
    """
    try:
        # Not among PyTorch's caches: processes may have folders of their own.
        lock = FileLock(Path(tempfile.gettempdir()) / f"attn_compiler_{os.getuid()}_times_{gpu}.lock")
        lock.acquire(timeout=0 if gpu in _IN_VAIN else _PATIENCE)
    except (Timeout, OSError) as error:
        _IN_VAIN.add(gpu)
        raise NoValues("other processes time kernels on this GPU") from error
    _IN_VAIN.discard(gpu)
    try:
        yield
    finally:
        lock.release()


def _in_turns(computations: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    held = {name: _host_seconds(computation, device) for name, computation in computations.items()}
    found: dict[str, list[float]] = {name: [] for name, seconds in held.items() if seconds < _LONGEST}
    order = list(found)
    for _ in range(_ROUNDS):
        for name in order:
            took = _round(computations[name], held[name], device)
            if took is not None:
                found[name].append(took)
        order.reverse()
    return {name: statistics.median(times) for name, times in found.items() if len(times) == _ROUNDS}


def _host_seconds(computation: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that the host takes to enqueue the calls of a round."""
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for _ in range(_CALLS):
        computation()
    took = time.perf_counter() - begin
    torch.cuda.synchronize(device)
    return took


def _round(computation: Callable[[], object], seconds: float, device: torch.device) -> float | None:
    """Return the microseconds of a call; None if the host never was ahead of the GPU. seconds: time of the host for a round."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for attempt in range(_MOST_TRIES):
        torch.cuda._sleep(int(min(1.5 * 2**attempt * seconds, _LONGEST) * _CYCLES))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(_CALLS):
            computation()
        is_ahead = not begin.query()  # type: ignore[no-untyped-call]
        end.record()
        torch.cuda.synchronize(device)
        if is_ahead:
            return float(begin.elapsed_time(end)) * 1e3 / _CALLS
    return None
