"""On a GPU, attention in FP8 beside bfloat16: compiled with its rounding, and the kernel alone; forward, and forward with backward.

    python -m benchmarks.bench_fp8 --budget-seconds 60

Times are microseconds of the GPU, as in bench_kernels.py. Each row is one side of a case's pass. "whole" is what
torch.compile(backend="attn_compiler") makes of one attention whose q, k and v are in memory in bfloat16: in FP8 with finding scales and
rounding, which a model's own projections and rotations may hide some of. "kernel" is the leaf op alone, on rounded tensors. `ratio` is the
time of the first side, cuDNN in bfloat16 as PyTorch has it, over that of the row; `error` is the root mean square of the
difference from that side's output, relative to its own.

Writes benchmarks/results/fp8_h200.csv, prints a table last. Exits with 1 where something fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

import attn_compiler
from attn_compiler import CurrentScaling, DelayedScaling, Fp8Recipe, StaticScaling
from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.base import Operands
from attn_compiler.lowerings.choice.timed.eager import EagerEmitter
from attn_compiler.spec.target import Target
from benchmarks import bench_kernels, harness, kernel_cases, waves
from benchmarks.bench_kernels import Timed
from benchmarks.harness import BACKEND
from benchmarks.kernel_cases import Case, Pass

RESULTS = Path(__file__).parent / "results" / "fp8_h200.csv"
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
    Side(lowering=BASELINE),
    Side(lowering="fa4"),
    Side(lowering="triton"),
    Side(lowering="cudnn"),
    Side(lowering="hopper_fp8", recipe=""),
    Side(lowering="triton_fp8", recipe="", passes=("forward",)),
    Side(lowering="hopper_fp8", recipe="per head", passes=("forward",)),
    Side(lowering="hopper_fp8", recipe="delayed"),
    Side(lowering="cudnn_fp8", recipe="per tensor"),
    Side(lowering="cudnn_fp8", recipe="delayed"),
    Side(lowering="cudnn_fp8", recipe="per tensor, backward", passes=("both",)),
    Side(lowering="cudnn_fp8", recipe="delayed, backward", passes=("both",)),
    Side(lowering="hopper_fp8", recipe="static", passes=("forward",)),
    Side(lowering="hopper_fp8", recipe="accurate"),
)


def case_of(head_dim: int, seqlen: int, *, causal: bool, window: int | None = None, group: int = 1) -> Case:
    """16k tokens of width 2048. group: heads of q for one of k and v."""
    mask = ("window" if window else "causal") if causal else "full"
    heads = _WIDTH // head_dim
    further = (f"_w{window}" if window else "") + (f"_g{group}" if group > 1 else "")
    return Case(
        name=f"{mask}_d{head_dim}_s{seqlen}{further}",
        batch=max(_TOKENS // seqlen, 1),
        heads_q=heads,
        heads_kv=heads // group,
        seqlen=seqlen,
        head_dim=head_dim,
        head_dim_v=head_dim,
        causal=causal,
        window=window,
    )


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


# ---- sides ----------------------------------------------------------------------------------------------------------


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
    case, which = job.case, job.which
    upstream = torch.ones_like(q) if which == "forward" else torch.randn_like(q)
    for side in SIDES:
        if which not in side.passes or side.name not in job.sides:
            continue
        yield side, "whole", functools.partial(_whole, case, side, which, (q, k, v), upstream)
        if which == "forward" and side.recipe in KERNELS:
            yield side, "kernel", functools.partial(_kernel, case, side, q, k, v)


def _whole(case: Case, side: Side, which: Pass, given: tuple[Tensor, Tensor, Tensor], upstream: Tensor) -> Timed:
    q, k, v = (x.detach().requires_grad_(which != "forward") for x in given)
    function = compiled(case, side)

    def forward(_: None) -> Sequence[Tensor]:
        with torch.no_grad():
            return (function(q, k, v),)

    def both(_: None) -> Sequence[Tensor]:
        return torch.autograd.grad(function(q, k, v), (q, k, v), upstream)

    return Timed(prepare=lambda: None, run=forward if which == "forward" else both)


def _kernel(case: Case, side: Side, q: Tensor, k: Tensor, v: Tensor) -> Timed:
    call = kernel(case, side, q, k, v)

    def run(_: None) -> Sequence[Tensor]:
        with torch.no_grad():
            return (call(),)

    return Timed(prepare=lambda: None, run=run)


# ---- rows -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Job:
    """One pass of a case, and how long it is timed. sides: names."""

    case: Case
    which: Pass
    device: str
    seconds: float
    sides: tuple[str, ...] = tuple(side.name for side in SIDES)


def prepare(job: Job, lock: AbstractContextManager[Any]) -> waves.Finish:
    """Compile every side, and hold what it gives against the first one's; rows follow by timing them, as JSON."""
    torch.compiler.reset()
    keep_all_compiled()
    case, which = job.case, job.which
    generator = torch.Generator(device=job.device).manual_seed(0)
    q, k, v = (
        torch.randn(
            (case.batch, case.seqlen, heads, case.head_dim),
            generator=generator,
            device=job.device,
            dtype=torch.bfloat16,
        ).transpose(1, 2)
        for heads in (case.heads_q, case.heads_kv, case.heads_kv)
    )
    rows: dict[str, dict[str, str]] = {}
    timed: dict[str, Timed] = {}
    found: dict[str, Sequence[Tensor]] = {}
    for side, part, make in steps(job, q, k, v):
        name = f"{side.name} {part}"
        rows[name] = case.columns | {"pass": which, "side": side.lowering, "recipe": side.recipe or "", "part": part}
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
            rows[name]["failure"] = bench_kernels.reason(failure, [])
    for name, got in found.items():
        # cuDNN's kernel alone gives a scaled output, in FP8.
        if _FIRST in found and got[0].dtype == found[_FIRST][0].dtype:
            rows[name]["error"] = f"{max(map(_error, got, found[_FIRST])):.2g}"
    return functools.partial(_finish, job, rows, timed)


def _finish(job: Job, rows: dict[str, dict[str, str]], timed: Mapping[str, Timed]) -> waves.Row:
    times = bench_kernels.interleave(timed, job.device, job.seconds, rounds=(5, 60))
    for name, values in times.items():
        p20, p50, p80 = harness.percentiles(values)
        rows[name] |= {"rounds": str(len(values)), "tflops": f"{job.case.flops(job.which) / p50 / 1e6:.1f}"}
        rows[name] |= {"p20_us": f"{p20:.1f}", "p50_us": f"{p50:.1f}", "p80_us": f"{p80:.1f}"}
        if _FIRST in times:
            rows[name]["ratio"] = f"{harness.ratio(times[_FIRST], values):.3f}"
    return {"rows": json.dumps(list(rows.values()))}


def rows_of(job: Job, given: waves.Row | None) -> list[dict[str, str]]:
    """What a wave gave of a job: its rows, or one that says what went wrong."""
    if given is None or "rows" not in given:
        failure = (given or {}).get("failure", "")
        return [job.case.columns | {"pass": job.which, "side": BASELINE, "failure": failure}]
    rows: list[dict[str, str]] = json.loads(given["rows"])
    return rows


def _error(mine: Tensor, other: Tensor) -> float:
    return float((mine.float() - other.float()).norm() / other.float().norm())


def print_table(rows: Sequence[Mapping[str, str]]) -> None:
    """A line for each pass of each case: TFLOP/s of every side."""
    names = list(dict.fromkeys((row["side"], row["recipe"], row["part"]) for row in rows))
    table = Table(title="effective TFLOP/s, medians")
    for column in ("case", "pass", *(" ".join(filter(None, name)) for name in names)):
        table.add_column(column)
    for (case, which), group in itertools.groupby(rows, key=lambda row: (row["case"], row["pass"])):
        cells = {(row["side"], row["recipe"], row["part"]): _cell(row) for row in group}
        table.add_row(case, which, *(cells.get(name, "") for name in names))
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def _cell(row: Mapping[str, str]) -> str:
    if row.get("failure"):
        return f"[yellow]{escape(row['failure'][:24])}"
    is_wrong = float(row.get("error") or 0) > _MAX_ERROR[row["pass"]]
    return f"[red]{row['tflops']} WRONG" if is_wrong else row["tflops"]


def failures(rows: Sequence[Mapping[str, str]]) -> int:
    """1 where a side is wrong, else 0: an exit status. A side that refuses a case is no failure."""
    return int(any(float(row.get("error") or 0) > _MAX_ERROR[row["pass"]] for row in rows))


def main() -> int:
    """Measure, with the rows on disk as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--append", action="store_true")
    parser.add_argument("--cases", nargs="+", default=[case.name for case in CASES])
    names = [side.name for side in SIDES]
    parser.add_argument("--sides", nargs="+", choices=names, default=names)
    parser.add_argument("--passes", nargs="+", choices=("forward", "both"), default=["forward", "both"])
    parser.add_argument("--seconds", type=float, default=0.3, help="for all sides of one pass of a case")
    waves.add_arguments(parser, budget_seconds=600.0)
    parser.add_argument("--commit")
    given = parser.parse_args()
    device = "cuda"
    environment = harness.environment(device, given.commit)
    file = harness.CsvFile(given.output, [*COLUMNS, *environment], append=given.append)
    jobs = [
        Job(case=case, which=which, device=device, seconds=given.seconds, sides=tuple(given.sides))
        for which in given.passes
        for case in CASES
        if case.name in given.cases
    ]
    until = time.monotonic() + given.budget_seconds
    found = waves.run(jobs, prepare, until=until, **waves.asked(given))
    with Progress(console=Console(stderr=True)) as progress:
        for job, row in progress.track(found, total=len(jobs), description="cases"):
            for each in rows_of(job, row):
                file.add(each | environment)
    print_table(file.rows)
    return failures(file.rows)


if __name__ == "__main__":
    sys.exit(main())
