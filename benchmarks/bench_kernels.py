"""On a GPU, our Triton kernels alone beside other kernels: masks, score changes and head dims, forward and backward, in bfloat16.

    python -m benchmarks.bench_kernels --budget-seconds 540

Times are microseconds of the GPU: calls are enqueued ahead of it, so the host's own time does not count, and the L2 cache is
overwritten before each. TFLOP/s count the allowed pairs alone. `ratio` is the peer's time over ours, the median of the rounds' own;
`error` is the largest difference from the peer's out or gradients, relative to their largest element. `host_us` is what one call of
our leaf op takes the host, on sizes at which the kernel takes next to nothing (64 positions, where no lists of tiles are read).

Each row is one side of a case's forward, of its backward, or of both through autograd. A side that fails is a row with the reason. The
most telling cases come first; what the budget leaves out is done by a later run with --append. Writes
benchmarks/results/kernels_h200.csv and prints a table last. Exits with 1 where one of our kernels fails or is wrong.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import itertools
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from attn_compiler.spec.target import Target
from benchmarks import harness, kernel_cases, kernel_peers
from benchmarks.harness import BACKEND
from benchmarks.kernel_cases import Case, Pass, Problem
from benchmarks.kernel_peers import Make, Side

RESULTS = Path(__file__).parent / "results" / "kernels_h200.csv"
MEASURED = ("rounds", "p20_us", "p50_us", "p80_us", "tflops", "ratio", "error", "host_us", "tiles", "failure")
COLUMNS = (*kernel_cases.COLUMNS, "dtype", "pass", "side", *MEASURED)
# An error beyond this is no rounding: of bfloat16's gradients, a few in a hundred of the largest element.
MAX_ERROR = 0.05

_FLUSHED_BYTES = 1 << 28  # some times the L2 cache of any GPU
#: of an H200's fastest clock; a slower one sleeps longer
_CLOCKS_A_SECOND = 2e9
_ROUNDS = (10, 200)
_HOST_BATCHES, _HOST_CALLS = 20, 100  # fewer launches in a batch than the driver queues without waiting


@dataclass(frozen=True, kw_only=True)
class Timed:
    """What is timed is `run(prepare())` without its `prepare()`. It returns tensors."""

    prepare: Callable[[], Any]
    run: Callable[[Any], Sequence[Tensor]]


# ---- what is run --------------------------------------------------------------------------------------------------


def timed(side: Side, which: Pass, grad_out: Tensor) -> Timed:
    """One pass of a side. grad_out: of the shape of its out."""

    def forward(_: None) -> Sequence[Tensor]:
        with torch.no_grad():
            return (side.call(),)

    def backward(out: Tensor) -> Sequence[Tensor]:
        return torch.autograd.grad(out, side.leaves, grad_out)

    match which:
        case "forward":
            return Timed(prepare=lambda: None, run=forward)
        case "backward":
            return Timed(prepare=side.call, run=backward)
        case "both":
            return Timed(prepare=lambda: None, run=lambda _: backward(side.call()))


def gradient_of_out(problem: Problem) -> Tensor:
    """(B, Hq, S, Dv) in BSHD memory; zero for queries without any allowed key, whose out is not the same everywhere."""
    case, q = problem.case, problem.q
    shape = (case.batch, case.seqlen, case.heads_q, case.head_dim_v)
    generator = torch.Generator(device=q.device).manual_seed(1)
    drawn = torch.randn(shape, generator=generator, dtype=q.dtype, device=q.device).transpose(1, 2)
    return drawn.mul_(kernel_cases.used_queries(case).to(q.device))


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
    sides: Mapping[str, Timed],
    device: str,
    seconds: float,
    *,
    rounds: tuple[int, int] = _ROUNDS,
    warmup: int = 2,
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
        _round(sides, order, flushed, asleep)
        launched = time.perf_counter() - start
        _synchronize(device)
        took = time.perf_counter() - start - asleep * len(order)
        # On a CPU a call is over when it is launched.
        asleep = sleep_of(launched, took, calls=len(order)) if device != "cpu" else 0.0
    count = min(max(int(seconds / max(took + asleep * len(order), 1e-6)), rounds[0]), rounds[1])
    marks: dict[str, list[Callable[[], float]]] = {name: [] for name in sides}
    for _ in range(count):
        for name, elapsed in _round(sides, order, flushed, asleep).items():
            marks[name].append(elapsed)
        order.reverse()
    _synchronize(device)
    return {name: [elapsed() for elapsed in marked] for name, marked in marks.items()}


def sleep_of(launched: float, took: float, *, calls: int) -> float:
    """Seconds that the GPU should sleep before each call: what launching one takes the host, if that is more than half of all it took.

    launched, took: of all calls, in seconds, without and with waiting for the GPU; sleeping apart.
    """
    return launched / max(calls, 1) if launched > took / 2 else 0.0


def _round(
    sides: Mapping[str, Timed], order: Sequence[str], flushed: Tensor, asleep: float
) -> dict[str, Callable[[], float]]:
    return {name: _one(sides[name], flushed, asleep) for name in order}


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


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def host_cost(problem: Problem, which: Pass) -> float:
    """Microseconds of the host for one call of our leaf op, as a compiled graph calls it: the median of batches' means."""
    q, k, v, operands, text = problem.q, problem.k, problem.v, problem.operands, problem.text
    leaf = torch.ops.attn_compiler.triton.default
    out, lse = leaf(q, k, v, operands, text)
    grad_out, grad_lse = torch.ones_like(out), torch.zeros_like(lse)

    def call() -> Any:
        if which == "forward":
            return leaf(q, k, v, operands, text)
        gradient = torch.ops.attn_compiler.triton_backward.default
        return gradient(grad_out, grad_lse, q, k, v, operands, out, lse, text)

    means = []
    for _ in range(_HOST_BATCHES):
        _synchronize(str(q.device))
        start = time.perf_counter()
        for _ in range(_HOST_CALLS):
            call()
        means.append((time.perf_counter() - start) * 1e6 / _HOST_CALLS)
    _synchronize(str(q.device))
    return statistics.median(means)


# ---- rows ---------------------------------------------------------------------------------------------------------


def measure(
    case: Case, which: Pass, *, device: str, dtype: torch.dtype, seconds: float, peers: Mapping[str, Make]
) -> list[dict[str, str]]:
    """A row for each side, ours first. Whatever fails of a side becomes its row's `failure`."""
    names = case.columns | {"dtype": str(dtype).removeprefix("torch."), "pass": which}
    makes: dict[str, Make] = {BACKEND: kernel_peers.ours} | {name: peers[name] for name in case.peers if name in peers}
    rows: dict[str, dict[str, str]] = {name: names | {"side": name} for name in makes}
    try:
        problem = kernel_cases.build(case, device=device, dtype=dtype, training=which != "forward")
        sides, outcome = _sides(problem, which, makes, rows)
        _compare(rows, outcome, kernel_cases.used_queries(case).to(device) if which == "forward" else None)
        outcome.clear()
        _add_times(rows, interleave(sides, device, seconds), case.flops(which))
        if BACKEND in sides:
            rows[BACKEND] |= {"tiles": _tiles(problem, which), "host_us": _host_column(case, which, device, dtype)}
    except Exception as failure:  # noqa: BLE001 (one broken case must not cost the others, and its rows name it)
        return [{"failure": reason(failure, []), **row} for row in rows.values()]
    return list(rows.values())


def _sides(
    problem: Problem, which: Pass, makes: Mapping[str, Make], rows: Mapping[str, dict[str, str]]
) -> tuple[dict[str, Timed], dict[str, Sequence[Tensor]]]:
    """Each side that runs, compiled, and what it gave; the rows of the others say why they do not."""
    sides: dict[str, Timed] = {}
    outcome: dict[str, Sequence[Tensor]] = {}
    grad_out = gradient_of_out(problem)
    for name, make in makes.items():
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                side = timed(make(problem), which, grad_out)
                outcome[name] = side.run(side.prepare())
                _synchronize(str(problem.q.device))
                sides[name] = side
            except Exception as failure:  # noqa: BLE001 (a row of its own says so)
                rows[name]["failure"] = reason(failure, said)
    return sides, outcome


def _compare(rows: Mapping[str, dict[str, str]], outcome: Mapping[str, Sequence[Tensor]], used: Tensor | None) -> None:
    for name in outcome:
        if name != BACKEND and BACKEND in outcome:
            rows[name]["error"] = f"{error(outcome[BACKEND], outcome[name], used):.2g}"


def _add_times(rows: Mapping[str, dict[str, str]], times: Mapping[str, Sequence[float]], flops: float) -> None:
    for name, values in times.items():
        p20, p50, p80 = harness.percentiles(values)
        rows[name] |= {"rounds": str(len(values)), "tflops": f"{flops / p50 / 1e6:.1f}"}
        rows[name] |= {"p20_us": f"{p20:.1f}", "p50_us": f"{p50:.1f}", "p80_us": f"{p80:.1f}"}
        if name != BACKEND and BACKEND in times:
            rows[name]["ratio"] = f"{harness.ratio(values, times[BACKEND]):.3f}"


def _host_column(case: Case, which: Pass, device: str, dtype: torch.dtype) -> str:
    """Both is the sum of the two. There is nothing to learn from an interpreter."""
    if which == "both" or device == "cpu":
        return ""
    problem = kernel_cases.build(case.tiny, device=device, dtype=dtype, training=which != "forward")
    with torch.no_grad():
        return f"{host_cost(problem, which):.1f}"


def _tiles(problem: Problem, which: Pass) -> str:
    """The tiles of the kernels that ran: "64x64 w4 s3"."""
    tiles = problem.tiles
    ran = {"forward": [tiles.forward], "backward": [tiles.grad_q, tiles.grad_kv]}
    ran["both"] = ran["forward"] + ran["backward"]
    return ", ".join(tile.words for tile in ran[which])


def reason(failure: Exception, said: Sequence[warnings.WarningMessage]) -> str:
    """The error's first line and, where a kernel was refused, what PyTorch warned of: that says why."""
    text = str(failure).strip()
    found = f"{type(failure).__name__}: {text.splitlines()[0] if text else ''}"
    if "No available kernel" in text:
        why = [str(warning.message).split(" (Triggered")[0] for warning in said]
        found = "; ".join(w for w in why if "not used because" not in w and "runtime disabled" not in w) or found
    return found[:240]


# ---- running all --------------------------------------------------------------------------------------------------


def plan(patterns: Sequence[str], passes: Sequence[Pass]) -> Iterator[tuple[Case, Pass]]:
    """Every case whose name fits one of the patterns, the most telling first."""
    for case in kernel_cases.CASES:
        if any(fnmatch.fnmatch(case.name, pattern) for pattern in patterns):
            yield from ((case, which) for which in passes)


def print_table(rows: Sequence[Mapping[str, str]]) -> None:
    """One line for each pass of each case: ours, then the TFLOP/s of the peers, and how we stand to the fastest of them."""
    peers = [name for name in kernel_peers.PEERS if any(row["side"] == name for row in rows)]
    table = Table(title="effective TFLOP/s, medians; ratio to the fastest peer, above 1: we are faster")
    for name in ("case", "pass", "µs", "ours", *peers, "ratio", "error", "host µs"):
        table.add_column(name)
    for (case, which), group in itertools.groupby(rows, key=lambda row: (row["case"], row["pass"])):
        sides = {row["side"]: row for row in group}
        mine = sides[BACKEND]
        others = [sides[name] for name in peers if name in sides]
        ratios = [float(row["ratio"]) for row in others if row.get("ratio")]
        errors = [float(row["error"]) for row in others if row.get("error")]
        table.add_row(
            case,
            which,
            mine.get("p50_us", ""),
            _speed(mine),
            *(_speed(sides[name]) if name in sides else "" for name in peers),
            _marked(f"{min(ratios):.2f}", bad=min(ratios) < 1.0) if ratios else "",
            _marked(f"{max(errors):.2g}", bad=max(errors) > MAX_ERROR) if errors else "",
            mine.get("host_us", ""),
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _speed(row: Mapping[str, str]) -> str:
    return f"[yellow]{escape(row['failure'][:24])}" if row.get("failure") else row.get("tflops", "")


def _marked(text: str, *, bad: bool) -> str:
    return f"[red]{text}" if bad else text


def failures(rows: Sequence[Mapping[str, str]]) -> int:
    """1 where one of our kernels fails or is wrong; else 0: an exit status."""
    broken = any(row["side"] == BACKEND and row.get("failure") for row in rows)
    return int(broken or any(float(row["error"]) > MAX_ERROR for row in rows if row.get("error")))


def is_usable(device: str) -> bool:
    """Whether the GPU still answers: after an illegal address it does not in this process."""
    try:
        _synchronize(device)
    except RuntimeError:
        return False
    return True


def environment(device: str, commit: str | None) -> dict[str, str]:
    """The columns that say where a row was measured."""
    return harness.environment(device, commit) | {"triton": Target.current(device).triton}


def main() -> int:
    """Measure what the budget allows; 0 where nothing of ours failed or was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-seconds", type=float, default=540.0, help="start nothing after this (%(default)s)")
    parser.add_argument("--seconds", type=float, default=0.5, help="timing of one pass of a case (%(default)s)")
    parser.add_argument(
        "--cases", nargs="+", default=["*"], metavar="PATTERN", help="names, or patterns like 'causal*'"
    )
    parser.add_argument("--passes", nargs="+", default=list(kernel_cases.PASSES), choices=kernel_cases.PASSES)
    parser.add_argument("--peers", nargs="*", default=list(kernel_peers.PEERS), choices=list(kernel_peers.PEERS))
    parser.add_argument("--append", action="store_true", help="keep the rows of the file and measure only the others")
    parser.add_argument("--size", choices=("full", "small"), default="full", help="small: for a look at the script")
    parser.add_argument("--device", default="cuda:0", help="on cpu, in float32, with TRITON_INTERPRET=1")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="the commit to name in the rows, where this is no checkout")
    options = parser.parse_args()

    start = time.monotonic()
    where = environment(options.device, options.commit)
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    peers = {name: kernel_peers.PEERS[name] for name in options.peers}
    file = harness.CsvFile(options.output, [*COLUMNS, *where], append=options.append)
    done = {(row["case"], row["pass"]) for row in file.rows}
    left = 0
    for case, which in plan(options.cases, options.passes):
        if (case.name, which) in done:
            continue
        if time.monotonic() - start > options.budget_seconds:
            left += 1
            continue
        case = case if options.size == "full" else case.small
        rows = measure(case, which, device=options.device, dtype=dtype, seconds=options.seconds, peers=peers)
        for row in rows:
            file.add({**row, **where})
        took = time.monotonic() - start
        print(f"{took:4.0f} s", case.name, which, *map(_summary, rows), sep="  ", flush=True)
        if not is_usable(options.device):
            print("the GPU no longer answers: run the rest with --append")
            break
        _forget(options.device)
    print_table(file.rows)
    if left:
        print(f"{left} passes left for a run with --append")
    return failures(file.rows)


def _summary(row: Mapping[str, str]) -> str:
    return f"{row['side']} {row.get('tflops') or row.get('failure')}"


def _forget(device: str) -> None:
    """Compiled code of the case is of no use to the next one, and counts against Dynamo's limit."""
    torch.compiler.reset()
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
