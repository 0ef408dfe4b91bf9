"""How long a GPU takes for each of several computations, without what the host takes to start them.

A kernel that spins holds the GPU until the host has enqueued all calls. No CUDA graph is recorded: a recording that fails breaks PyTorch's
random numbers for the rest of the process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

_CALLS, _ROUNDS = 8, 5
#: rounds of one computation in which the host may be slower than the spinning kernel
_MOST_TRIES = 4
#: of a GPU in a second, at most
_CYCLES = 2e9
#: seconds
_LONGEST = 0.1


def microseconds(computations: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Of one call of each: the median of rounds, in turns. Each ran before.

    What takes the host long, or waits for the GPU, has no time.
    """
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
    """What the host takes to enqueue the calls of a round."""
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for _ in range(_CALLS):
        computation()
    took = time.perf_counter() - begin
    torch.cuda.synchronize(device)
    return took


def _round(computation: Callable[[], object], seconds: float, device: torch.device) -> float | None:
    """Microseconds of a call; None if the host never was ahead of the GPU. seconds: what the host takes for a round."""
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
