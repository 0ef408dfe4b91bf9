"""On a GPU, our kernels alone beside other kernels: masks, score changes and head dims, forward and backward, in bfloat16.

    python -m benchmarks.bench_kernels --budget-seconds 540
    python -m benchmarks.bench_kernels --passes forward both --ours hopper triton --peers fa4 cudnn_flex flex cudnn --output peers.csv

Times are microseconds of the GPU: calls are enqueued ahead of it, so the host's own time does not count, and the L2 cache is overwritten
before each. TFLOP/s count the allowed pairs alone. `ratio` is the peer's time over ours, the median of the rounds' own; `error` is the
largest difference from the peer's out or gradients, relative to their largest element. `host_us` is what one call of our leaf op takes the
host, on sizes at which the kernel takes next to nothing (64 positions, where no lists of tiles are read).

Ours is the first of --ours. Peers of other libraries (kernel_peers.py) are asked for by name: "fa4", FlashAttention-4, and "cudnn_flex",
cudnn.flex_attention (from about nvidia-cudnn-frontend 1.32, with nvidia-cutlass-dsl). Padding and documents are packed before
FlashAttention-4 is timed: it leaves out padded queries, whose pairs count in its TFLOP/s all the same.

Each row is one side of a case's forward, of its backward, or of both through autograd. A side that fails is a row with the reason. The most
telling cases come first; what the budget leaves out is done by a later run with --append. Exits with 1 where one of our kernels fails or is
wrong.
"""

from __future__ import annotations

import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks import bench_select, harness, kernel_cases, kernel_peers, kernel_timing, select_cases
from benchmarks.bench_select import Asked
from benchmarks.harness import BACKEND, Bench, Row, arg
from benchmarks.kernel_cases import Case, Pass, Problem
from benchmarks.kernel_peers import PEERS, Make
from benchmarks.kernel_timing import MAX_ERROR

MEASURED = ("rounds", "p20_us", "p50_us", "p80_us", "tflops", "ratio", "error", "host_us", "tiles", "failure")
COLUMNS = (*kernel_cases.COLUMNS, "dtype", "pass", "side", *MEASURED)
#: cases of the grid that the choice is measured on, which are asked for by name too
FURTHER = {case.name: case for case in (*select_cases.CASES, *kernel_cases.CASES)}
_HOST_BATCHES, _HOST_CALLS = 20, 100  # fewer launches in a batch than the driver queues without waiting


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
        harness.synchronize(str(q.device))
        start = time.perf_counter()
        for _ in range(_HOST_CALLS):
            call()
        means.append((time.perf_counter() - start) * 1e6 / _HOST_CALLS)
    harness.synchronize(str(q.device))
    return statistics.median(means)


def sides_of(case: Case, ours: Sequence[str], peers: Sequence[str]) -> dict[str, Make]:
    """By name, ours first. Of the peers those that suit the case, unless they are asked for beside others of ours."""
    first, *others = ours
    makes: dict[str, Make] = {BACKEND: kernel_peers.ours if first == "triton" else bench_select.lowering(first)}
    makes |= {name: bench_select.lowering(name) for name in others}
    return makes | {
        name: PEERS[name] for name in peers if name in case.peers or name in kernel_peers.LIBRARIES or others
    }


def measure(asked: Asked, given: Namespace) -> list[dict[str, str]]:
    """A row for each side, ours first. Whatever fails of a side becomes its row's `failure`."""
    case, which = asked.case if given.size == "full" else asked.case.small, asked.which
    dtype = kernel_timing.dtype_of(given.device)
    names = case.columns | {"dtype": str(dtype).removeprefix("torch."), "pass": which}
    makes = sides_of(case, given.ours, given.peers)
    rows: dict[str, dict[str, str]] = {name: names | {"side": name} for name in makes}
    try:
        problem = kernel_cases.build(case, device=given.device, dtype=dtype, training=which != "forward")
        packed = "fa4" in makes
        sides, outcome = kernel_timing.prepared(problem, which, makes, rows, packed=packed)
        kernel_timing.compared(rows, outcome, BACKEND, kernel_timing.used_by(problem, which, packed=packed))
        outcome.clear()
        times = kernel_timing.interleave(sides, given.device, given.seconds)
        for name, values in times.items():
            rows[name] |= harness.kernel_times(values, case.flops(which))
            if name != BACKEND and BACKEND in times:
                rows[name]["ratio"] = f"{harness.ratio(values, times[BACKEND]):.3f}"
        if BACKEND in sides and given.ours[0] == "triton":
            rows[BACKEND] |= of_ours(problem, which)
    except Exception as failure:  # noqa: BLE001 (one broken case must not cost the others, and its rows name it)
        return [{"failure": kernel_timing.reason(failure), **row} for row in rows.values()]
    return list(rows.values())


def of_ours(problem: Problem, which: Pass) -> dict[str, str]:
    """The tiles of the kernels that ran, "64x64 w4 s3", and what a call takes the host: there is nothing to learn from an interpreter."""
    tiles = problem.tiles
    ran = {"forward": [tiles.forward], "backward": [tiles.grad_q, tiles.grad_kv]}
    ran["both"] = ran["forward"] + ran["backward"]
    columns = {"tiles": ", ".join(tile.words for tile in ran[which])}
    # Both is the sum of the two.
    if which == "both" or not problem.q.is_cuda:
        return columns
    how: dict[str, Any] = {"device": str(problem.q.device), "dtype": problem.q.dtype, "training": which != "forward"}
    with torch.no_grad():
        return columns | {"host_us": f"{host_cost(kernel_cases.build(problem.case.tiny, **how), which):.1f}"}


def cases(given: Namespace) -> list[Asked]:
    """Every case whose name fits a pattern, the most telling first; those of the other grid by their whole names."""
    found = dict.fromkeys(harness.picked(kernel_cases.CASES, given.cases))
    found |= dict.fromkeys(FURTHER[name] for name in given.cases if name in FURTHER)
    return [Asked(case, which) for case in found for which in given.passes]


def print_table(rows: Sequence[Row]) -> None:
    """One line for each pass of each case: the TFLOP/s of each side, and how we stand to the fastest of the peers."""

    def of(name: str, sides: Mapping[str, Row]) -> list[float]:
        return [float(row[name]) for row in sides.values() if row.get(name)]

    further = {
        "µs": lambda sides: sides[BACKEND].get("p50_us", ""),
        "ratio": lambda sides: harness.marked(min(of("ratio", sides), default=None), ".2f", lambda x: x < 1.0),
        "error": lambda sides: harness.marked(max(of("error", sides), default=None), ".2g", lambda x: x > MAX_ERROR),
        "host µs": lambda sides: sides[BACKEND].get("host_us", ""),
    }
    title = "effective TFLOP/s, medians; ratio to the fastest peer, above 1: we are faster"
    harness.print_sides(rows, harness.speed, title=title, further=further)


def failures(rows: Sequence[Row]) -> bool:
    """Whether one of our kernels fails or is wrong."""
    broken = any(row["side"] == BACKEND and row.get("failure") for row in rows)
    return broken or any(float(row["error"]) > MAX_ERROR for row in rows if row.get("error"))


BENCH = Bench(
    doc=__doc__, results="kernels_h200.csv", columns=COLUMNS, cases=cases,
    rows=lambda cases, given: kernel_timing.while_usable(measure, cases, given, harness.forget), sides=PEERS, seconds=0.5, budget=540.0,
    sized=True, where=kernel_timing.where, short=("case", "pass", "side", "tflops", "failure"),
    table=print_table, failed=failures,
    options=(
        harness.PATTERNS,
        arg("--passes", nargs="+", default=list(kernel_cases.PASSES), choices=kernel_cases.PASSES),
        arg("--ours", nargs="+", default=["triton"], help="lowerings, the first of which others are held against"),
        arg("--peers", nargs="*", default=["cudnn", "flash", "efficient", "flex"], choices=list(PEERS)),
    ),
)  # fmt: skip
main = harness.run(BENCH)

if __name__ == "__main__":
    sys.exit(main())
