"""On a GPU: over a grid of shapes, the kernel that we choose beside every other one, in bfloat16, forward and backward.

    python -m benchmarks.bench_select --budget-seconds 540
    python -m benchmarks.bench_select --cases 'dropout*' --output benchmarks/results/select_dropout.csv    # with dropout, by name alone

A side is a lowering that takes the shape, or a peer: "sdpa" is scaled_dot_product_attention with PyTorch's own choice on the same
clean inputs, "presented" the same as an unmodified model calls it (a dense bool mask, K and V repeated, the repetition timed), "flex"
FlexAttention with a block mask. cuDNN, FlashAttention 2 and 4 and the memory-efficient kernel are lowerings too. `chosen` marks what
the real selection takes for the shape's spec here; it decides by the spec alone, and before anything is timed.

Times are microseconds of the GPU, as in bench_kernels.py. Masks and whatever else a graph makes once are made outside of them.
`error` is the largest difference from the chosen lowering's out or gradients, relative to the largest element.

Each row is one side of a case's forward or backward. A side that fails is a row with the reason. The most telling cases come first;
what the budget leaves out is done by a later run with --append. Writes benchmarks/results/select_h200.csv and prints tables last.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx
from torch.nn.functional import scaled_dot_product_attention

from attn_compiler.lowerings import LOWERINGS, by_name
from attn_compiler.lowerings.base import Operands
from attn_compiler.lowerings.choice.timed.eager import EagerEmitter
from attn_compiler.options.options import Options
from attn_compiler.passes.writing import select
from attn_compiler.spec.target import Target
from benchmarks import bench_kernels, harness, kernel_cases, kernel_peers, select_cases, standing
from benchmarks.bench_kernels import Timed
from benchmarks.kernel_cases import Case, Pass, Problem
from benchmarks.kernel_peers import Make, Side

RESULTS = Path(__file__).parent / "results" / "select_h200.csv"
COLUMNS = (
    *kernel_cases.COLUMNS,
    *("dtype", "pass", "side", "chosen", "rounds", "p20_us", "p50_us", "p80_us", "tflops", "error", "failure"),
)
#: optional ones, by their names in Target, whose versions a row has
PACKAGES = ("flash_attn_4", "cudnn_frontend")
PASSES: tuple[Pass, ...] = ("forward", "backward")
# Not kernels that a model would run.
_LEFT_OUT = ("reference", "math", "untouched", "sdpa_cpu_flash", "rows", "absorbed")
# What a run with --compile is for: kernels that are kept on disk. PyTorch's are there, cuDNN's are built anew in every process.
_COMPILED = ("triton", "hopper", "fa4", "flex")
# A side that takes so many times as long as the fastest is timed less often: it is not chosen.
_FAR, _FEW_ROUNDS = 2.0, (2, 2)
_ROUNDS = (9, 100)


# ---- sides --------------------------------------------------------------------------------------------------------


def lowering(name: str) -> Make:
    """The kernel that a lowering puts into the graph; what it makes besides is made here."""

    def make(problem: Problem) -> Side:
        device = str(problem.q.device)
        emitter: Any = EagerEmitter(Target.current(device))
        leaves = [x.detach().requires_grad_(problem.training) for x in (problem.q, problem.k, problem.v)]
        given = dict(problem.given)
        if "sinks" in given:
            given["sinks"] = given["sinks"].detach().requires_grad_(problem.training)
        nodes = {key: emitter.given(key, x) for key, x in (dict(zip("qkv", leaves, strict=True)) | given).items()}
        if problem.spec.mask.dense is not None:
            nodes["mask"] = emitter.given("mask", dense_mask(problem))
        operands = Operands(
            q=nodes["q"],
            k=nodes["k"],
            v=nodes["v"],
            mask=nodes.get("mask"),
            sinks=nodes.get("sinks"),
            loads=nodes,
            score_loads=nodes,
        )
        plan = by_name(name).plan(problem.spec, emitter.target)
        kernel: Any = by_name(name).emit(emitter, plan, operands).args[0]
        target, (args, kwargs) = kernel.target, fx.map_arg((kernel.args, kernel.kwargs), emitter.value)
        learned = [given["sinks"]] if "sinks" in given else []
        return Side(call=lambda: target(*args, **kwargs)[0], leaves=[*leaves, *learned])

    return make


def dense_mask(problem: Problem) -> Tensor:
    """bool (B|1, 1, S, S), True where a pair is allowed; everything for a query without any allowed key."""
    return kernel_peers.allowed(problem)


def sdpa(problem: Problem) -> Side:
    """PyTorch's choice. What its function has no argument for fails."""
    _only_masks(problem.case)
    q, k, v = (x.detach().requires_grad_(problem.training) for x in (problem.q, problem.k, problem.v))
    bias = kernel_peers.dense_bias(problem)
    further: dict[str, Any] = {"attn_mask": bias} if bias is not None else {"is_causal": problem.case.causal}
    further["dropout_p"] = problem.case.dropout_p
    if problem.spec.is_gqa:
        further["enable_gqa"] = True
    return Side(call=lambda: scaled_dot_product_attention(q, k, v, **further), leaves=[q, k, v])


def presented(problem: Problem) -> Side:
    """As transformers' sdpa_attention_forward calls it: a dense mask, and K and V repeated for every query head."""
    _only_masks(problem.case)
    q, k, v = (x.detach().requires_grad_(problem.training) for x in (problem.q, problem.k, problem.v))
    mask, group = dense_mask(problem), problem.case.heads_q // problem.case.heads_kv

    def call() -> Tensor:
        keys, values = (x if group == 1 else x.repeat_interleave(group, 1) for x in (k, v))
        return scaled_dot_product_attention(q, keys, values, attn_mask=mask, dropout_p=problem.case.dropout_p)

    return Side(call=call, leaves=[q, k, v])


def _only_masks(case: Case) -> None:
    if case.softcap is not None or case.sinks:
        raise ValueError("scaled_dot_product_attention has neither softcap nor sinks")


PEERS: Mapping[str, Make] = {"sdpa": sdpa, "presented": presented, "flex": kernel_peers.flex}


def sides_of(
    problem: Problem, peers: Sequence[str], lowerings: Sequence[str] | None = None
) -> tuple[dict[str, Make], str]:
    """Every side that there is for a problem, of these lowerings if any are named, and the name of the one that is chosen."""
    target = Target.current(str(problem.q.device))
    chosen = select.decide(problem.spec, target, Options()).lowering
    makes: dict[str, Make] = {
        low.name: lowering(low.name)
        for low in LOWERINGS
        if low.name not in _LEFT_OUT
        and (lowerings is None or low.name in lowerings)
        and not (low.why_not(problem.spec, target) or low.cannot_build(problem.spec, target))
    }
    wanted = [peer for peer in peers if peer != "flex" or "flex" in problem.case.peers]
    makes |= {peer: PEERS[peer] for peer in wanted}
    return makes, chosen if chosen in makes else "sdpa"


# ---- rows ---------------------------------------------------------------------------------------------------------


def measure(
    case: Case,
    which: Pass,
    *,
    device: str,
    dtype: torch.dtype,
    seconds: float,
    peers: Sequence[str],
    lowerings: Sequence[str] | None = None,
) -> list[dict[str, str]]:
    """A row for each side. Whatever fails of a side becomes its row's `failure`. No time: what is compiled runs once, and no more."""
    names = case.columns | {"dtype": str(dtype).removeprefix("torch."), "pass": which}
    rows: dict[str, dict[str, str]] = {}
    try:
        problem = kernel_cases.build(case, device=device, dtype=dtype, training=which != "forward")
        makes, chosen = sides_of(problem, peers, lowerings)
        if not seconds:
            makes = {name: make for name, make in makes.items() if name in _COMPILED}
        rows = {name: names | {"side": name, "chosen": "yes" if name == chosen else ""} for name in makes}
        sides, outcome = _prepare(problem, which, makes, rows)
        # With dropout each side drops others.
        if not case.dropout_p:
            _compare(rows, outcome, chosen, kernel_cases.used_queries(case).to(device) if which == "forward" else None)
        outcome.clear()
        if seconds > 0:
            _add_times(rows, contest(sides, device, seconds), case.flops(which))
    except Exception as failure:  # noqa: BLE001 (one broken case must not cost the others, and its rows name it)
        rows = rows or {"": names | {"side": ""}}
        return [{"failure": bench_kernels.reason(failure, []), **row} for row in rows.values()]
    return list(rows.values())


def _prepare(
    problem: Problem, which: Pass, makes: Mapping[str, Make], rows: Mapping[str, dict[str, str]]
) -> tuple[dict[str, Timed], dict[str, Sequence[Tensor]]]:
    """Each side that runs, compiled, and what it gave; the rows of the others say why they do not."""
    sides: dict[str, Timed] = {}
    outcome: dict[str, Sequence[Tensor]] = {}
    grad_out = bench_kernels.gradient_of_out(problem)
    for name, make in makes.items():
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                side = timed(make(problem), which, grad_out, once=name != "flex")
                outcome[name] = side.run(side.prepare())
                _synchronize(str(problem.q.device))
                sides[name] = side
            except Exception as failure:  # noqa: BLE001 (a row of its own says so)
                rows[name]["failure"] = bench_kernels.reason(failure, said)
    return sides, outcome


def timed(side: Side, which: Pass, grad_out: Tensor, *, once: bool) -> Timed:
    """One pass of a side. once: the forward runs once for all backwards, which compiled code does not allow."""
    if which == "forward" or not once:
        return bench_kernels.timed(side, which, grad_out)
    kept: list[Tensor] = []

    def prepare() -> Tensor:
        if not kept:
            kept.append(side.call())
        return kept[0]

    return Timed(prepare=prepare, run=lambda out: torch.autograd.grad(out, side.leaves, grad_out, retain_graph=True))


def contest(sides: Mapping[str, Timed], device: str, seconds: float) -> dict[str, list[float]]:
    """Microseconds of every call of each side; those that can't win have few."""
    first = bench_kernels.interleave(sides, device, 0.0, rounds=_FEW_ROUNDS, warmup=0)
    if not first:
        return {}
    least = {name: min(times) for name, times in first.items()}
    near = {name: side for name, side in sides.items() if least[name] <= _FAR * min(least.values())}
    return first | bench_kernels.interleave(near, device, seconds, rounds=_ROUNDS, warmup=1)


def _compare(
    rows: Mapping[str, dict[str, str]], outcome: Mapping[str, Sequence[Tensor]], chosen: str, used: Tensor | None
) -> None:
    for name in outcome:
        if name != chosen and chosen in outcome:
            rows[name]["error"] = f"{bench_kernels.error(outcome[chosen], outcome[name], used):.2g}"


def _add_times(rows: Mapping[str, dict[str, str]], times: Mapping[str, Sequence[float]], flops: float) -> None:
    for name, values in times.items():
        p20, p50, p80 = harness.percentiles(values)
        rows[name] |= {"rounds": str(len(values)), "tflops": f"{flops / p50 / 1e6:.1f}"}
        rows[name] |= {"p20_us": f"{p20:.1f}", "p50_us": f"{p50:.1f}", "p80_us": f"{p80:.1f}"}


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


# ---- running all --------------------------------------------------------------------------------------------------


def plan(
    patterns: Sequence[str], passes: Sequence[Pass], shard: tuple[int, int] = (0, 1)
) -> Iterator[tuple[Case, Pass]]:
    """Every case whose name fits one of the patterns: in the order of these, the most telling first. shard: (i, n), every n-th sort of
    mask and head dim from the i-th on, whatever its lengths: these share kernels."""
    index, count = shard
    fitting = dict.fromkeys(
        case for pattern in patterns for case in _cases(pattern) if fnmatch.fnmatch(case.name, pattern)
    )
    sorts = list(dict.fromkeys(map(_sort, fitting)))
    yield from ((case, which) for case in fitting for which in passes if sorts.index(_sort(case)) % count == index)


def _cases(pattern: str) -> Sequence[Case]:
    """Those that a pattern is for: cases with dropout are asked for by name."""
    return select_cases.DROPOUT_CASES if pattern.startswith(select_cases.DROPOUT) else select_cases.CASES


def _sort(case: Case) -> str:
    return case.name.rpartition("_s")[0]


def print_shapes(found: Sequence[standing.Shape]) -> None:
    """One line for each pass of each case, and how the choice stands to the others over all of them."""
    table = Table(title="µs, medians; ratios: the other's time over that of our choice")
    for name in ("case", "pass", "chosen", "µs", "best", "µs", "best/ours", "sdpa/ours", "presented/ours"):
        table.add_column(name)
    for shape in found:
        ratios = (shape.ratio(name) for name in (shape.best, "sdpa", "presented"))
        slow = shape.regret > standing.CLOSE
        table.add_row(
            *(shape.case, shape.which, shape.chosen, f"{shape.times[shape.chosen]:.0f}", shape.best),
            *(f"{shape.times[shape.best]:.0f}", *(_ratio(ratio) for ratio in ratios)),
            style="yellow" if slow else None,
        )
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    console.print(standing.summary(found))


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _shard(text: str) -> tuple[int, int]:
    index, count = map(int, text.split("/"))
    return index, count


def main() -> int:
    """Measure what the budget allows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-seconds", type=float, default=540.0, help="start nothing after this (%(default)s)")
    parser.add_argument("--seconds", type=float, default=0.3, help="timing of one pass of a case (%(default)s)")
    parser.add_argument(
        "--cases", nargs="+", default=["*"], metavar="PATTERN", help="names, or patterns like 'causal*'"
    )
    parser.add_argument("--passes", nargs="+", default=list(PASSES), choices=PASSES)
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--lowerings", nargs="+", metavar="NAME", help="those to measure (all that take a case)")
    parser.add_argument("--append", action="store_true", help="keep the rows of the file and measure only the others")
    parser.add_argument("--compile", action="store_true", help="run what is compiled once, write nothing: fills caches")
    parser.add_argument("--shard", type=_shard, default=(0, 1), metavar="I/N", help="every N-th sort, from the I-th on")
    parser.add_argument("--size", choices=("full", "small"), default="full", help="small: for a look at the script")
    parser.add_argument("--device", default="cuda:0", help="on cpu, in float32, with TRITON_INTERPRET=1")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="the commit to name in the rows, where this is no checkout")
    options = parser.parse_args()
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    run = Run(options, dtype)
    for case, which in plan(options.cases, options.passes, options.shard):
        if not run.take(case if options.size == "full" else case.small, which):
            break
    run.finish()
    return 0


class Run:
    """One run over the plan: what is done, what was left out, and where rows go."""

    def __init__(self, options: argparse.Namespace, dtype: torch.dtype) -> None:
        self._options, self._dtype = options, dtype
        self._start, self._left = time.monotonic(), 0
        self._where = bench_kernels.environment(options.device, options.commit) | _packages(options.device)
        columns = [*COLUMNS, *self._where]
        self._file = None if options.compile else harness.CsvFile(options.output, columns, append=options.append)
        rows = self._file.rows if self._file is not None else []
        self._done = {(row["case"], row["pass"]) for row in rows}

    def take(self, case: Case, which: Pass) -> bool:
        """Measure one pass of a case, unless it is done or time is up. False if the GPU no longer answers."""
        options = self._options
        if (case.name, which) in self._done:
            return True
        if time.monotonic() - self._start > options.budget_seconds:
            self._left += 1
            return True
        seconds = 0.0 if options.compile else options.seconds
        rows = measure(
            case,
            which,
            device=options.device,
            dtype=self._dtype,
            seconds=seconds,
            peers=options.peers,
            lowerings=options.lowerings,
        )
        for row in rows if self._file is not None else ():
            self._file.add({**row, **self._where})  # type: ignore[union-attr]
        took = time.monotonic() - self._start
        print(f"{took:4.0f} s", case.name, which, *map(_summary, rows), sep="  ", flush=True)
        if not bench_kernels.is_usable(options.device):
            print("the GPU no longer answers: run the rest with --append")
            return False
        _forget(options.device)
        return True

    def finish(self) -> None:
        """Print what was found."""
        if self._file is not None:
            print_shapes(standing.of(self._file.rows))
        if self._left:
            print(f"{self._left} passes left for a run with --append")


def _packages(device: str) -> dict[str, str]:
    target = Target.current(device)
    return {name: getattr(target, name) for name in PACKAGES}


def _summary(row: Mapping[str, str]) -> str:
    mark = "*" if row.get("chosen") else ""
    return f"{row['side']}{mark} {row.get('p50_us') or row.get('failure') or ''}"


def _forget(device: str) -> None:
    """What a case leaves in memory, and compiled code, which counts against Dynamo's limit. What modules hold is not looked at again,
    and memory is only given back where it gets scarce: either takes longer than most cases."""
    if torch._dynamo.utils.counters["stats"]:  # type: ignore[attr-defined]
        torch.compiler.reset()
    gc.collect()
    gc.freeze()
    if device != "cpu" and torch.cuda.memory_reserved(device) > torch.cuda.mem_get_info(device)[1] // 3:
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
