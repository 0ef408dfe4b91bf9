"""Interleaved timing of steps in one process.

Times are milliseconds: wall clock or the process's own processor time on a CPU (`CpuClock`; other programs disturb the latter less), CUDA
events on a GPU. Steps take turns, call by call and in alternating order, so that a drift of the machine falls on all. A ratio is the median
of the rounds' own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

CpuClock = Literal["wall", "process"]
_CLOCKS = {"wall": time.perf_counter, "process": time.process_time}


def interleave(
    steps: Mapping[str, Callable[[], Any]],
    device: str,
    *,
    seconds: float,
    max_rounds: int = 200,
    min_rounds: int = 5,
    warmup: int = 3,
    clock: CpuClock = "wall",
    before: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Return milliseconds of every call of each step, round by round, until `seconds` are over (but at least `min_rounds`). before: called
    ahead of each step, and not timed."""
    for _ in range(warmup):
        for step in steps.values():
            before()
            step()
    synchronize(device)
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    deadline = time.perf_counter() + seconds
    for round_ in range(max_rounds):
        if round_ >= min_rounds and time.perf_counter() > deadline:
            break
        for name in order:
            before()
            times[name].append(milliseconds(steps[name], device, clock))
        order.reverse()
    return times


def milliseconds(step: Callable[[], Any], device: str, clock: CpuClock = "wall") -> float:
    """Time one call: wall clock or processor time on a CPU, CUDA events on a GPU."""
    if device == "cpu":
        now = _CLOCKS[clock]
        start = now()
        step()
        return (now() - start) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    step()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def percentiles(times: Sequence[float]) -> tuple[float, float, float]:
    """Return p20, p50 and p80."""
    fifths = statistics.quantiles(times, n=5, method="inclusive")
    return fifths[0], statistics.median(times), fifths[3]


def ratio(baseline: Sequence[float], ours: Sequence[float]) -> float:
    """Return our speed-up: the median over rounds of baseline / ours. Above 1 is faster."""
    return statistics.median(b / o for b, o in zip(baseline, ours, strict=True))
