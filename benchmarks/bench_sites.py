"""On a GPU: attention sites that nobody tuned for, drawn by a seed: what we choose, every other lowering, and what Inductor has there.

    python -m benchmarks.bench_sites --jobs 16 --wave-cases 32 --budget-seconds 260

Each side is the whole compiled function of four attentions, as layers of a model have them (random_sites.py): the choice of
`backend="attn_compiler"`, each lowering that takes the site (`lowering=`), and Inductor by itself. All sides of a site take turns in one
process, in bfloat16; several calls make a CUDA graph, where one can be captured (`timed`), else events lie around a call. us_p50 is of a
layer: forward, or forward and backward, with its share of the mask, which is made once for all `layers`. `error` is ‖x - Inductor's‖ /
‖Inductor's‖ of the output and gradients; `numerics` is WRONG where rounding does not explain it.

A site that fails is a row with the reason. Rows are written as they come; what the budget leaves out is done by a run with --append.
"""

from __future__ import annotations

import functools
import json
import math
import os
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import attn_compiler
from attn_compiler.lowerings import LOWERINGS
from attn_compiler.spec.target import Target
from benchmarks import bench_select, compare, harness, kernel_timing, random_sites, waves
from benchmarks.harness import BACKEND, BASELINE, Bench, arg
from benchmarks.random_sites import Built, Site
from benchmarks.waves import Row

#: what every process begins with, and which touches no GPU
IMPORTS = ("torch._dynamo", "attn_compiler")
_FIELDS = ("number", *Site.__dataclass_fields__)
_MEASURED = tuple("layers side lowering chosen us_p50 timed rounds error numerics compile_s failure".split())
_WHERE = ("device", "torch", "triton", "cudnn", "date", "commit")
COLUMNS = ("draw", *_FIELDS, *_MEASURED, *_WHERE)
#: lowerings that are forced: the kernels of a GPU
FORCED = tuple(low.name for low in LOWERINGS if low.name not in bench_select._LEFT_OUT and "fp8" not in low.name)
# A graph is at least so long, so that its start is little of it, and has at most so many calls.
_LONG_US, _MOST_CALLS = 300.0, 20
#: attentions of a function
_LAYERS = 4
# Two results in 16 bits that are both right differ by less, gradients included.
_MOST_ERROR: Mapping[torch.dtype, float] = {torch.bfloat16: 2e-2, torch.float32: 1e-3}


@dataclass(frozen=True, kw_only=True)
class Task:
    """A site for a process. draw: the seed that it is from."""

    draw: int
    number: int
    site: Site
    device: str
    seconds: float
    inner: str
    forced: tuple[str, ...]

    @property
    def names(self) -> dict[str, str]:
        return {"draw": str(self.draw), "number": str(self.number)}


@dataclass(frozen=True, kw_only=True)
class Timed:
    """What is timed: `calls` of a side at once."""

    step: harness.Step
    calls: int
    how: str


def prepare(task: Task, _lock: AbstractContextManager[Any]) -> waves.Finish:
    """Compile every side of a site and compare them. What fails of a side is its row's `failure`."""
    rows: dict[str, Row] = {}
    timed: dict[str, Timed] = {}
    dtype = torch.float32 if task.device == "cpu" else torch.bfloat16
    if not kernel_timing.is_usable(task.device):
        # A side of this process's last site broke it, as its rows say. A new process has those after this one.
        os._exit(1)
    # All sides are compiled from one function, and stay until they are timed.
    torch.compiler.reset()
    torch._dynamo.config.recompile_limit = 64
    try:
        built = random_sites.build(task.site, device=task.device, dtype=dtype, layers=_LAYERS)
        reference: list[Tensor] = []
        for side in (BASELINE, BACKEND):
            _side(task, built, side, rows, timed, reference, _MOST_ERROR[dtype])
        for side in _others(task):
            _side(task, built, side, rows, timed, reference, _MOST_ERROR[dtype])
        del reference
    except Exception as error:  # noqa: BLE001 (one broken site must not cost the others, and its row names it)
        rows.setdefault(BACKEND, {"failure": harness.failure(error)})
    return functools.partial(_finish, task, timed, rows)


def _others(task: Task) -> list[str]:
    """Lowerings that take the site that was just compiled, beside the chosen one."""
    found = [site for report in attn_compiler.reports() for site in report.sites]
    target = Target.current(task.device)
    return [
        low.name
        for low in LOWERINGS
        if low.name in task.forced
        and any(low.name != site.decision.lowering for site in found)
        and not any(low.why_not(site.spec, target) or low.cannot_build(site.spec, target) for site in found)
    ]


def _side(
    task: Task,
    built: Built,
    side: str,
    rows: dict[str, Row],
    timed: dict[str, Timed],
    reference: list[Tensor],
    most: float,
) -> None:
    """Compile, run and compare one side; no row of a lowering that leaves the site alone after all."""
    begun = time.monotonic()
    row: Row = {}
    try:
        step = _compiled(task, built, side)
        found = _results(built, step())
        if side != BASELINE:
            found_sites = [site for report in attn_compiler.reports() for site in report.sites]
            row["lowering"] = " ".join(dict.fromkeys(site.decision.lowering for site in found_sites)) or "none found"
            if side != BACKEND and row["lowering"] != side:
                return
        if not reference and side == BASELINE:
            reference += found
        elif reference:
            error = compare.relative_error(found, reference)
            row |= {"error": f"{error:.2g}", "numerics": "ok" if error <= most else "WRONG"}
        timed[side] = _graphed(step, task.device)
        row |= {"timed": timed[side].how, "compile_s": f"{time.monotonic() - begun:.1f}"}
    except Exception as error:  # noqa: BLE001 (as above)
        row["failure"] = harness.failure(error)
    rows[side] = row


def _compiled(task: Task, built: Built, side: str) -> Callable[[], Sequence[Tensor]]:
    """A call of a side: the outputs, and gradients where the site trains."""
    attn_compiler.reset()
    if side == BASELINE:
        further: dict[str, Any] = {"backend": task.inner}
    else:
        options = {} if side == BACKEND else {"lowering": side}
        further = {"backend": BACKEND, "options": {**options, "inner": task.inner}}
    function = torch.compile(built.call, dynamic=False, **further)

    def step() -> Sequence[Tensor]:
        with torch.set_grad_enabled(task.site.training):
            outs = function(*built.operands)
        if not task.site.training:
            return list(outs)
        grads = torch.autograd.grad(outs, built.leaves, [built.grad_out] * len(outs))
        return [*(out.detach() for out in outs), *grads]

    return step


def _results(built: Built, found: Sequence[Tensor]) -> list[Tensor]:
    """What is compared: not what queries without a key gave."""
    if built.used is None:
        return list(found)
    return [*(out.where(built.used, 0.0) for out in found[:_LAYERS]), *found[_LAYERS:]]


def _graphed(step: Callable[[], Sequence[Tensor]], device: str) -> Timed:
    """Calls in a CUDA graph or, where none can be captured, one call."""
    plain = Timed(step=lambda: step()[0], calls=1, how="events")
    if device == "cpu":
        return plain
    step()
    torch.cuda.synchronize(device)
    calls = 1
    took = min(harness.milliseconds(plain.step, device) for _ in range(3)) * 1e3
    calls = max(1, min(_MOST_CALLS, math.ceil(_LONG_US / max(took, 1.0))))
    try:
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream(device).wait_stream(stream)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(calls):
                out = step()[0]
    except RuntimeError:
        torch.cuda.synchronize(device)
        return plain

    def replay() -> Tensor:
        graph.replay()
        return out

    return Timed(step=replay, calls=calls, how="graph")


def _finish(task: Task, timed: dict[str, Timed], rows: dict[str, Row]) -> Row:
    """Time all sides in turns. The rows, as JSON in one field: a wave has a row a case."""
    try:
        steps = {side: one.step for side, one in timed.items()}
        times = harness.interleave(steps, task.device, seconds=task.seconds, min_rounds=7, warmup=2) if steps else {}
        for side, values in times.items():
            took = statistics.median(values) / (timed[side].calls * _LAYERS) * 1e3
            rows[side] |= {"layers": str(_LAYERS), "us_p50": f"{took:.2f}", "rounds": str(len(values))}
    except Exception as error:  # noqa: BLE001 (as above)
        rows = {side: {"failure": harness.failure(error), **row} for side, row in rows.items()}
    timed.clear()
    torch.compiler.reset()
    if task.device != "cpu" and kernel_timing.is_usable(task.device):
        torch.cuda.empty_cache()
    kept = [{"side": side, **row} for side, row in rows.items()]
    for row in kept:
        row["chosen"] = "yes" if row["side"] == BACKEND else ""
    return {"rows": json.dumps(kept)}


def shapes(rows: Iterable[Mapping[str, str]]) -> list[bench_select.Shape]:
    """A shape for each site; the best of all sides, Inductor's own included."""
    named = [
        {"case": row["number"], "pass": _words(row), **{key: row[key] for key in ("side", "us_p50", "chosen")}}
        for row in rows
    ]
    return bench_select.shapes_of([{**row, "p50_us": row["us_p50"]} for row in named])


def _words(row: Mapping[str, str]) -> str:
    """A site for people."""
    heads = row["heads_q"] if row["heads_q"] == row["heads_kv"] else f"{row['heads_q']}/{row['heads_kv']}"
    lengths = row["seqlen_q"] if row["seqlen_q"] == row["seqlen_k"] else f"{row['seqlen_q']}x{row['seqlen_k']}"
    mask = row["mask"] + (
        " causal" if row["causal"] == "True" and row["mask"] in ("left", "right", "documents") else ""
    )
    mask += f" {row['window']}" if row["mask"] == "window" else ""
    pass_ = "train" if row["training"] == "True" else "infer"
    return f"{row['family']} B{row['batch']} H{heads} S{lengths} D{row['head_dim']} {mask} {row['layout']} {pass_}"


def summary(rows: Sequence[Mapping[str, str]]) -> str:
    """The share of choices near the best, how they stand to Inductor as a histogram, the worst, and what failed or is wrong."""
    found = shapes(rows)
    lines = [f"{len({row['number'] for row in rows})} sites, {len(found)} of them with a time of the choice"]
    chosen = {row["number"]: row["lowering"] for row in rows if row["side"] == BACKEND}
    regrets = {shape.case: shape.regret for shape in found}
    if found:
        close = sum(regret <= bench_select.CLOSE for regret in regrets.values())
        lines.append(f"chosen / best <= {bench_select.CLOSE}: {close} of {len(found)}, {close / len(found):.1%}")
    ours = {shape.case: 1 / ratio for shape in found if (ratio := shape.ratio(BASELINE)) is not None}
    if ours:
        slower = sum(value > 1 / harness.MIN_RATIO for value in ours.values())
        mean = statistics.geometric_mean(ours.values())
        lines.append(f"chosen / Inductor's: geometric mean of {len(ours)} {mean:.3f}; beyond 1.02: {slower}")
        lines += _histogram(list(ours.values()))
    worst = sorted(found, key=lambda shape: -max(regrets[shape.case], ours.get(shape.case, 0.0)))[:20]
    for shape in worst:
        against = f"{ours[shape.case]:.3f} of Inductor's" if shape.case in ours else "Inductor did not run"
        lines.append(
            f"  {shape.case}: {shape.which}: {chosen[shape.case]} {shape.times[BACKEND]:.1f} µs, {regrets[shape.case]:.3f} of the best "
            f"({shape.best}), {against}"
        )
    broken = [row for row in rows if row["failure"] or row["numerics"] == "WRONG"]
    lines += [
        f"  {row['number']}: {_words(row)}: {row['side']}: {row['failure'] or 'WRONG'} {row['error']}" for row in broken
    ]
    return "\n".join(lines)


_EDGES = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0, 1.02, 1.05, 1.1, 1.25, math.inf)


def _histogram(values: Sequence[float]) -> list[str]:
    lines, least = [], 0.0
    for edge in _EDGES:
        count = sum(least < value <= edge for value in values)
        lines.append(f"  {least:4.2f} to {edge:4.2f}  {count:4d}  {'#' * math.ceil(60 * count / len(values))}")
        least = edge
    return lines


def tasks(given: Namespace) -> list[Task]:
    """The sites of a part of a seed's."""
    # Each process compiles a site; further ones for each of them would take its core.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    how = {"draw": given.seed, "device": given.device, "seconds": given.seconds, "inner": given.inner}
    return [
        Task(number=number, site=site if given.size == "full" else site.shortened, forced=tuple(given.forced), **how)
        for number, site in enumerate(random_sites.sites(given.seed, given.count))
        if number % given.part[1] == given.part[0]
    ]


def measured(tasks: Sequence[Task], given: Namespace) -> harness.Measured:
    """Rows of sites that are prepared side by side."""
    how = {"imports": IMPORTS, "finish_seconds": 20.0, **waves.asked(given)}
    for task, row in waves.run(tasks, prepare, until=given.until, **how):
        failed = {"side": BACKEND, "chosen": "yes", "failure": (row or {}).get("failure", "")}
        same = dict.fromkeys(COLUMNS, "") | task.names | task.site.columns
        yield [same | side for side in waves.rows_of(row) or [failed]]


def where(given: Namespace) -> dict[str, str]:
    """Columns that say where a site was measured."""
    known = kernel_timing.where(given)
    return {name: known[name] for name in _WHERE}


BENCH = Bench(
    doc=__doc__, results="sites_h200.csv", columns=COLUMNS, cases=tasks, rows=measured,
    sides=(BASELINE, BACKEND, *FORCED),
    options=(
        arg("--seed", type=int, default=0, help="what is drawn (%(default)s)"),
        arg("--count", type=int, default=320, help="so many sites of it (%(default)s)"),
        arg("--part", type=int, nargs=2, default=(0, 1), metavar=("I", "OF"), help="every OF-th site from the I-th on"),
        arg("--forced", nargs="*", default=list(FORCED), metavar="NAME", help="lowerings beside the choice"),
        arg("--inner", choices=("inductor", "eager"), default="inductor", help="eager: for a look, too"),
    ),
    seconds=0.2, budget=260.0, sized=True, jobs=True, where=where, short=("number", "side", "us_p50", "failure"),
    table=lambda rows: print(summary([row for row in rows if row["draw"] == rows[-1]["draw"]])),
    failed=lambda rows: any(row["chosen"] and (row["failure"] or row["numerics"] == "WRONG") for row in rows),
)  # fmt: skip
main = harness.run(BENCH)

if __name__ == "__main__":
    sys.exit(main())
