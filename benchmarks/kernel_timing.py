"""How kernels alone are timed: microseconds of the GPU, sides in turn, with what they gave held against each other.

Calls are enqueued ahead of the GPU, so the host's own time does not count, and the L2 cache is overwritten before each.
"""

from __future__ import annotations

import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_compiler.spec.target import Target
from benchmarks import harness, kernel_cases, kernel_peers
from benchmarks.kernel_cases import Case, Pass, Problem
from benchmarks.kernel_peers import Make, Side

# An error beyond this is no rounding: of bfloat16's gradients, a few in a hundred of the largest element.
MAX_ERROR = 0.05

_FLUSHED_BYTES = 1 << 28  # some times the L2 cache of any GPU
#: of an H200's fastest clock; a slower one sleeps longer
_CLOCKS_A_SECOND = 2e9
_ROUNDS = (10, 200)

Rows = Mapping[str, dict[str, str]]
Forget = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Timed:
    """What is timed is `run(prepare())` without its `prepare()`. It returns tensors."""

    prepare: Callable[[], Any]
    run: Callable[[Any], Sequence[Tensor]]


def timed(side: Side, which: Pass, grad_out: Tensor, *, once: bool = False) -> Timed:
    """One pass of a side. grad_out: of the shape of its out. once: the forward runs once for all backwards, which compiled code does not
    allow."""
    kept: list[Tensor] = []
    grad_out = side.taken(grad_out)

    def forward(_: None) -> Sequence[Tensor]:
        with torch.no_grad():
            return (side.call(),)

    def backward(out: Tensor) -> Sequence[Tensor]:
        return torch.autograd.grad(out, side.leaves, grad_out, retain_graph=once)

    def keeping() -> Tensor:
        if not kept:
            kept.append(side.call())
        return kept[0]

    match which:
        case "forward":
            return Timed(prepare=lambda: None, run=forward)
        case "backward":
            return Timed(prepare=keeping if once else side.call, run=backward)
        case "both":
            return Timed(prepare=lambda: None, run=lambda _: backward(side.call()))


def gradient_of_out(problem: Problem, *, packed: bool = False) -> Tensor:
    """(B, Hq, S, Dv) in BSHD memory; zero for queries whose out is not the same everywhere. packed: a side has no padded queries."""
    case, q = problem.case, problem.q
    shape = (case.batch, case.seqlen, case.heads_q, case.head_dim_v)
    generator = torch.Generator(device=q.device).manual_seed(1)
    drawn = torch.randn(shape, generator=generator, dtype=q.dtype, device=q.device).transpose(1, 2)
    return drawn.mul_(_same_queries(case, packed).to(q.device))


def error(found: Sequence[Tensor], expected: Sequence[Tensor], used: Tensor | None = None) -> float:
    """The largest difference relative to the peer's largest element, over the pairs of one shape; inf if it is no number.

    used: queries that count, bool (B, 1, S, 1). What is learned may have another form here and there.
    """
    worst = 0.0
    for mine, other in zip(found, expected, strict=False):
        if mine.shape != other.shape:
            continue
        difference = (mine.float() - other.float()).abs()
        size = other.float().abs()
        if used is not None:
            difference, size = difference.where(used, 0.0), size.where(used, 0.0)
        share = float(difference.max() / size.max())
        worst = max(worst, share if share == share else float("inf"))
    return worst


def interleave(
    sides: Mapping[str, Timed], device: str, seconds: float, *, rounds: tuple[int, int] = _ROUNDS, warmup: int = 2
) -> dict[str, list[float]]:
    """Microseconds of every call of each side, round by round, for about so many seconds; nothing for no sides.

    rounds: at least and at most so many. warmup: rounds before those, the last of which says how long one takes.

    On a GPU nothing waits until the end: the host stays ahead, and events see the GPU's time alone. Where launching takes the host
    longer than the GPU takes for it, the GPU sleeps before each call.
    """
    flushed = torch.empty(_FLUSHED_BYTES if device != "cpu" else 1, dtype=torch.int8, device=device)
    order = list(sides)
    took = asleep = 0.0
    for _ in range(warmup):
        start = time.perf_counter()
        for name in order:
            _one(sides[name], flushed, asleep)
        launched = time.perf_counter() - start
        harness.synchronize(device)
        took = time.perf_counter() - start - asleep * len(order)
        # On a CPU a call is over when it is launched.
        asleep = sleep_of(launched, took, calls=len(order)) if device != "cpu" else 0.0
    count = min(max(int(seconds / max(took + asleep * len(order), 1e-6)), rounds[0]), rounds[1])
    marks: dict[str, list[Callable[[], float]]] = {name: [] for name in sides}
    for _ in range(count):
        for name in order:
            marks[name].append(_one(sides[name], flushed, asleep))
        order.reverse()
    harness.synchronize(device)
    return {name: [elapsed() for elapsed in marked] for name, marked in marks.items()}


def sleep_of(launched: float, took: float, *, calls: int) -> float:
    """Seconds that the GPU should sleep before each call: what launching one takes the host, if that is more than half of all it took.

    launched, took: of all calls, in seconds, without and with waiting for the GPU; sleeping apart.
    """
    return launched / max(calls, 1) if launched > took / 2 else 0.0


def _one(side: Timed, flushed: Tensor, asleep: float) -> Callable[[], float]:
    """Run it; what is returned gives the microseconds, once the device is synchronised. asleep: seconds before it."""
    state = side.prepare()
    if asleep > 0:
        torch.cuda._sleep(int(asleep * _CLOCKS_A_SECOND))
    flushed.zero_()
    if flushed.device.type == "cpu":
        start = time.perf_counter()
        side.run(state)
        took = (time.perf_counter() - start) * 1e6
        return lambda: took
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    side.run(state)
    end.record()
    return lambda: float(begin.elapsed_time(end)) * 1e3


def graph_of(calls: Sequence[Callable[[], Any]], kept: list[Any] | None = None) -> torch.cuda.CUDAGraph:
    """A CUDA graph that holds them all. kept: gets the results, which else make room for the next ones."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call() if kept is None else kept.append(call())
    return graph


def prepared(
    problem: Problem,
    which: Pass,
    makes: Mapping[str, Make],
    rows: Rows,
    *,
    packed: bool = False,
    once: Callable[[str], bool] = lambda name: False,
) -> tuple[dict[str, Timed], dict[str, Sequence[Tensor]]]:
    """Each side that runs, compiled, and what it gave; the rows of the others say why they do not. once: as `timed` has it, by side."""
    sides: dict[str, Timed] = {}
    outcome: dict[str, Sequence[Tensor]] = {}
    grad_out = gradient_of_out(problem, packed=packed)
    for name, make in makes.items():
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                made = make(problem)
                side = timed(made, which, grad_out, once=once(name))
                gave = side.run(side.prepare())
                outcome[name] = [*map(made.whole, gave[:3]), *gave[3:]]
                harness.synchronize(str(problem.q.device))
                sides[name] = side
            except Exception as failure:  # noqa: BLE001 (a row of its own says so)
                rows[name]["failure"] = reason(failure, said)
    return sides, outcome


def compared(rows: Rows, outcome: Mapping[str, Sequence[Tensor]], right: str, used: Tensor | None) -> None:
    """Write how far the side that is named is from each other one."""
    for name in outcome:
        if name != right and right in outcome:
            rows[name]["error"] = f"{error(outcome[right], outcome[name], used):.2g}"


def used_by(problem: Problem, which: Pass, *, packed: bool = False) -> Tensor | None:
    """Queries that count in an out; None: all of a gradient."""
    return _same_queries(problem.case, packed).to(problem.q.device) if which == "forward" else None


def _same_queries(case: Case, packed: bool) -> Tensor:
    """bool (B, 1, S, 1): with a key, and no padding where that is left out."""
    used = kernel_cases.used_queries(case)
    return used & kernel_peers.real_queries(case)[:, None, :, None] if packed else used


def reason(failure: Exception, said: Sequence[warnings.WarningMessage] = ()) -> str:
    """The error's first line and, where a kernel was refused, what PyTorch warned of: that says why."""
    text = str(failure).strip()
    found = f"{type(failure).__name__}: {text.splitlines()[0] if text else ''}"
    if "No available kernel" in text:
        why = [str(warning.message).split(" (Triggered")[0] for warning in said]
        found = "; ".join(w for w in why if "not used because" not in w and "runtime disabled" not in w) or found
    return found[:240]


def is_usable(device: str) -> bool:
    """Whether the GPU still answers: after an illegal address it does not in this process."""
    try:
        harness.synchronize(device)
    except RuntimeError:
        return False
    return True


def while_usable(
    measure: Callable[[Any, Namespace], list[dict[str, str]]], cases: Sequence[Any], given: Namespace, forget: Forget
) -> harness.Measured:
    """Rows of cases while there is time, and the GPU answers."""
    for case in cases:
        if time.monotonic() > given.until:
            return
        yield measure(case, given)
        if not is_usable(given.device):
            print("the GPU no longer answers: run the rest with --append")
            return
        forget(given.device)


def where(given: Namespace) -> dict[str, str]:
    """Columns that say where a row was measured."""
    return harness.environment(given.device, given.commit) | {"triton": Target.current(given.device).triton}


def dtype_of(device: str) -> torch.dtype:
    """What is measured there."""
    return torch.float32 if device == "cpu" else torch.bfloat16
