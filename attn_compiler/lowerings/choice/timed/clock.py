"""How long a GPU takes for each of several computations: replays of CUDA graphs in turns, so that the host's time does not count."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping

import torch

#: a replay is at least so long, in microseconds, so that its start is little of it, and has at most so many calls
_LONG, _MOST_CALLS = 200.0, 20
_ROUNDS = 7


def microseconds(computations: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Of one call of each, the median of rounds. A computation has run before, and waits for nothing.

    What no CUDA graph can hold has no time.
    """
    replays: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}
    for name, computation in computations.items():
        recorded = _recorded(computation, device)
        if recorded is not None:
            replays[name] = recorded
    found: dict[str, list[float]] = {name: [] for name in replays}
    order = list(replays)
    for _ in range(_ROUNDS):
        for name in order:
            graph, calls = replays[name]
            found[name].append(_elapsed(graph.replay) / calls)
        order.reverse()
    return {name: statistics.median(times) for name, times in found.items()}


def _recorded(computation: Callable[[], object], device: torch.device) -> tuple[torch.cuda.CUDAGraph, int] | None:
    """A graph of some calls, and how many."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(stream):
            took = min(_elapsed(computation) for _ in range(2))
            calls = max(1, min(_MOST_CALLS, math.ceil(_LONG / max(took, 1.0))))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                for _ in range(calls):
                    computation()
            graph.replay()
    except RuntimeError:
        torch.cuda.synchronize(device)
        return None
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph, calls


def _elapsed(run: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3
