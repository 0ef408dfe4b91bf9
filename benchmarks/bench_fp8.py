"""On a GPU, attention in FP8 beside bfloat16: compiled with its rounding, and the kernel alone; forward, and forward with backward.

    python -m benchmarks.bench_fp8 --budget-seconds 60

Times are microseconds of the GPU, as in bench_kernels.py. Each row is one side of a case's pass. "whole" is what
torch.compile(backend="attn_compiler") makes of one attention whose q, k and v are in memory in bfloat16: in FP8 with finding scales and
rounding, which a model's own projections and rotations may hide some of. "kernel" is the leaf op alone, on rounded tensors. `ratio` is the
time of the first side, cuDNN in bfloat16 as PyTorch has it, over that of the row; `error` is the root mean square of the difference from
that side's output, relative to its own. Exits with 1 where something fails.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import attn_compiler
from attn_compiler import CurrentScaling, DelayedScaling, Fp8Recipe, StaticScaling
from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.base import Operands
from attn_compiler.lowerings.choice.timed.eager import EagerEmitter
from attn_compiler.spec.target import Target
from benchmarks import harness, kernel_cases, kernel_timing, waves
from benchmarks.harness import BACKEND, RESULTS as FOLDER, Bench, Row, arg
from benchmarks.kernel_cases import Case, Pass
from benchmarks.kernel_timing import Timed

RESULTS = FOLDER / "fp8_h200.csv"
BASELINE = "sdpa_cudnn"
COLUMNS = (
    *kernel_cases.COLUMNS,
    *("pass", "side", "recipe", "part", "rounds", "p20_us", "p50_us", "p80_us", "tflops", "ratio", "error", "failure"),
)
_TOKENS, _WIDTH = 16384, 2048
#: as in Llama 3, Qwen 3 and Mistral
_GROUP = 4
_FIRST = f"{BASELINE} whole"
#: errors beyond these are no rounding: of out, and of gradients
_MAX_ERROR = {"forward": 0.08, "both": 0.15}

RECIPES: Mapping[str, Fp8Recipe] = {
    "": Fp8Recipe(),
    "per head": Fp8Recipe(scaling=CurrentScaling(granularity="head")),
    "per tensor": Fp8Recipe(scaling=CurrentScaling(granularity="tensor")),
    "delayed": Fp8Recipe(scaling=DelayedScaling()),
    "per tensor, backward": Fp8Recipe(scaling=CurrentScaling(granularity="tensor"), backward=True),
    "delayed, backward": Fp8Recipe(scaling=DelayedScaling(), backward=True),
    "static": Fp8Recipe(scaling=StaticScaling(q=6, k=6, v=6)),
    "accurate": Fp8Recipe(smooth_k=True, hadamard=True, qk_format="int8"),
}
#: those whose kernel is timed alone: with other recipes it is the same
KERNELS = ("", "per head", "per tensor", "accurate")


@dataclass(frozen=True, kw_only=True)
class Side:
    """lowering: by its name. recipe: of RECIPES; None: bfloat16. passes: that it is measured in."""

    lowering: str
    recipe: str | None = None
    passes: tuple[Pass, ...] = ("forward", "both")

    @property
    def name(self) -> str:
        return self.lowering if not self.recipe else f"{self.lowering}, {self.recipe}"


SIDES = (
    Side(lowering=BASELINE), Side(lowering="fa4"), Side(lowering="triton"), Side(lowering="cudnn"),
    Side(lowering="hopper_fp8", recipe=""), Side(lowering="hopper_fp8", recipe="per head", passes=("forward",)),
    Side(lowering="hopper_fp8", recipe="delayed"), Side(lowering="cudnn_fp8", recipe="per tensor"),
    Side(lowering="cudnn_fp8", recipe="delayed"),
    Side(lowering="cudnn_fp8", recipe="per tensor, backward", passes=("both",)),
    Side(lowering="cudnn_fp8", recipe="delayed, backward", passes=("both",)),
    Side(lowering="hopper_fp8", recipe="static", passes=("forward",)), Side(lowering="hopper_fp8", recipe="accurate"),
)  # fmt: skip


def case_of(head_dim: int, seqlen: int, *, causal: bool, window: int | None = None, group: int = 1) -> Case:
    """16k tokens of width 2048. group: heads of q for one of k and v."""
    mask = ("window" if window else "causal") if causal else "full"
    heads = _WIDTH // head_dim
    further = (f"_w{window}" if window else "") + (f"_g{group}" if group > 1 else "")
    return Case(
        name=f"{mask}_d{head_dim}_s{seqlen}{further}", batch=max(_TOKENS // seqlen, 1), heads_q=heads,
        heads_kv=heads // group, seqlen=seqlen, head_dim=head_dim, head_dim_v=head_dim, causal=causal, window=window,
    )  # fmt: skip


#: the most telling first
CASES: tuple[Case, ...] = (
    *(
        case_of(head_dim, seqlen, causal=causal)
        for seqlen in (8192, 4096, 16384, 2048, 1024)
        for head_dim in (128, 64, 256)
        for causal in (True, False)
    ),
    *(
        case_of(head_dim, seqlen, causal=True, group=_GROUP)
        for head_dim in (128, 64)
        for seqlen in (8192, 4096, 2048, 1024)
    ),
    *(
        case_of(head_dim, seqlen, causal=True, window=window)
        for seqlen in (8192, 16384)
        for window in (4096, 1024)
        for head_dim in (128, 64)
    ),
)


def attention(case: Case) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """What a model of that kind calls."""
    is_grouped, window = case.heads_q != case.heads_kv, case.window
    if window is None:
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=is_grouped)

    def within(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        positions = torch.arange(q.shape[2], device=q.device)
        back = positions[:, None] - positions[None, :]
        mask = (back >= 0) & (back < window)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=is_grouped)

    return within


def compiled(case: Case, side: Side) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The same with one lowering. Raises in its first call where that is refused, or Dynamo would leave it as it is."""
    options: dict[str, Any] = {"lowering": side.lowering, "strict": True}
    if side.recipe is not None:
        options["fp8_recipe"] = RECIPES[side.recipe]
    function: Callable[[Tensor, Tensor, Tensor], Tensor] = torch.compile(
        attention(case), backend=BACKEND, options=options, dynamic=False, fullgraph=True
    )
    return function


def keep_all_compiled() -> None:
    """Dynamo counts what it compiled of one function, whatever the options: by default it leaves a ninth side as it is."""
    torch._dynamo.config.recompile_limit = 2 * len(SIDES)  # type: ignore[attr-defined]


def check_decision(side: Side) -> None:
    """Raises ValueError where the newest report says that the side's lowering was refused: the model's own attention ran instead."""
    (site,) = attn_compiler.reports()[-1].sites
    if site.decision is not None and site.decision.lowering != side.lowering:
        reasons = [str(reason) for refusal in site.decision.refusals for reason in refusal.reasons]
        raise ValueError(f"refused: {'; '.join(reasons)}")


def kernel(case: Case, side: Side, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """The leaf op alone, on operands that were made before. Raises ValueError where there is no leaf op of that name."""
    lowering, target = by_name(side.lowering), Target.current(str(q.device))
    described = kernel_cases.spec_of(case, q, k, v, training=False)
    spec = dataclasses.replace(described, fp8=RECIPES[side.recipe or ""])
    emitter: Any = EagerEmitter(target)
    nodes = {name: emitter.given(name, tensor) for name, tensor in (("q", q), ("k", k), ("v", v))}
    lowering.emit(emitter, lowering.plan(spec, target), Operands(**nodes))
    leaf, arguments = kernel_cases.leaf_call(emitter, side.lowering)
    return lambda: leaf(*arguments)[0]


def steps(job: Job, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[Side, str, Callable[[], Timed]]]:
    """Every side and part of a pass, and what makes it."""
    upstream = torch.ones_like(q) if job.which == "forward" else torch.randn_like(q)
    for side in SIDES:
        if job.which not in side.passes or side.name not in job.sides:
            continue
        yield side, "whole", functools.partial(_whole, job.case, side, job.which, (q, k, v), upstream)
        if job.which == "forward" and side.recipe in KERNELS:
            yield side, "kernel", lambda side=side: _without_gradients(kernel(job.case, side, q, k, v))


def _whole(case: Case, side: Side, which: Pass, given: tuple[Tensor, Tensor, Tensor], upstream: Tensor) -> Timed:
    q, k, v = (x.detach().requires_grad_(which != "forward") for x in given)
    function = compiled(case, side)
    if which == "forward":
        return _without_gradients(lambda: function(q, k, v))
    return Timed(prepare=lambda: None, run=lambda _: torch.autograd.grad(function(q, k, v), (q, k, v), upstream))


def _without_gradients(call: Callable[[], Tensor]) -> Timed:
    def run(_: None) -> Sequence[Tensor]:
        with torch.no_grad():
            return (call(),)

    return Timed(prepare=lambda: None, run=run)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One pass of a case, and how long it is timed. sides: names."""

    case: Case
    which: Pass
    device: str
    seconds: float
    sides: tuple[str, ...] = tuple(side.name for side in SIDES)

    @property
    def names(self) -> dict[str, str]:
        return {"case": self.case.name, "pass": self.which}


def prepare(job: Job, lock: AbstractContextManager[Any]) -> waves.Finish:
    """Compile every side, and hold what it gives against the first one's; rows follow by timing them, as JSON."""
    torch.compiler.reset()
    keep_all_compiled()
    case, generator = job.case, torch.Generator(device=job.device).manual_seed(0)

    def normal(heads: int) -> Tensor:
        shape = (case.batch, case.seqlen, heads, case.head_dim)
        drawn = torch.randn(shape, generator=generator, device=job.device, dtype=torch.bfloat16)
        return drawn.transpose(1, 2)

    rows: dict[str, dict[str, str]] = {}
    timed: dict[str, Timed] = {}
    found: dict[str, Sequence[Tensor]] = {}
    for side, part, make in steps(job, *map(normal, (case.heads_q, case.heads_kv, case.heads_kv))):
        name, of_side = f"{side.name} {part}", {"side": side.lowering, "recipe": side.recipe or "", "part": part}
        rows[name] = case.columns | {"pass": job.which} | of_side
        try:
            step = make()
            step.run(step.prepare())
            # Scales from steps before are there from the second one on.
            found[name] = step.run(step.prepare())
            torch.cuda.synchronize(job.device)
            if part == "whole":
                check_decision(side)
            timed[name] = step
        except Exception as failure:  # noqa: BLE001 (a row of its own says so)
            rows[name]["failure"] = kernel_timing.reason(failure)
    for name, got in found.items():
        # cuDNN's kernel alone gives a scaled output, in FP8.
        if _FIRST in found and got[0].dtype == found[_FIRST][0].dtype:
            rows[name]["error"] = f"{max(map(off, got, found[_FIRST])):.2g}"
    return functools.partial(_finish, job, rows, timed)


def _finish(job: Job, rows: dict[str, dict[str, str]], timed: Mapping[str, Timed]) -> waves.Row:
    times = kernel_timing.interleave(timed, job.device, job.seconds, rounds=(5, 60))
    for name, values in times.items():
        rows[name] |= harness.kernel_times(values, job.case.flops(job.which))
        if _FIRST in times:
            rows[name]["ratio"] = f"{harness.ratio(times[_FIRST], values):.3f}"
    return {"rows": json.dumps(list(rows.values()))}


def rows_of(job: Job, given: waves.Row | None) -> list[dict[str, str]]:
    """What a wave gave of a job: its rows, or one that says what went wrong."""
    failed = {"side": BASELINE, "failure": (given or {}).get("failure", "")}
    return waves.rows_of(given) or [job.case.columns | {"pass": job.which} | failed]


def off(mine: Tensor, other: Tensor) -> float:
    return float((mine.float() - other.float()).norm() / other.float().norm())


def print_table(rows: Sequence[Row]) -> None:
    """A line for each pass of each case: TFLOP/s of every side."""

    def side(row: Row) -> str:
        return " ".join(filter(None, (row["side"], row.get("recipe"), row.get("part"))))

    harness.print_sides(rows, _cell, side=side, title="effective TFLOP/s, medians", width=200)


def _cell(row: Row) -> str:
    return harness.speed(row, wrong=is_wrong(row))


def is_wrong(row: Row) -> bool:
    """Whether it errs by more than rounding. A side that refuses a case is no failure."""
    return float(row.get("error") or 0) > _MAX_ERROR[row["pass"]]


def rows(jobs: Sequence[Job], given: Namespace) -> harness.Measured:
    """Of jobs that are prepared side by side."""
    for job, found in waves.run(jobs, prepare, until=given.until, **waves.asked(given)):
        yield rows_of(job, found)


BENCH = Bench(
    doc=__doc__, results=RESULTS.name, columns=COLUMNS,
    cases=lambda given: [
        Job(case=case, which=which, device=given.device, seconds=given.seconds, sides=tuple(given.sides))
        for which in given.passes
        for case in harness.picked(CASES, given.cases)
    ],
    rows=rows, sides=[side.name for side in SIDES],
    options=(
        harness.PATTERNS,
        arg("--sides", nargs="+", choices=[side.name for side in SIDES], default=[side.name for side in SIDES]),
        arg("--passes", nargs="+", choices=("forward", "both"), default=["forward", "both"]),
    ),
    devices=("cuda",), seconds=0.3, budget=600.0, jobs=True,
    short=("case", "pass", "side", "recipe", "part", "tflops", "failure"), table=print_table,
    failed=lambda rows: any(map(is_wrong, rows)),
)  # fmt: skip
main = harness.run(BENCH)

if __name__ == "__main__":
    sys.exit(main())
