"""On a Hopper GPU: backwards that give the same bits in every run, beside the one of Hopper's that does not, in bfloat16.

    python -m benchmarks.bench_in_order --budget-seconds 55

All runs under torch.use_deterministic_algorithms(True). A side is "in order", Hopper's backward whose blocks of keys add to dq in one
order; "any order", the form whose last bits differ from run to run; "triton"; "cudnn", cuDNN's graph with a deterministic backward (with
the package nvidia-cudnn-frontend); and "sdpa_flash", PyTorch's. `chosen` marks what a deterministic session gets of Hopper's and Triton's.

Times are microseconds of the GPU, as in kernel_timing.py, of the backward alone. `error` is the largest difference from Triton's gradients,
relative to their largest element. `same` says whether three runs gave the same bits. Kernels are compiled in threads before anything is
timed.

    python -m benchmarks.bench_in_order --write-rows

puts what that file has into attn_compiler/lowerings/choice/in_order_sm90.csv, which decides, in place of the rows of the same cases.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attn_compiler.lowerings.choice import in_order, shape_class
from attn_compiler.lowerings.choice.timed.eager import EagerEmitter
from attn_compiler.lowerings.hopper.call import backward_of
from attn_compiler.lowerings.hopper.plan import blocks_of, grad_blocks_of, has_backward, is_ordered
from attn_compiler.lowerings.shared.launching import ahead, dry_tensors, persistent
from attn_compiler.lowerings.shared.parts import part_tensors, site_parts
from attn_compiler.spec.target import Target
from benchmarks import bench_select, harness, kernel_cases, kernel_timing, select_cases
from benchmarks.harness import Bench, arg
from benchmarks.kernel_cases import Case, Problem
from benchmarks.kernel_timing import Timed

MEASURED = ("rounds", "p20_us", "p50_us", "p80_us", "tflops", "error", "same", "failure")
COLUMNS = (*kernel_cases.COLUMNS, "side", "heads_at_once", "chosen", *MEASURED)
IN_ORDER, ANY_ORDER, TRITON = "in order", "any order", "triton"
#: what the lowering calls them
_FAMILIES = {IN_ORDER: "hopper_in_order", TRITON: "triton"}
#: lowerings with a deterministic backward of another library
PEERS = ("cudnn", "sdpa_flash")
_RUNS = 3
#: that a row speaks for
_HEAD_DIMS = ((1, 64), (65, 96), (97, 128))

#: the most telling first
CASES: tuple[Case, ...] = tuple(
    {case.name: case for case in (*kernel_cases.CASES, *select_cases.CASES)}[name]
    for name in (
        "causal_d128_s8192 causal_d128_s2048 padded_causal_d128_s2048 padded_causal_gqa_d128_s8192 window_d128_s8192 "
        "causal_d64_s8192 causal_gqa_d128_s2048 full_d128_s8192 softcap_d128_s8192 causal_d64_s2048 causal_d96_s8192 "
        "causal_d128_s32768 lengths_causal_d128_s2048 window_d128_s2048 padded_causal_d64_s8192 sinks_gqa_d64_s8192 "
        "padded_d128_s2048 causal_gqa_d128_s1024 documents_causal"
    ).split()
)

Body = Callable[..., Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Built:
    """A problem and what our backwards read. heads: under way at once."""

    problem: Problem
    hopper: list[Tensor]
    grad_hopper: list[Tensor]
    heads: int


def build(case: Case, device: str) -> Built:
    """The tensors of a case. The lists of tiles are those that the lowering would make."""
    problem = kernel_cases.build(case, device=device, dtype=torch.bfloat16, training=True)
    spec, parts = problem.spec, site_parts.make_plan(problem.spec)
    tiles = dataclasses.replace(problem.tiles, forward=blocks_of(spec).tile, grad_kv=grad_blocks_of(spec, parts).tile)
    target = Target.current(device)
    emitter: Any = EagerEmitter(target)
    site = kernel_cases.site_of(emitter, problem.q, problem.k, problem.v, problem.given)
    with torch.no_grad():
        nodes = part_tensors.emit(emitter, spec, site, tiles, ordered=is_ordered(spec))
    named = dict(zip(problem.plan.operands, (emitter.value(node).detach() for node in nodes), strict=True))
    return Built(
        problem=problem,
        hopper=[x for name, x in named.items() if name != "tiles_by_key"],
        grad_hopper=[x for name, x in named.items() if name != "tiles"],
        heads=persistent.heads_at_once(case.batch * case.heads_q, target.processors),
    )


def bodies() -> dict[str, Body]:
    """What runs for each side of ours."""
    from attn_compiler.lowerings.hopper import backward_launch
    from attn_compiler.lowerings.triton import launch

    return {
        IN_ORDER: backward_launch.gradients_in_order,
        ANY_ORDER: backward_launch.gradients,
        TRITON: launch.gradients,
    }


def _arguments(name: str, built: Built, out: Tensor, lse: Tensor, grad_out: Tensor) -> tuple[Any, ...]:
    problem = built.problem
    q, k, v = (x.detach() for x in (problem.q, problem.k, problem.v))
    operands = [x.detach() for x in problem.operands] if name == TRITON else built.grad_hopper
    return grad_out, torch.zeros_like(lse), q, k, v, operands, out, lse, problem.text


def _ours(body: Body, arguments: tuple[Any, ...]) -> Timed:
    def run(_: None) -> Sequence[Tensor]:
        with torch.no_grad():
            *grads, further = body(*arguments)
        return [*grads, *further]

    return Timed(prepare=lambda: None, run=run)


def sides_of(built: Built, said: dict[str, str]) -> dict[str, Timed]:
    """Every side that runs; said: gets what the others failed with."""
    from attn_compiler.lowerings.hopper import launch

    problem = built.problem
    given = [x.detach() for x in (problem.q, problem.k, problem.v)]
    with torch.no_grad():
        out, lse = launch.forward(*given, built.hopper, problem.text)
    grad_out = kernel_timing.gradient_of_out(problem)
    found = {name: _ours(body, _arguments(name, built, out, lse, grad_out)) for name, body in bodies().items()}
    for name in PEERS:
        try:
            side = bench_select.lowering(name)(problem)
            found[name] = kernel_timing.timed(side, "backward", grad_out, once=True)
            found[name].run(found[name].prepare())
        except Exception as failure:  # noqa: BLE001 (a row of its own says so)
            found.pop(name, None)
            said[name] = kernel_timing.reason(failure)
    return found


def begin(cases: Sequence[Case], device: str) -> list[Future[Any]]:
    """Start to compile what our sides of these cases launch."""
    from attn_compiler.lowerings.hopper import launch
    from attn_compiler.lowerings.shared.launching import compiling

    started: list[Future[Any]] = []
    pool = compiling.workers(len(os.sched_getaffinity(0)))

    def note(*asked: Any) -> None:
        started.extend(pool.begin(*asked))

    for case in cases:
        built = build(case, device)
        problem = built.problem
        out = torch.empty(case.batch, case.heads_q, case.seqlen, case.head_dim_v, dtype=torch.bfloat16, device=device)
        lse = torch.empty(case.batch, case.heads_q, case.seqlen, device=device)
        given = [x.detach() for x in (problem.q, problem.k, problem.v)]
        called = [
            (launch.forward, (*given, built.hopper, problem.text)),
            *((body, _arguments(name, built, out, lse, out)) for name, body in bodies().items()),
        ]
        for body, arguments in called:
            call = ahead.LaunchingCall(body=body, arguments=dry_tensors.described(arguments), named=())
            ahead.note_launches(call, note)
    return started


def measure(case: Case, given: Namespace) -> list[dict[str, str]]:
    """A row for each side. Whatever fails of a side becomes its row's `failure`."""
    names = case.columns
    failed: dict[str, str] = {}
    try:
        built = build(case, given.device)
        sides = sides_of(built, failed)
        chosen = backward_of(built.problem.spec, Target.current(given.device))
        rows = {name: names | {"side": name} for name in (*sides, *failed)}
        for name, why in failed.items():
            rows[name]["failure"] = why
        outcome: dict[str, list[Tensor]] = {}
        for name, side in sides.items():
            runs = [[x.clone() for x in side.run(side.prepare())] for _ in range(_RUNS)]
            rows[name]["same"] = "yes" if all(map(functools.partial(_are_same, runs[0]), runs[1:])) else "no"
            rows[name]["chosen"] = "yes" if _FAMILIES.get(name) == chosen else ""
            outcome[name] = runs[0]
        for name in sides:
            if name != TRITON:
                rows[name]["error"] = f"{kernel_timing.error(outcome[TRITON][:3], outcome[name][:3]):.2g}"
            if name.startswith(IN_ORDER):
                rows[name]["heads_at_once"] = str(built.heads)
        outcome.clear()
        for name, values in kernel_timing.interleave(sides, given.device, given.seconds, warmup=1).items():
            rows[name] |= harness.kernel_times(values, case.flops("backward"))
    except Exception as failure:  # noqa: BLE001 (one broken case must not cost the others, and its row names it)
        return [names | {"side": "", "failure": kernel_timing.reason(failure)}]
    return list(rows.values())


def _are_same(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, second, strict=True))


def rows_of(measured: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Rows of in_order.TABLE, of each side in order that has the same bits in every run and stands beside Triton's."""
    triton = {row["case"]: row for row in measured if row["side"] == TRITON and row.get("tflops")}
    by_name = {case.name: case for case in CASES}
    found = []
    for row in measured:
        if (
            row["side"].startswith(IN_ORDER)
            and row.get("same") == "yes"
            and row.get("tflops")
            and row["case"] in triton
        ):
            spec = select_cases.spec_of(by_name[row["case"]], training=True)
            shape = shape_class.classify(spec)
            first, last = next((a, b) for a, b in _HEAD_DIMS if a <= (shape.head_dim or 0) <= b)
            values = (shape_class.sort_of_mask(spec), shape.band, first, last)
            speeds = (row["seqlen"], row["heads_at_once"], row["tflops"], triton[row["case"]]["tflops"])
            found.append(
                dict(zip(in_order.TABLE.columns, map(str, (*values, *speeds, row["date"], row["case"])), strict=True))
            )
    return found


def write_rows(path: Path, measured: Sequence[Mapping[str, str]]) -> None:
    """Put them into the file that decides, in place of its rows of the same cases."""
    harness.replace_rows(path, in_order.TABLE.columns, rows_of(measured))


def print_table(rows: Sequence[Mapping[str, str]]) -> None:
    """A line for each case: TFLOP/s of each side, the chosen one in green, those whose bits differ in yellow."""
    harness.print_sides(rows, _cell, keys=["case"], title="backward, TFLOP/s on allowed pairs, medians")


def _cell(row: Mapping[str, str]) -> str:
    if row.get("failure"):
        return "failed"
    style = "green" if row.get("chosen") else "yellow" if row.get("same") == "no" else ""
    return f"[{style}]{row['tflops']}[/]" if style else row["tflops"]


def failures(rows: Sequence[Mapping[str, str]]) -> bool:
    """Whether a side of ours fails or is wrong, or one in order has other bits in another run."""
    ours = [row for row in rows if not row["side"] or row["side"].startswith((IN_ORDER, ANY_ORDER, TRITON))]
    broken = any(row.get("failure") for row in ours)
    wrong = any(float(row.get("error") or 0) > kernel_timing.MAX_ERROR for row in ours)
    return broken or wrong or any(row.get("same") == "no" for row in ours if row["side"] != ANY_ORDER)


def _instead(given: Namespace) -> int | None:
    """Make the rows that decide, where those are asked for."""
    if given.write_rows:
        write_rows(in_order.TABLE.path, harness.read(given.output or harness.RESULTS / BENCH.results))
        return 0
    return None


def _rows(cases: Sequence[Case], given: Namespace) -> harness.Measured:
    """Under the switch, once all is compiled."""
    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(True)
    try:
        wait(begin(cases, given.device), timeout=given.budget_seconds)
        for case in cases:
            if time.monotonic() > given.until:
                return
            yield measure(case, given)
            harness.give_back(given.device)
    finally:
        torch.use_deterministic_algorithms(False)


BENCH = Bench(
    doc=__doc__, results="in_order_h200.csv", columns=COLUMNS,
    cases=lambda given: [
        case
        for case in CASES
        if case.name in (given.cases or (case.name,)) and has_backward(select_cases.spec_of(case, training=True))
    ],
    rows=_rows, sides=(IN_ORDER, ANY_ORDER, TRITON, *PEERS),
    options=(
        arg("--cases", nargs="+", choices=[case.name for case in CASES], metavar="NAME"),
        arg("--write-rows", action="store_true", help="measure nothing: make the rows that decide"),
    ),
    seconds=0.3, budget=120.0, where=kernel_timing.where,
    short=("case", "side", "p50_us", "tflops", "same", "failure"), instead=_instead, table=print_table,
    failed=failures,
)  # fmt: skip
main = harness.run(BENCH)

if __name__ == "__main__":
    sys.exit(main())
