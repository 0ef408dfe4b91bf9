"""On a GPU, our decode kernel alone, beside cuDNN and FlashAttention 2 over the whole cache, in bfloat16.

    python -m benchmarks.bench_decode --budget-seconds 90

Times are microseconds of the GPU for one layer, from replays of a CUDA graph that holds one call for each of many caches, which together
are larger than the L2 cache: as a model's layers find theirs. `hot_us`: the same cache each time. The peers get no mask, softcap or sink:
where there is one, or a cache is filled in part, they compute something else, and what they read is the point. `read` is the best time in
which keys and values are read and nothing else is done: the floor. `error` is the largest difference from float32's math relative to its
largest element.

`rule` rows are the schedule that the lowering picks, `tried` rows others, for cases that are marked so. A side that fails is a row with the
reason.
"""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attn_compiler.lowerings.decode import plan, schedule as decode_schedule
from attn_compiler.lowerings.decode.plan import DecodeCall, Schedule
from attn_compiler.spec.target import Target
from benchmarks import decode_cases, harness, kernel_timing
from benchmarks.decode_cases import TRIED, Case, Problem
from benchmarks.harness import Bench, Row, arg

SCHEDULE = ("keys", "warps", "stages", "slices", "splits")
COLUMNS = (*decode_cases.COLUMNS, "side", *SCHEDULE, "us", "hot_us", "gb_per_s", "error", "host_us", "failure")
# Of bfloat16's output.
MAX_ERROR = 0.02

_REPLAYS = 5
_HOT_CALLS = 40

#: by head dim: (keys, warps, stages, slices)
CANDIDATES: dict[int, tuple[tuple[int, int, int, int], ...]] = {
    64: ((128, 4, 3, 4), (128, 4, 4, 4), (64, 4, 4, 4), (64, 4, 6, 4), (64, 2, 4, 2), (128, 8, 4, 8)),
    128: ((64, 4, 4, 4), (64, 4, 3, 4), (64, 4, 5, 4), (64, 4, 6, 4), (128, 4, 3, 4), (128, 8, 3, 8), (64, 4, 4, 1), (64, 8, 2, 1)),
    256: ((32, 4, 3, 1), (32, 4, 4, 1), (64, 8, 2, 1), (64, 8, 3, 1), (32, 2, 3, 2), (64, 4, 2, 4)),
}  # fmt: skip
CANDIDATES_FP8 = ((128, 4, 4, 4), (128, 4, 3, 4), (64, 4, 4, 4), (64, 4, 6, 4), (128, 8, 3, 8), (128, 8, 4, 8))
_SPLITS = (1, 2, 3, 4, 5, 6, 8, 11, 16, 24, 33)
#: programs for each multiprocessor, at least and at most, among what is tried; and at most where splits alone are
_LEAST_FILL, _MOST_FILL, _MOST_FILL_OF_SPLITS = 0.4, 4.2, 8.2

_PEERS = (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION))

Calls = list[Callable[[], Tensor]]


def ours(problem: Problem, schedule: Schedule) -> Calls:
    """`attn_compiler::decode` with a schedule, once for each cache."""
    call = DecodeCall(spec=problem.spec, schedule=schedule)
    tiles = problem.case.batch * problem.case.heads_kv * plan.rows_of(problem.spec)[1]
    named = {**problem.named, "count": torch.zeros(tiles, dtype=torch.int32, device=problem.q.device)}
    operands = [named[name] for name in plan.plan_of(call).operands]
    text, q = call.to_text(), problem.q

    def of(k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        def run() -> Tensor:
            out: Tensor = torch.ops.attn_compiler.decode.default(q, k, v, operands, text)[0]
            return out

        return run

    return [of(k, v) for k, v in problem.caches]


def sdpa(problem: Problem, backend: SDPBackend) -> Calls:
    """scaled_dot_product_attention over the whole cache with one kernel alone."""
    grouped = problem.case.heads_q != problem.case.heads_kv

    def of(k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(problem.q, k, v, enable_gqa=grouped)

        return run

    return [of(k, v) for k, v in problem.caches]


def tried(problem: Problem, target: Target) -> Iterator[Schedule]:
    """Schedules besides the lowering's own: its tile, or every tile of the head dim, with splits that leave the machine neither empty nor
    overfull."""
    if problem.case.tried == "nothing":
        return
    rule = decode_schedule.schedule(problem.spec, target)
    rows, blocks = plan.rows_of(problem.spec)
    tiles = problem.case.batch * problem.case.heads_kv * blocks
    wide = next((dim for dim in sorted(CANDIDATES) if max(problem.case.head_dim, problem.case.width_v) <= dim), 256)
    tiles_tried = CANDIDATES[wide] if problem.case.stored is None else CANDIDATES_FP8
    most_fill = _MOST_FILL
    if problem.case.tried == "splits":
        tiles_tried, most_fill = ((rule.keys, rule.warps, rule.stages, rule.slices),), _MOST_FILL_OF_SPLITS
    for keys, warps, stages, slices in tiles_tried:
        if slices > 1 and rows > 16:
            continue
        for splits in _SPLITS:
            fill = tiles * splits / max(target.processors, 1)
            if splits > 1 and not (_LEAST_FILL <= fill <= most_fill and keys * splits <= problem.case.used):
                continue
            found = dataclasses.replace(
                rule, keys=keys, warps=warps, stages=stages, slices=slices, splits=splits, least_keys=max(keys, 64)
            )
            if found != rule:
                yield found


def microseconds(calls: Calls, *, replays: int = _REPLAYS) -> float:
    """Of one call, the median over replays of a CUDA graph that holds them all."""
    graph = kernel_timing.graph_of(calls)
    graph.replay()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(replays)]
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events) * 1e3 / len(calls)


def host_microseconds(call: Callable[[], Tensor]) -> float:
    """What a call takes the host, the best of batches that the GPU is not waited for in."""
    found = []
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(50):
            call()
        found.append((time.perf_counter() - start) / 50 * 1e6)
    torch.cuda.synchronize()
    return min(found)


def error(found: Tensor, right: Tensor) -> float:
    return float((found.float() - right).abs().max() / right.abs().max())


#: (programs of a head's keys and values, elements of a tile, warps)
WAYS = tuple((chunks, tile, warps) for chunks in (1, 2, 4, 8, 16, 32, 64) for tile, warps in ((8192, 4), (16384, 8)))
#: programs at least and at most
_FEWEST, _MOST = 120, 1100


@triton.jit
def _read(K, V, Out, stride: tl.int64, size, TILE: tl.constexpr):
    """Grid: (chunks, heads). Each program adds up its share of the first `size` elements of a head's K and V."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    share = tl.cdiv(tl.cdiv(size, tl.num_programs(0)), TILE) * TILE
    begin = chunk * share
    end = tl.minimum(begin + share, size)
    at = tl.arange(0, TILE)
    K += head.to(tl.int64) * stride
    V += head.to(tl.int64) * stride
    total = tl.zeros([TILE], tl.float32)
    for start in tl.range(begin, end, TILE):
        inside = start + at < end
        k = tl.load(K + start + at, mask=inside, other=0.0)
        v = tl.load(V + start + at, mask=inside, other=0.0)
        total += k.to(tl.float32) + v.to(tl.float32)
    tl.store(Out + head * tl.num_programs(0) + chunk, tl.sum(total))


def ways_to_read(problem: Problem) -> Iterator[list[Callable[[], Tensor]]]:
    """Ways to read the used part of every cache once, from each of a number of grids; none where K and V have different sizes."""
    case = problem.case
    heads = case.batch * case.heads_kv
    if case.width_v != case.head_dim:
        return
    for chunks, tile, warps in WAYS:
        programs = chunks * heads
        if programs < _FEWEST or (programs > _MOST and chunks > 1) or case.used * case.head_dim < chunks * tile:
            continue
        yield [_reading(k, v, chunks, tile, warps, case.used) for k, v in problem.caches]


def _reading(k: Tensor, v: Tensor, chunks: int, tile: int, warps: int, keys: int) -> Callable[[], Tensor]:
    batch, heads, length, width = k.shape
    out = torch.empty(batch * heads * chunks, dtype=torch.float32, device=k.device)

    def run() -> Tensor:
        _read[(chunks, batch * heads)](k, v, out, length * width, keys * width, TILE=tile, num_warps=warps)
        return out

    return run


def measure(case: Case, given: Namespace) -> Iterator[Row]:
    """The rows of a case, the lowering's own first."""
    problem, target = decode_cases.build(case, given.device), Target.current(given.device)
    rule = decode_schedule.schedule(problem.spec, target)
    yield _row(problem, "rule", rule, lambda: ours(problem, rule), checked=True)
    for side, backend in () if problem.case.stored is not None else _PEERS:
        yield _row(problem, side, None, lambda backend=backend: sdpa(problem, backend))  # type: ignore[misc]
    yield _read_row(problem)
    for other in tried(problem, target):
        yield _row(problem, "tried", other, lambda other=other: ours(problem, other))  # type: ignore[misc]


def _row(
    problem: Problem, side: str, schedule: Schedule | None, make: Callable[[], Calls], *, checked: bool = False
) -> dict[str, str]:
    shown = {} if schedule is None else {name: str(getattr(schedule, name)) for name in SCHEDULE}
    row = {**problem.case.columns, "side": side, **shown}
    try:
        calls = make()
        us = microseconds(calls, replays=_REPLAYS if side != "tried" else 3)
        row |= {"us": f"{us:.2f}", "gb_per_s": f"{problem.case.bytes_used / us / 1e3:.0f}"}
        if side != "tried":
            row["hot_us"] = f"{microseconds(calls[:1] * _HOT_CALLS):.2f}"
        if checked:
            row["error"] = f"{error(calls[0](), decode_cases.expected(problem)):.2g}"
            row["host_us"] = f"{host_microseconds(calls[0]):.1f}"
    except Exception as failure:  # noqa: BLE001 - the reason is the row
        row["failure"] = harness.failure(failure)
    return row


def _read_row(problem: Problem) -> dict[str, str]:
    row = {**problem.case.columns, "side": "read"}
    ways = list(ways_to_read(problem))
    if not ways:
        return {**row, "failure": "no grid to read this cache by"}
    us = min(microseconds(calls) for calls in ways)
    hot = min(microseconds(calls[:1] * _HOT_CALLS) for calls in ways)
    return {**row, "us": f"{us:.2f}", "gb_per_s": f"{problem.case.bytes_used / us / 1e3:.0f}", "hot_us": f"{hot:.2f}"}


Job = tuple[Case, Schedule]


def jobs(cases: Sequence[Case], target: Target) -> list[Job]:
    """Every kernel of the cases once, each on a short cache. Lengths and batches make no other kernel."""
    found: dict[Job, None] = {}
    for case in cases:
        short = dataclasses.replace(case, name="", batch=1, length=256, filled=None, window=None, tried="nothing")
        # A spec says nothing of how many bytes lie behind it.
        problem = decode_cases.build(case, "meta")
        for schedule in (decode_schedule.schedule(problem.spec, target), *tried(problem, target)):
            found[short, schedule] = None
    return list(found)


def _compile(job: Job) -> None:
    case, schedule = job
    problem = decode_cases.build(case, "cuda")
    ours(dataclasses.replace(problem, caches=problem.caches[:1]), schedule)[0]()
    torch.cuda.synchronize()


def compiled_before(cases: Sequence[Case], target: Target, processes: int) -> None:
    """Compile in parallel, so that each kernel is on disk when it is measured."""
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile, jobs(cases, target)))


def print_table(rows: Sequence[Row]) -> None:
    """One line a case: ours, the best of what was tried, the peers."""

    def schedule(row: Row) -> str:
        return "/".join(row.get(name, "") for name in SCHEDULE) if row.get("keys") else ""

    def line(own: Sequence[Row]) -> list[str]:
        sides: Mapping[str, Row] = {row["side"]: row for row in own if row["side"] != "tried"}
        rule = sides["rule"]
        of_ours = [row for row in own if row.get("us") and row["side"] in ("rule", "tried")]
        best: Row = min(of_ours, key=lambda row: float(row["us"]), default={})
        return [
            *(
                rule["name"],
                rule.get("us", rule.get("failure", "")),
                schedule(rule),
                best.get("us", ""),
                schedule(best),
            ),
            *(sides.get(side, {}).get("us", "") for side in ("cudnn", "flash", "read")),
            *(sides.get(side, {}).get("hot_us", "") for side in ("rule", "cudnn", "read")),
            *(rule.get(name, "") for name in ("gb_per_s", "error", "host_us")),
        ]

    lines = [line([row for row in rows if row["name"] == case]) for case in dict.fromkeys(row["name"] for row in rows)]
    names = "case,rule,,best tried,,cudnn,flash,read,hot: rule,cudnn,read,GB/s,error,host".split(",")
    harness.show("µs of one layer; hot: the same cache again and again", names, lines, width=180)


def cases(given: Namespace) -> list[Case]:
    found = harness.picked(decode_cases.CASES, given.cases)
    return [dataclasses.replace(case, tried=min(case.tried, given.tried, key=TRIED.index)) for case in found]


def _begin(given: Namespace) -> None:
    if given.processes:
        compiled_before(cases(given), Target.current(given.device), given.processes)
    # Each capture of a graph looks for garbage, which takes longer than what is measured: not among what is here already.
    gc.freeze()


BENCH = Bench(
    doc=__doc__, results="decode_h200.csv", columns=COLUMNS, cases=cases, measure=measure, devices=("cuda",), budget=300.0,
    sides=("rule", *dict(_PEERS), "read", "tried"), short=("name", "side", "us", "failure"), begin=_begin,
    forget=lambda device: torch.cuda.empty_cache(), table=print_table,
    failed=lambda rows: any(
        row["side"] == "rule" and (row.get("failure") or float(row["error"]) > MAX_ERROR) for row in rows
    ),
    options=(
        harness.PATTERNS,
        arg("--processes", type=int, default=8, help="that compile before anything is measured; 0: none does"),
        arg("--tried", choices=TRIED, default="tiles", help="other schedules that are measured, at most"),
    ),
)  # fmt: skip
main = harness.run(BENCH)

if __name__ == "__main__":
    sys.exit(main())
