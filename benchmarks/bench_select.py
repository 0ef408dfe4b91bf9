"""On a GPU: over a grid of shapes, the kernel that we choose beside every other one, in bfloat16, forward and backward.

    python -m benchmarks.bench_select --budget-seconds 540
    python -m benchmarks.bench_select --cases 'dropout*' --output benchmarks/results/select_dropout.csv    # with dropout, by name alone

A side is a lowering that takes the shape, or a peer: "sdpa" is scaled_dot_product_attention with PyTorch's own choice on the same clean
inputs, "presented" the same as an unmodified model calls it (a dense bool mask, K and V repeated, the repetition timed), "flex"
FlexAttention with a block mask. cuDNN, FlashAttention 2 and 4 and the memory-efficient kernel are lowerings too. `chosen` marks what the
real selection takes for the shape's spec here; it decides by the spec alone, and before anything is timed.

Times are microseconds of the GPU, as in bench_kernels.py. Masks and whatever else a graph makes once are made outside of them. `error` is
the largest difference from the chosen lowering's out or gradients, relative to the largest element.

Each row is one side of a case's forward or backward. A side that fails is a row with the reason. The most telling cases come first; what
the budget leaves out is done by a later run with --append. Writes benchmarks/results/select_h200.csv and prints tables last.
"""

from __future__ import annotations

import fnmatch
import gc
import itertools
import statistics
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.functional import scaled_dot_product_attention

from attn_compiler.lowerings import LOWERINGS, by_name
from attn_compiler.lowerings.base import Operands
from attn_compiler.lowerings.choice.timed.eager import EagerEmitter
from attn_compiler.options.options import Options
from attn_compiler.passes.writing import select
from attn_compiler.spec.target import Target
from benchmarks import harness, kernel_cases, kernel_peers, kernel_timing, select_cases
from benchmarks.harness import RESULTS as FOLDER, Bench, arg
from benchmarks.kernel_cases import Case, Pass, Problem
from benchmarks.kernel_peers import Make, Side
from benchmarks.kernel_timing import Timed

RESULTS = FOLDER / "select_h200.csv"
COLUMNS = (
    *kernel_cases.COLUMNS,
    *("dtype", "pass", "side", "chosen", "rounds", "p20_us", "p50_us", "p80_us", "tflops", "error", "failure"),
)
#: optional ones, by their names in Target, whose versions a row has
PACKAGES = ("flash_attn_4", "cudnn_frontend")
PASSES: tuple[Pass, ...] = ("forward", "backward")
# Not kernels that a model would run.
_LEFT_OUT = ("reference", "math", "untouched", "sdpa_cpu_flash", "rows", "absorbed")
# A side that takes so many times as long as the fastest is timed less often: it is not chosen.
_FAR, _FEW_ROUNDS = 2.0, (2, 2)
_ROUNDS = (9, 100)


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
            q=nodes["q"], k=nodes["k"], v=nodes["v"], mask=nodes.get("mask"), sinks=nodes.get("sinks"), loads=nodes,
            score_loads=nodes,
        )  # fmt: skip
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


def contest(sides: Mapping[str, Timed], device: str, seconds: float) -> dict[str, list[float]]:
    """Microseconds of every call of each side; those that can't win have few."""
    first = kernel_timing.interleave(sides, device, 0.0, rounds=_FEW_ROUNDS, warmup=0)
    if not first:
        return {}
    least = {name: min(times) for name, times in first.items()}
    near = {name: side for name, side in sides.items() if least[name] <= _FAR * min(least.values())}
    return first | kernel_timing.interleave(near, device, seconds, rounds=_ROUNDS, warmup=1)


def measure(asked: Asked, given: Namespace) -> list[dict[str, str]]:
    """A row for each side. Whatever fails of a side becomes its row's `failure`."""
    case, which = asked.case if given.size == "full" else asked.case.small, asked.which
    dtype = kernel_timing.dtype_of(given.device)
    names = case.columns | {"dtype": str(dtype).removeprefix("torch."), "pass": which}
    rows: dict[str, dict[str, str]] = {}
    try:
        problem = kernel_cases.build(case, device=given.device, dtype=dtype, training=which != "forward")
        makes, chosen = sides_of(problem, given.peers, given.lowerings)
        rows = {name: names | {"side": name, "chosen": "yes" if name == chosen else ""} for name in makes}
        sides, outcome = kernel_timing.prepared(problem, which, makes, rows, once=lambda name: name != "flex")
        # With dropout each side drops others.
        if not case.dropout_p:
            kernel_timing.compared(rows, outcome, chosen, kernel_timing.used_by(problem, which))
        outcome.clear()
        for name, values in contest(sides, given.device, given.seconds).items():
            rows[name] |= harness.kernel_times(values, case.flops(which))
    except Exception as failure:  # noqa: BLE001 (one broken case must not cost the others, and its rows name it)
        rows = rows or {"": names | {"side": ""}}
        return [{"failure": kernel_timing.reason(failure), **row} for row in rows.values()]
    return list(rows.values())


@dataclass(frozen=True)
class Asked:
    """One pass of a case."""

    case: Case
    which: Pass

    @property
    def names(self) -> dict[str, str]:
        return {"case": self.case.name, "pass": self.which}


def plan(patterns: Sequence[str], passes: Sequence[Pass]) -> Iterator[Asked]:
    """Every case whose name fits one of the patterns: in the order of these, the most telling first. Cases with dropout are asked for by
    name."""
    fitting = dict.fromkeys(
        case
        for pattern in patterns
        for case in (select_cases.DROPOUT_CASES if pattern.startswith(select_cases.DROPOUT) else select_cases.CASES)
        if fnmatch.fnmatch(case.name, pattern)
    )
    yield from (Asked(case, which) for case in fitting for which in passes)


# A choice that takes so many times as long as the best side is as good as it.
CLOSE, WORST = 1.03, 1.10
# A peer that is no kernel that could be chosen: the site before anything is known of it.
_NO_CHOICE = ("presented",)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One pass of one case. times: microseconds of every side that ran. chosen, best: names of sides; best may be the chosen one."""

    case: str
    which: str
    times: Mapping[str, float]
    chosen: str

    @property
    def best(self) -> str:
        kernels = {name: took for name, took in self.times.items() if name not in _NO_CHOICE}
        return min(kernels, key=lambda name: (kernels[name], name != self.chosen))

    @property
    def regret(self) -> float:
        """How many times the best side's time the choice takes."""
        return self.times[self.chosen] / self.times[self.best]

    def ratio(self, other: str) -> float | None:
        """The other's time over that of the choice; None if that did not run."""
        return self.times[other] / self.times[self.chosen] if other in self.times else None


def shapes_of(rows: Iterable[Mapping[str, str]]) -> list[Shape]:
    """A shape for each pass of each case of which the chosen side ran, in the order of the rows."""
    found = []
    for (case, which), group in itertools.groupby(rows, key=lambda row: (row["case"], row["pass"])):
        sides = list(group)
        times = {row["side"]: float(row["p50_us"]) for row in sides if row.get("p50_us")}
        chosen = next((row["side"] for row in sides if row.get("chosen")), "")
        if chosen in times:
            found.append(Shape(case=case, which=which, times=times, chosen=chosen))
    return found


def summary(shapes: Sequence[Shape]) -> str:
    """In words: the share of choices that are as good as the best side, the worst, and geometric means."""
    if not shapes:
        return "nothing was measured"
    close = sum(shape.regret <= CLOSE for shape in shapes) / len(shapes)
    worst = max(shapes, key=lambda shape: shape.regret)
    lines = [
        f"{len(shapes)} shapes, {len({shape.case for shape in shapes})} of them with other sizes or masks",
        f"within {CLOSE - 1:.0%} of the best side: {close:.1%}; more than {WORST - 1:.0%} slower: "
        f"{sum(shape.regret > WORST for shape in shapes)}",
        f"worst: {worst.case} {worst.which}, {worst.chosen} takes {worst.regret:.3f} times {worst.best}",
    ]
    for other in ("sdpa", "presented", "flex", "fa4", "sdpa_cudnn", "sdpa_flash", "sdpa_efficient", "triton"):
        ratios = [ratio for shape in shapes if (ratio := shape.ratio(other)) is not None]
        if ratios:
            lines.append(f"{other} over ours, geometric mean of {len(ratios)}: {statistics.geometric_mean(ratios):.3f}")
    return "\n".join(lines)


def print_shapes(found: Sequence[Shape]) -> None:
    """One line for each pass of each case, and how the choice stands to the others over all of them."""

    def line(shape: Shape) -> list[str]:
        ratios = (shape.ratio(name) for name in (shape.best, "sdpa", "presented"))
        times = [f"{shape.times[name]:.0f}" for name in (shape.chosen, shape.best)]
        cells = [shape.case, shape.which, shape.chosen, times[0], shape.best, times[1]]
        cells += ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        return [f"[yellow]{cell}[/]" for cell in cells] if shape.regret > CLOSE else cells

    names = ("case", "pass", "chosen", "µs", "best", "µs", "best/ours", "sdpa/ours", "presented/ours")
    title = "µs, medians; ratios: the other's time over that of our choice"
    harness.show(title, names, map(line, found), said=summary(found))


def where(given: Namespace) -> dict[str, str]:
    """Columns that say where a row was measured, and with which packages."""
    target = Target.current(given.device)
    return kernel_timing.where(given) | {name: getattr(target, name) for name in PACKAGES}


def _forget(device: str) -> None:
    """What a case leaves in memory, and compiled code, which counts against Dynamo's limit. What modules hold is not looked at again,
    and memory is only given back where it gets scarce: either takes longer than most cases."""
    if torch._dynamo.utils.counters["stats"]:  # type: ignore[attr-defined]
        torch.compiler.reset()
    gc.collect()
    gc.freeze()
    if device != "cpu" and torch.cuda.memory_reserved(device) > torch.cuda.mem_get_info(device)[1] // 3:
        torch.cuda.empty_cache()


BENCH = Bench(
    doc=__doc__, results=RESULTS.name, columns=COLUMNS,
    cases=lambda given: plan(given.cases, given.passes),
    rows=lambda cases, given: kernel_timing.while_usable(measure, cases, given, _forget),
    sides=(*(low.name for low in LOWERINGS if low.name not in _LEFT_OUT), *PEERS),
    options=(
        harness.PATTERNS,
        arg("--passes", nargs="+", default=list(PASSES), choices=PASSES),
        arg("--peers", nargs="*", default=list(PEERS), choices=list(PEERS)),
        arg("--lowerings", nargs="+", metavar="NAME", help="those to measure (all that take a case)"),
    ),
    seconds=0.3, budget=540.0, sized=True, where=where, short=("case", "pass", "side", "chosen", "p50_us", "failure"),
    table=lambda rows: print_shapes(shapes_of(rows)),
    failed=lambda rows: False,
)  # fmt: skip
main = harness.run(BENCH)

if __name__ == "__main__":
    sys.exit(main())
