"""On a Hopper GPU: forwards whose head dim is a sum of powers of two, beside those padded to the next power of two, in bfloat16.

    python -m benchmarks.bench_head_parts --budget-seconds 200

A side is "padded"; "summed", products of the head dim's own size; "summed keys", where only the scores have these and values are padded;
"summed, overlapping", where a warpgroup has its softmax while the tensor cores take the outputs of its tile before; "summed by 32",
whose narrowest part has 32 dims; and "summed, three", with three warpgroups and tiles of 64 keys. `chosen` marks what sessions get. Head
dim 128 is there to compare with: it has one side.

Times are microseconds of the GPU, as in bench_kernels.py, of the forward with the rows that it computes again. `error` is the largest
difference from the padded side, relative to the largest element. Kernels are compiled in threads before anything is timed. Writes
benchmarks/results/head_parts_h200.csv.

    python -m benchmarks.bench_head_parts --write-rows

puts what that file has of "summed" and "padded" into attn_compiler/lowerings/choice/head_parts_sm90.csv, which decides, in place of the
rows of the same cases.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
import gc
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from attn_compiler.lowerings.choice import head_parts, shape_class
from attn_compiler.lowerings.hopper import plan
from attn_compiler.lowerings.hopper.plan import ForwardBlocks
from attn_compiler.lowerings.shared import ahead, imagined, part_tensors
from attn_compiler.lowerings.shared.kernel_plan import head_dim_sums, head_dim_tiles
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.target import Target
from benchmarks import bench_kernels, harness, kernel_cases, select_cases
from benchmarks.bench_kernels import Timed
from benchmarks.kernel_cases import Case, EagerEmitter, Problem

RESULTS = Path(__file__).parent / "results" / "head_parts_h200.csv"
MEASURED = ("rounds", "p20_us", "p50_us", "p80_us", "tflops", "error", "failure")
COLUMNS = (*kernel_cases.COLUMNS, "side", "chosen", *MEASURED)
PADDED, SUMMED = "padded", "summed"
KEYS, OVERLAPPING, BY_32, THREE = "summed keys", "summed, overlapping", "summed by 32", "summed, three"
SIDES = (PADDED, SUMMED, KEYS, OVERLAPPING, BY_32, THREE)
HEAD_DIMS = ((80, 80), (96, 96), (128, 128), (72, 72), (112, 112), (192, 128))
SEQLENS = (8192, 2048, 4096, 1024, 16384)
_TOKENS, _WIDTH = 16384, 2048
_WINDOWS = {1024: 256, 2048: 512, 4096: 1024, 8192: 1024, 16384: 2048}
_KINDS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "padded_causal": {"padding": "right"},
    "window": {},
    "padded": {"padding": "right", "causal": False},
    "lengths_causal": {"padding": "lengths"},
    "documents_causal": {"documents": 8},
}
_STEP = 32
_OVERLAPS_UP_TO = 128
#: stages for which shared memory has room, by the widest sum
_THREE = {80: 5, 96: 4}


def _case(kind: str, *, seqlen: int, head_dim: int, head_dim_v: int) -> Case:
    """16k tokens of width 2048."""
    heads = _WIDTH // head_dim
    sizes: dict[str, Any] = {"batch": _TOKENS // seqlen, "heads_q": heads, "heads_kv": heads}
    window = _WINDOWS[seqlen] if kind == "window" else None
    values = "" if head_dim_v == head_dim else f"_{head_dim_v}"
    sizes |= {"seqlen": seqlen, "head_dim": head_dim, "head_dim_v": head_dim_v, "window": window, **_KINDS[kind]}
    return Case(name=f"{kind}_d{head_dim}{values}_s{seqlen}", **sizes)


#: the most telling first
CASES: tuple[Case, ...] = tuple(
    _case(kind, seqlen=seqlen, head_dim=head_dim, head_dim_v=head_dim_v)
    for seqlen in SEQLENS
    for kind in _KINDS
    for head_dim, head_dim_v in HEAD_DIMS
)


# ---- sides --------------------------------------------------------------------------------------------------------


def products(side: str, spec: AttentionSpec) -> tuple[int, int] | None:
    """The head dims that a side multiplies, of q and k and of v. None where that is another side's."""
    sums, tiles = head_dim_sums(spec), head_dim_tiles(spec)
    if side == PADDED:
        return tiles
    by_32 = (-(-sums[0] // _STEP) * _STEP, -(-sums[1] // _STEP) * _STEP)
    found = {KEYS: (sums[0], tiles[1]), BY_32: by_32}.get(side, sums)
    most = {OVERLAPPING: _OVERLAPS_UP_TO, THREE: max(_THREE)}.get(side, max(sums))
    is_same = side in (KEYS, BY_32) and found == sums
    return None if is_same or sums == tiles or max(sums) > most else found


@contextlib.contextmanager
def taking(side: str, spec: AttentionSpec) -> Iterator[None]:
    """The forward is that of a side, whatever was measured."""
    dims = products(side, spec)
    blocks = plan.SUMMED
    if side == OVERLAPPING:
        blocks = {limit: dataclasses.replace(each, overlaps=True) for limit, each in blocks.items()}
    if side == THREE:
        blocks = {
            limit: ForwardBlocks(keys=64, stages=stages, query_stages=2, consumers=3, registers=160)
            for limit, stages in _THREE.items()
        }
    with (
        mock.patch.object(head_parts, "is_faster", return_value=side != PADDED),
        mock.patch.object(plan, "head_dim_sums", return_value=dims),
        mock.patch.object(plan, "SUMMED", blocks),
    ):
        yield


@dataclasses.dataclass(frozen=True, kw_only=True)
class Built:
    """A problem and what each side reads."""

    problem: Problem
    operands: dict[str, list[Tensor]]

    def arguments(self, side: str) -> tuple[Any, ...]:
        """Of the leaf op."""
        problem = self.problem
        return problem.q, problem.k, problem.v, self.operands[side], problem.text


def build(case: Case, device: str, names: Sequence[str] = SIDES) -> Built:
    """The tensors of a case. names: of sides. The lists of tiles are those that the lowering would make."""
    problem = kernel_cases.build(case, device=device, dtype=torch.bfloat16, training=False)
    emitter: Any = EagerEmitter(Target.current(device))
    site = kernel_cases.site_of(emitter, problem.q, problem.k, problem.v, problem.given)
    operands = {}
    for side in names:
        if products(side, problem.spec) is None:
            continue
        with taking(side, problem.spec), torch.no_grad():
            tiles = dataclasses.replace(problem.tiles, forward=plan.blocks_of(problem.spec).tile)
            ordered = plan.is_ordered(problem.spec)
            nodes = part_tensors.emit(emitter, problem.spec, site, tiles, ordered=ordered)
        operands[side] = [emitter.value(node) for node in nodes]
    return Built(problem=problem, operands=operands)


def body_of(side: str) -> Any:
    """What runs. Launches are replayed by the op's name."""
    from attn_compiler.lowerings.hopper import launch

    return dataclasses.replace(launch.forward, op=f"{launch.forward.op}_{side}")


def sides_of(built: Built) -> dict[str, Timed]:
    """Every side of a case."""

    def timed(side: str) -> Timed:
        body, arguments = body_of(side), built.arguments(side)

        def run(_: None) -> Sequence[Tensor]:
            with taking(side, built.problem.spec), torch.no_grad():
                found: Sequence[Tensor] = body(*arguments)
            return found

        return Timed(prepare=lambda: None, run=run)

    return {side: timed(side) for side in built.operands}


def begin(cases: Sequence[Case], device: str, names: Sequence[str] = SIDES) -> list[Future[Any]]:
    """Start to compile what sides of these cases launch."""
    from attn_compiler.lowerings.shared import compiling

    started: list[Future[Any]] = []
    pool = compiling.workers(len(os.sched_getaffinity(0)))

    def note(*asked: Any) -> None:
        started.extend(pool.begin(*asked))

    for case in cases:
        built = build(case, device, names)
        for side in built.operands:
            with taking(side, built.problem.spec):
                described = imagined.described(built.arguments(side))
                ahead.note_launches(ahead.LaunchingCall(body=body_of(side), arguments=described, named=()), note)
    return started


# ---- rows ---------------------------------------------------------------------------------------------------------


def measure(case: Case, *, device: str, seconds: float, names: Sequence[str] = SIDES) -> list[dict[str, str]]:
    """A row for each side. Whatever fails becomes its row's `failure`."""
    columns = case.columns
    try:
        built = build(case, device, names)
        spec = built.problem.spec
        sides = sides_of(built)
        used = kernel_cases.used_queries(case).to(device)
        rows: dict[str, dict[str, str]] = {name: columns | {"side": name} for name in sides}
        first = sides[PADDED].run(None)[0].clone()
        for name, side in sides.items():
            rows[name]["chosen"] = "yes" if plan.multiplied(spec) == products(name, spec) else ""
            rows[name]["error"] = f"{bench_kernels.error([side.run(None)[0]], [first], used):.2g}"
        for name, values in bench_kernels.interleave(sides, device, seconds, warmup=1).items():
            p20, p50, p80 = harness.percentiles(values)
            rows[name] |= {"rounds": str(len(values)), "tflops": f"{case.flops('forward') / p50 / 1e6:.1f}"}
            rows[name] |= {"p20_us": f"{p20:.1f}", "p50_us": f"{p50:.1f}", "p80_us": f"{p80:.1f}"}
    except Exception as failure:  # noqa: BLE001 (one broken case must not cost the others, and its row names it)
        return [columns | {"side": "", "failure": bench_kernels.reason(failure, [])}]
    return list(rows.values())


def rows_of(measured: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Rows of head_parts.MEASURED, of each case whose summed side stands beside the padded one, and has its numbers."""
    speeds = {(row["case"], row["side"]): row for row in measured if row.get("tflops")}
    found = []
    for case in CASES:
        summed, padded = speeds.get((case.name, SUMMED)), speeds.get((case.name, PADDED))
        if summed is None or padded is None or float(summed["error"]) > bench_kernels.MAX_ERROR:
            continue
        spec = select_cases.spec_of(case, training=False)
        values = (shape_class.sort_of_mask(spec), shape_class.of(spec).band, *head_dim_sums(spec), case.seqlen)
        told = (summed["tflops"], padded["tflops"], summed["date"], case.name)
        found.append(dict(zip(head_parts.COLUMNS, map(str, (*values, *told)), strict=True)))
    return found


def write_rows(path: Path, measured: Sequence[Mapping[str, str]]) -> None:
    """Put them into the file that decides, in place of its rows of the same cases."""
    harness.replace_rows(path, head_parts.COLUMNS, rows_of(measured))


def print_table(rows: Sequence[Mapping[str, str]]) -> None:
    """A line for each case: TFLOP/s of each side, the chosen one in green."""

    def cell(of_case: Mapping[str, Mapping[str, str]], name: str) -> str:
        return _cell(of_case.get(name, of_case.get("", {})))

    harness.print_sides(rows, SIDES, cell, title="forward, TFLOP/s on allowed pairs, medians", width=140)


def _cell(row: Mapping[str, str]) -> str:
    if row.get("failure"):
        return "failed"
    return f"[green]{row['tflops']}[/]" if row.get("chosen") else row.get("tflops", "")


def failures(rows: Sequence[Mapping[str, str]]) -> int:
    """1 where a side fails or is wrong, else 0: an exit status."""
    return int(any(row.get("failure") or float(row.get("error") or 0) > bench_kernels.MAX_ERROR for row in rows))


def main() -> int:
    """Measure what the budget allows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-seconds", type=float, default=200.0, help="start nothing after this (%(default)s)")
    parser.add_argument("--seconds", type=float, default=0.2, help="timing of a case (%(default)s)")
    parser.add_argument("--cases", nargs="+", default=["*"], help="patterns of names")
    parser.add_argument("--sides", nargs="+", choices=SIDES[1:], default=SIDES[1:], help="beside the padded one")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="the commit to name in the rows, where this is no checkout")
    parser.add_argument("--write-rows", action="store_true", help="measure nothing: make the rows that decide")
    options = parser.parse_args()
    if options.write_rows:
        write_rows(head_parts.MEASURED, harness.read(options.output))
        return 0

    start = time.monotonic()
    warnings.simplefilter("ignore")
    cases = [case for case in CASES if any(fnmatch.fnmatch(case.name, pattern) for pattern in options.cases)]
    names = (PADDED, *options.sides)
    where = bench_kernels.environment(options.device, options.commit)
    file = harness.CsvFile(options.output, [*COLUMNS, *where])
    # All lengths of a kind and head dim have the same kernels, but for few.
    kinds = {(case.name.rsplit("_s", 1)[0]): case for case in reversed(cases)}
    wait(begin(list(reversed(kinds.values())), options.device, names), timeout=options.budget_seconds)
    print(f"{time.monotonic() - start:4.0f} s  compiled", flush=True)
    for case in cases:
        if time.monotonic() - start > options.budget_seconds:
            print("no time left for", case.name)
            continue
        for row in measure(case, device=options.device, seconds=options.seconds, names=names):
            file.add({**row, **where})
        gc.collect()
        torch.cuda.empty_cache()
    print_table(file.rows)
    return failures(file.rows)


if __name__ == "__main__":
    sys.exit(main())
