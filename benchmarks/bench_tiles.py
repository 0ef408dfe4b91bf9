"""On a GPU, each of our Triton kernels alone with one tile after another: the figures behind `lowerings/shared/parts/tile_table.py`.

    python -m benchmarks.bench_tiles --cases causal_d128_s8192 --kernels dkv --tiles "64x128 w8 s3" "32x64 w4 s3"

Without --tiles those of the table are measured beside their neighbours, which differ in one number. All tiles of a kernel take turns, with
the L2 cache overwritten before each call. TFLOP/s count allowed pairs: 4 · pairs · D forward, dq 1.5 times and dk and dv 2 times that.

Adds rows to benchmarks/results/tiles_h200.csv, as a run of their own, and prints the fastest tile beside the table's. A tile that does not
compile or fit is printed with the reason and has no row. Exits with 1 where none of a kernel's ran.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from attn_compiler.lowerings.base import Tile, Tiles
from attn_compiler.lowerings.shared.calls.failures import FAILURES, Caller
from attn_compiler.lowerings.triton import launch
from benchmarks import harness, kernel_cases, kernel_timing
from benchmarks.harness import Bench, Row, arg
from benchmarks.kernel_cases import Case, Problem
from benchmarks.kernel_timing import Timed

_WHERE = ("device", "torch", "triton", "cudnn", "date", "commit")
_TILE = ("tile_queries", "tile_keys", "warps", "stages", "registers")
COLUMNS = ("run", "case", "shape", *_TILE, "us_p50", "tflops", *_WHERE)

#: as people know them -> their fields of `Tiles`, and what they multiply beside the forward
KERNELS = {"forward": ("forward", 1.0), "dq": ("grad_q", 1.5), "dkv": ("grad_kv", 2.0)}

_SIZES = (16, 32, 64, 128, 256)
_STAGES = (1, 2, 3, 4)
#: of a thread of four warps, so that four or three programs share a multiprocessor
_REGISTERS = (None, 128, 168)


def neighbours(tile: Tile, kernel: str) -> list[Tile]:
    """The tile, and those that differ from it in one number."""
    vary = functools.partial(dataclasses.replace, tile)
    return [
        tile,
        *(vary(queries=size) for size in _SIZES if size in (tile.queries // 2, tile.queries * 2)),
        *(vary(keys=size) for size in _SIZES if size in (tile.keys // 2, tile.keys * 2)),
        vary(warps=4 if tile.warps == 8 else 8, registers=None),
        *(vary(stages=stages) for stages in _STAGES if abs(stages - tile.stages) == 1),
        *(vary(registers=most) for most in _REGISTERS if tile.warps == 4 and most != tile.registers),
        *([vary(apart=not tile.apart)] if kernel == "dkv" else []),
    ]


def tiles_with(table: Tiles, kernel: str, tile: Tile) -> Tiles:
    """The table's but for this kernel's. Forward and dq visit the same lists of tiles, where there are any: one follows the other."""
    if kernel == "dkv":
        return dataclasses.replace(table, grad_kv=tile)
    forward, grad_q = (
        tile if KERNELS[kernel][0] == name else dataclasses.replace(other, queries=tile.queries, keys=tile.keys)
        for name, other in (("forward", table.forward), ("grad_q", table.grad_q))
    )
    return dataclasses.replace(table, forward=forward, grad_q=grad_q)


def alone(problem: Problem, kernel: str) -> Callable[[], object]:
    """A call that runs one kernel. What it needs was run before. A launch that fails raises, and nothing else is timed in its place."""
    q, k, v, operands, text = problem.q, problem.k, problem.v, problem.operands, problem.text
    FAILURES.forget()
    FAILURES.watch([text], Caller(lowering="triton", spec=problem.spec, strict=True))
    if kernel == "forward":
        return lambda: launch.forward(q, k, v, operands, text)
    out, lse = launch.forward(q, k, v, operands, text)
    grad_out = kernel_timing.gradient_of_out(problem)
    shared = launch.begin_backward(grad_out, torch.zeros_like(lse), q, k, v, operands, out, lse, text)
    return launch.single_gradients(shared)[KERNELS[kernel][0]]


@dataclass(frozen=True)
class Asked:
    """A kernel on a case."""

    case: Case
    kernel: str

    @property
    def names(self) -> dict[str, str]:
        return {"case": f"{self.kernel} {self.case.name}"}


def measured(asked: Asked, given: Namespace) -> tuple[Tile, dict[Tile, float], dict[Tile, str]]:
    """The table's tile; the median microseconds of each that ran; why the others did not. Without tiles those beside the table's."""
    how = {"device": given.device, "dtype": kernel_timing.dtype_of(given.device), "training": asked.kernel != "forward"}
    table = kernel_cases.build(asked.case, **how).tiles
    own: Tile = getattr(table, KERNELS[asked.kernel][0])
    sides: dict[Tile, Timed] = {}
    unfit: dict[Tile, str] = {}
    with torch.no_grad():
        for tile in dict.fromkeys(given.tiles or neighbours(own, asked.kernel)):
            try:
                tiles = tiles_with(table, asked.kernel, tile)
                call = alone(kernel_cases.build(asked.case, **how, tiles=tiles), asked.kernel)
                call()
            except Exception as failure:  # noqa: BLE001 (one that does not fit must not cost the others, and is printed)
                unfit[tile] = kernel_timing.reason(failure)
            else:
                sides[tile] = Timed(prepare=lambda: None, run=lambda _, call=call: (call(), ())[1])
        named = {tile.words: side for tile, side in sides.items()}
        times = kernel_timing.interleave(named, given.device, given.seconds)
    return own, {tile: harness.percentiles(times[tile.words])[1] for tile in sides}, unfit


def measure(asked: Asked, given: Namespace) -> Iterator[Row]:
    """A row for each tile that ran."""
    own, times, unfit = measured(asked, given)
    print(*outcome(asked.case, asked.kernel, own, times, unfit), sep="\n", flush=True)
    given.broken |= not times
    for tile, microseconds in times.items():
        yield {**row(asked.case, asked.kernel, tile, microseconds), "run": given.run}


def row(case: Case, kernel: str, tile: Tile, microseconds: float) -> dict[str, str]:
    """What is written of one tile. The name of a pass each for dk and dv says so."""
    numbers = (tile.queries, tile.keys, tile.warps, tile.stages, "" if tile.registers is None else tile.registers)
    return {
        "case": f"{kernel} {case.name}" + (" apart" if tile.apart else ""),
        "shape": shape(case),
        **{name: str(number) for name, number in zip(_TILE, numbers, strict=True)},
        "us_p50": f"{microseconds:.1f}",
        "tflops": f"{_speed(case, kernel, microseconds):.1f}",
    }


def shape(case: Case) -> str:
    """For people: "B8 S2048 D128, H 32/8"."""
    dims = f"{case.head_dim}" if case.head_dim == case.head_dim_v else f"{case.head_dim}/{case.head_dim_v}"
    heads = f"{case.heads_q}" if case.heads_q == case.heads_kv else f"{case.heads_q}/{case.heads_kv}"
    return f"B{case.batch} S{case.seqlen} D{dims}, H {heads}"


def _speed(case: Case, kernel: str, microseconds: float) -> float:
    return KERNELS[kernel][1] * case.flops("forward") / microseconds / 1e6


def outcome(
    case: Case, kernel: str, own: Tile, times: Mapping[Tile, float], unfit: Mapping[Tile, str]
) -> Iterator[str]:
    """Lines for people: the fastest, the table's, and what did not run."""
    if times:
        best = min(times, key=lambda tile: times[tile])
        said = [f"{best.words}: {times[best]:.1f} µs, {_speed(case, kernel, times[best]):.0f} TF"]
        if own in times and own != best:
            said.append(f"the table's {own.words}: {times[own]:.1f} µs, {times[own] / times[best]:.3f} times as long")
        elif own == best:
            said.append("as in the table")
        yield f"{kernel} {case.name}  {'; '.join(said)}"
    for tile, why in unfit.items():
        yield f"{kernel} {case.name}  {tile.words} does not run: {why}"


def where(given: Namespace) -> dict[str, str]:
    """Columns that say where a row was measured; of a run of its own."""
    rows = harness.read(given.output or harness.RESULTS / "tiles_h200.csv", missing_ok=True)
    given.run = str(1 + max((int(one["run"]) for one in rows), default=0))
    known = kernel_timing.where(given)
    return {name: known[name] for name in _WHERE}


BENCH = Bench(
    doc=__doc__, results="tiles_h200.csv", columns=COLUMNS,
    cases=lambda given: [
        Asked(case if given.size == "full" else case.small, kernel)
        for case in harness.picked(kernel_cases.CASES, given.cases)
        for kernel in given.kernels
    ],
    measure=measure, sides=KERNELS,
    options=(
        harness.PATTERNS,
        arg("--kernels", nargs="+", default=list(KERNELS), choices=list(KERNELS)),
        arg("--tiles", nargs="+", default=[], type=Tile.read, metavar="TILE", help="like '64x64 w4 s3 r168'"),
    ),
    seconds=0.5, sized=True, together=True, where=where, short=("case", *_TILE[:4], "us_p50"),
    failed=lambda rows: False,
)  # fmt: skip
main = harness.run(BENCH)

if __name__ == "__main__":
    sys.exit(main())
