"""On a Hopper GPU: forwards that add a bias or numbers by distance to the scores, or read a dense mask, in bfloat16.

    python -m benchmarks.bench_added --budget-seconds 230

First Hopper's kernel is checked on the odd sizes of tests/lowerings/hopper/test_launch.py, by the definition of attention. Then each case
is timed: "triton", the Triton family's, which is chosen while no row says otherwise; "flex", FlexAttention; "cudnn", PyTorch's cuDNN with
the bias; "hopper"; and forms of it (VARIANTS), by how tiles of keys and of what is added lie in shared memory. `chosen` marks what
users get. `error`: the norm of the difference from float64, of out and of lse, over two heads, relative to that of float64.

Times are microseconds of the GPU, as in bench_kernels.py. Kernels are compiled in threads before anything is timed. Writes
benchmarks/results/added_h200.csv, whose columns are those of bench_select.py.

    python -m benchmarks.bench_added --write-rows

puts what that file has of "hopper" and "triton" into attn_compiler/lowerings/choice/hopper_added_sm90.csv, which decides, in place of the
rows of the same cases.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
import functools
import gc
import itertools
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from attn_compiler.lowerings.base import Operands
from attn_compiler.lowerings.choice import hopper_added
from attn_compiler.lowerings.hopper import plan
from attn_compiler.lowerings.hopper.lowering import further_operands, read_by_backward
from attn_compiler.lowerings.hopper.plan import ForwardBlocks
from attn_compiler.lowerings.shared import ahead, imagined, part_tensors, parts as site_parts
from attn_compiler.options.options import Options
from attn_compiler.passes.writing import select
from attn_compiler.spec.target import Target
from benchmarks import added_cases, bench_kernels, bench_select, harness
from benchmarks.added_cases import CASES, AddedCase, Problem
from benchmarks.bench_kernels import Timed
from benchmarks.kernel_cases import EagerEmitter

RESULTS = Path(__file__).parent / "results" / "added_h200.csv"
COLUMNS = bench_select.COLUMNS
HOPPER, TRITON, FLEX, CUDNN = "hopper", "triton", "flex", "cudnn"
#: forms of the kernel, by the largest head dim that they are for
VARIANTS: Mapping[str, Mapping[int, ForwardBlocks]] = {
    "hopper, two stages": {
        64: ForwardBlocks(keys=128, stages=3, query_stages=2, overlaps=True, added_stages=2, added_early=4),
        128: ForwardBlocks(keys=128, stages=2, added_stages=2),
    },
    "hopper, late": {
        64: ForwardBlocks(keys=128, stages=3, query_stages=2, overlaps=True, added_stages=1, added_early=0),
        128: ForwardBlocks(keys=128, stages=2, added_stages=1, added_early=0),
    },
    "hopper, 64 keys": {
        64: ForwardBlocks(keys=64, stages=4, query_stages=2, overlaps=True, added_stages=2),
        128: ForwardBlocks(keys=64, stages=3, query_stages=2, added_stages=2),
    },
    "hopper, three": {
        64: ForwardBlocks(
            keys=128, stages=3, query_stages=2, consumers=3, registers=160, added_stages=1, added_early=0
        ),
        128: ForwardBlocks(keys=64, stages=2, consumers=3, registers=160, added_stages=2),
    },
    "hopper, no overlap": {
        64: ForwardBlocks(keys=128, stages=3, query_stages=2, added_stages=1),
    },
}
SIDES = (TRITON, HOPPER, *VARIANTS, FLEX, CUDNN)
#: of each problem of an odd size
CALLS = 8


# ---- sides --------------------------------------------------------------------------------------------------------


def blocks_of(side: str, case: AddedCase) -> ForwardBlocks | None:
    """Those of a form of the kernel; None where it has none of its own for the case. The room for numbers by distance is asked for as if
    they had four bytes."""
    found = VARIANTS.get(side, {})
    widest = max(case.head_dim, case.head_dim_v)
    blocks = next((blocks for limit, blocks in sorted(found.items()) if limit // 2 < widest <= limit), None)
    if blocks is None or not case.forms or (case.element > 2 and blocks.added_stages > 1 and blocks.keys > plan.ROWS):
        return None
    return blocks


@contextlib.contextmanager
def taking(side: str, case: AddedCase) -> Iterator[None]:
    """The forward is that of a side."""
    blocks = blocks_of(side, case)
    if blocks is None:
        yield
        return
    with mock.patch.object(plan, "ADDED", dict.fromkeys(plan.ADDED, blocks)):
        yield


def arguments_of(side: str, case: AddedCase, problem: Problem) -> tuple[Any, ...]:
    """Of the leaf op of Hopper's kernel, or of the Triton family's."""
    emitter: Any = EagerEmitter(Target.current(str(problem.q.device)))
    operands = added_cases.site_of(emitter, problem)
    with taking(side, case), torch.no_grad():
        nodes = _nodes(side, emitter, problem, operands)
    return problem.q, problem.k, problem.v, [emitter.value(node) for node in nodes], problem.text


def _nodes(side: str, emitter: Any, problem: Problem, operands: Operands) -> list[Any]:
    spec, tiles = problem.spec, problem.tiles
    if side == TRITON:
        return part_tensors.emit(emitter, spec, operands, tiles)
    own = dataclasses.replace(tiles, forward=plan.blocks_of(spec).tile)
    made = part_tensors.emit(emitter, spec, operands, own, ordered=plan.is_ordered(spec))
    of_plan = site_parts.of(spec)
    named = dict(zip(of_plan.operands, made, strict=True))
    kept = [node for name, node in named.items() if name != "tiles_by_key"]
    return [*kept, *further_operands(emitter, of_plan, named, part_tensors.lengths(emitter, spec, operands))]


def body_of(side: str) -> Any:
    """What runs. Launches are replayed by the op's name."""
    from attn_compiler.lowerings.hopper import launch
    from attn_compiler.lowerings.triton import launch as triton_launch

    if side == TRITON:
        return triton_launch.forward
    return dataclasses.replace(launch.forward, op=f"{launch.forward.op}_{side}")


def ours(case: AddedCase, names: Sequence[str]) -> list[str]:
    """Sides that a leaf op of ours computes."""
    return [name for name in names if name in (TRITON, HOPPER) or blocks_of(name, case) is not None]


def sides_of(case: AddedCase, problem: Problem, names: Sequence[str]) -> dict[str, Callable[[], Any]]:
    """For each side what makes it: gives out, and ours lse too."""

    def mine(side: str) -> Timed:
        body, arguments = body_of(side), arguments_of(side, case, problem)

        def run(_: None) -> Sequence[Tensor]:
            with taking(side, case), torch.no_grad():
                found: Sequence[Tensor] = body(*arguments)
            return found

        return Timed(prepare=lambda: None, run=run)

    def others(make: Callable[[Problem], Callable[[], Tensor]]) -> Timed:
        call = make(problem)

        def run(_: None) -> Sequence[Tensor]:
            with torch.no_grad():
                return (call(),)

        return Timed(prepare=lambda: None, run=run)

    found: dict[str, Callable[[], Any]] = {name: functools.partial(mine, name) for name in ours(case, names)}
    peers = {FLEX: added_cases.flex, CUDNN: added_cases.cudnn}
    return found | {
        name: functools.partial(others, make)
        for name, make in peers.items()
        if name in names and (name != FLEX or FLEX in case.peers)
    }


def backward_of(
    family: str, problem: Problem, grad_out: Tensor, out: Tensor, lse: Tensor
) -> tuple[Any, tuple[Any, ...]]:
    """What runs a family's backward, and its arguments. problem: for training."""
    from attn_compiler.lowerings.hopper import backward_launch
    from attn_compiler.lowerings.triton import launch as triton_launch

    emitter: Any = EagerEmitter(Target.current(str(problem.q.device)))
    operands = added_cases.site_of(emitter, problem)
    with torch.no_grad():
        nodes = read_by_backward(family, emitter, problem.spec, operands, problem.tiles)
    values = [emitter.value(node) for node in nodes]
    body = backward_launch.gradients if family == HOPPER else triton_launch.gradients
    return body, (grad_out, torch.zeros_like(lse), problem.q, problem.k, problem.v, values, out, lse, problem.text)


def backwards_of(case: AddedCase, problem: Problem, grad_out: Tensor) -> dict[str, Timed]:
    """The backward of each family, of Hopper's forward. problem: for training."""
    with torch.no_grad():
        out, lse = body_of(HOPPER)(*arguments_of(HOPPER, case, problem))

    def timed(family: str) -> Timed:
        body, arguments = backward_of(family, problem, grad_out, out, lse)

        def run(_: None) -> Sequence[Tensor]:
            with torch.no_grad():
                found: Sequence[Tensor] = body(*arguments)
            return found

        return Timed(prepare=lambda: None, run=run)

    return {family: timed(family) for family in (HOPPER, TRITON)}


def begin(cases: Sequence[AddedCase], device: str, names: Sequence[str]) -> list[Future[Any]]:
    """Start to compile what sides of these cases launch, and the checks."""
    from attn_compiler.lowerings.shared import compiling

    started: list[Future[Any]] = []
    pool = compiling.workers(len(os.sched_getaffinity(0)))

    def note(*asked: Any) -> None:
        started.extend(pool.begin(*asked))

    for case in cases:
        problem = added_cases.build(case, device)
        for side in ours(case, names):
            described = imagined.described(arguments_of(side, case, problem))
            with taking(side, case):
                ahead.note_launches(ahead.LaunchingCall(body=body_of(side), arguments=described, named=()), note)
        for family in (HOPPER, TRITON) if case.has_backward else ():
            problem = added_cases.build(case, device, training=True)
            out = bench_kernels.gradient_of_out(problem)
            body, arguments = backward_of(family, problem, out, out, torch.empty(out.shape[:3], device=device))
            call = ahead.LaunchingCall(body=body, arguments=imagined.described(arguments), named=())
            ahead.note_launches(call, note)
    return started


# ---- checks -------------------------------------------------------------------------------------------------------


def begin_checks(device: str) -> tuple[list[Any], list[Future[Any]]]:
    """Problems of odd sizes, and what is being compiled for them."""
    from attn_compiler.lowerings.hopper import launch
    from attn_compiler.lowerings.shared import compiling
    from tests.lowerings import kernel_problems
    from tests.lowerings.hopper import problems, test_launch

    target = Target.current(device)
    cases = [*test_launch.ADDED, *test_launch.MASKED]
    made = [problems.build(case, dtype=torch.bfloat16, device=device, target=target) for case in cases]
    started: list[Future[Any]] = []
    pool = compiling.workers(len(os.sched_getaffinity(0)))
    for problem in made:
        with kernel_problems.planned(problem.plan):
            given = (problem.q, problem.k, problem.v, problems.operands(problem), problem.text)
            call = ahead.LaunchingCall(body=launch.forward, arguments=imagined.described(given), named=())
            ahead.note_launches(call, lambda *asked: started.extend(pool.begin(*asked)))
    return made, started


def check(made: Sequence[Any], started: Sequence[Future[Any]], seconds: float) -> int:
    """Hold Hopper's kernel against attention's definition; how many problems are wrong, or fail. seconds: to begin new ones."""
    from tests.lowerings import kernel_problems
    from tests.lowerings.hopper import problems

    start, wrong, done = time.monotonic(), 0, 0
    wait(started, timeout=seconds)
    for problem in made:
        if time.monotonic() - start > seconds:
            break
        done += 1
        try:
            # All but the first are replayed. What is read too late or too early is not wrong each time.
            for _ in range(CALLS):
                kernel_problems.assert_within_rule(problems.by_ops(problem), problem)
        except Exception as failure:  # noqa: BLE001 (each problem is told of)
            wrong += 1
            print("WRONG", problem.case.name, bench_kernels.reason(failure, []), flush=True)
    print(f"{time.monotonic() - start:4.0f} s  {done - wrong} of {len(made)} odd sizes are right", flush=True)
    return wrong


# ---- rows ---------------------------------------------------------------------------------------------------------


def measure(case: AddedCase, *, device: str, seconds: float, names: Sequence[str]) -> list[dict[str, str]]:
    """A row for each side. Whatever fails of a side becomes its row's `failure`."""
    columns = case.columns | {"dtype": "bfloat16", "pass": "forward"}
    problem = added_cases.build(case, device)
    chosen = select.decide(problem.spec, Target.current(device), Options()).lowering
    exact = added_cases.exact(problem)
    rows: dict[str, dict[str, str]] = {}
    sides: dict[str, Timed] = {}
    for name, make in sides_of(case, problem, names).items():
        rows[name] = columns | {"side": name, "chosen": "yes" if name == chosen else ""}
        try:
            side = make()
            rows[name]["error"] = f"{added_cases.error(side.run(None), exact):.2g}"
            sides[name] = side
        except Exception as failure:  # noqa: BLE001 (a row of its own says so)
            rows[name]["failure"] = bench_kernels.reason(failure, [])
    for name, values in bench_select.contest(sides, device, seconds).items():
        p20, p50, p80 = harness.percentiles(values)
        rows[name] |= {"rounds": str(len(values)), "tflops": f"{case.flops('forward') / p50 / 1e6:.1f}"}
        rows[name] |= {"p20_us": f"{p20:.1f}", "p50_us": f"{p50:.1f}", "p80_us": f"{p80:.1f}"}
    return list(rows.values())


def measure_backward(case: AddedCase, *, device: str, seconds: float) -> list[dict[str, str]]:
    """As `measure`, of the backwards of a dense mask, or of a bias that wants no gradient."""
    columns = case.columns | {"dtype": "bfloat16", "pass": "backward"}
    try:
        problem = added_cases.build(case, device, training=True)
        grad_out = bench_kernels.gradient_of_out(problem)
        exact = added_cases.exact_gradients(problem, grad_out)
        sides = backwards_of(case, problem, grad_out)
        rows: dict[str, dict[str, str]] = {name: columns | {"side": name} for name in sides}
        for name, side in sides.items():
            rows[name]["error"] = f"{added_cases.error(side.run(None)[:3], exact):.2g}"
        for name, values in bench_select.contest(sides, device, seconds).items():
            p20, p50, p80 = harness.percentiles(values)
            rows[name] |= {"rounds": str(len(values)), "tflops": f"{case.flops('backward') / p50 / 1e6:.1f}"}
            rows[name] |= {"p20_us": f"{p20:.1f}", "p50_us": f"{p50:.1f}", "p80_us": f"{p80:.1f}"}
    except Exception as failure:  # noqa: BLE001 (one broken case must not cost the others, and its row names it)
        return [columns | {"side": HOPPER, "failure": bench_kernels.reason(failure, [])}]
    return list(rows.values())


def rows_of(measured: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Rows of hopper_added.MEASURED, of each case of which both have times, and right numbers."""
    speeds = {(row["case"], row["pass"], row["side"]): row for row in measured if row.get("tflops")}
    found = []
    for case, which in itertools.product(CASES, (hopper_added.FORWARD, hopper_added.BACKWARD)):
        sides = [speeds.get((case.name, which, side)) for side in (HOPPER, TRITON)]
        if None in sides or any(float(side["error"]) > bench_kernels.MAX_ERROR for side in sides if side is not None):
            continue
        first, last = added_cases.head_dims(case)
        told = [side["tflops"] for side in sides if side is not None]
        date, device = (speeds[case.name, which, HOPPER][column] for column in ("date", "device"))
        # Of "NVIDIA H200", the second word.
        values = (case.part, which, first, last, case.seqlen, *told, device.split()[1], date, case.name)
        found.append(dict(zip(hopper_added.COLUMNS, map(str, values), strict=True)))
    return found


def print_table(rows: Sequence[Mapping[str, str]], which: str) -> None:
    """A line for each case: TFLOP/s of each side, the chosen one in green."""

    def cell(of_case: Mapping[str, Mapping[str, str]], name: str) -> str:
        row = of_case.get(name, {})
        if row.get("failure"):
            return "failed"
        return f"[green]{row['tflops']}[/]" if row.get("chosen") and row.get("tflops") else row.get("tflops", "")

    harness.print_sides(rows, SIDES, cell, title=f"{which}, TFLOP/s on allowed pairs, medians", width=160)


def main() -> int:
    """Measure what the budget allows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-seconds", type=float, default=230.0, help="start nothing after this (%(default)s)")
    parser.add_argument("--check-seconds", type=float, default=90.0, help="for odd sizes (%(default)s)")
    parser.add_argument("--seconds", type=float, default=0.25, help="timing of a case (%(default)s)")
    parser.add_argument("--cases", nargs="+", default=["*"], help="patterns of names")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="the commit to name in the rows, where this is no checkout")
    parser.add_argument("--write-rows", action="store_true", help="measure nothing: make the rows that decide")
    options = parser.parse_args()
    if options.write_rows:
        harness.replace_rows(hopper_added.MEASURED, hopper_added.COLUMNS, rows_of(harness.read(options.output)))
        return 0

    start = time.monotonic()
    warnings.simplefilter("ignore")
    cases = [case for case in CASES if any(fnmatch.fnmatch(case.name, pattern) for pattern in options.cases)]
    where = bench_kernels.environment(options.device, options.commit) | dict.fromkeys(bench_select.PACKAGES, "")
    file = harness.CsvFile(options.output, [*COLUMNS, *where])
    # All lengths of a sort have the same kernels, but for few.
    sorts = {case.name.rpartition("_s")[0]: case for case in reversed(cases)}
    checked = begin_checks(options.device)
    started = begin(list(reversed(sorts.values())), options.device, options.sides)
    wrong = check(*checked, options.check_seconds)
    wait(started, timeout=options.budget_seconds)
    print(f"{time.monotonic() - start:4.0f} s  compiled", flush=True)
    for case in cases:
        if time.monotonic() - start > options.budget_seconds:
            print("no time left for", case.name)
            continue
        rows = measure(case, device=options.device, seconds=options.seconds, names=options.sides)
        if case.has_backward:
            rows += measure_backward(case, device=options.device, seconds=options.seconds)
        for row in rows:
            file.add({**row, **where})
            told = row.get("failure") or f"{row.get('p50_us')} µs, {row.get('tflops')} TFLOP/s, error {row['error']}"
            print(f"{time.monotonic() - start:4.0f} s  {row['case']}  {row['pass']}  {row['side']}  {told}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    for which in (hopper_added.FORWARD, hopper_added.BACKWARD):
        print_table([row for row in file.rows if row["pass"] == which], which)
    bad = any(float(row.get("error") or 0) > bench_kernels.MAX_ERROR for row in file.rows)
    return int(bad or wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
