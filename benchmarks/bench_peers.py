"""On a Hopper GPU: our kernels beside those of other libraries, in bfloat16, forward, and forward with backward.

    python -m benchmarks.bench_peers --budget-seconds 200 --wave-seconds 135 --jobs 10

Sides: our lowerings hopper and triton; "fa4", FlashAttention-4 (flash-attn-4); "cudnn_flex", cudnn.flex_attention (from about
nvidia-cudnn-frontend 1.32, with nvidia-cutlass-dsl); "sdpa_cudnn", PyTorch's cuDNN kernel; "flex", FlexAttention compiled. `note` says
where a side was given something else than the others, as packed rows.

Each case has a process, which compiles and checks its sides while other cases do; cases are timed one after another, all sides of a
case in turn. Times are microseconds of the GPU, as in kernel_timing.py, and TFLOP/s count allowed pairs (`pairs`: those that the side
computes). `plan_us`: of the wall clock, what a library takes once a mask before it runs, which the times hold nothing of.

`error` is the distance to attention in float64, by norms, of two heads of k and v with the q's that read them: of out, or the largest of
the gradients. `differs` is the same of all heads to our first side. Padded queries have no part in either.

A side that fails is a row with the reason. One that takes its process with it, or hangs, is left out when the case is tried once more.
Writes benchmarks/results/peers_gpus.csv. Exits with 1 where a side of ours fails or is wrong.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import statistics
import sys
import tempfile
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import bench_h200, bench_select, harness, kernel_cases, kernel_timing, peer_sides, select_cases, waves
from benchmarks.harness import Bench, Row, arg
from benchmarks.kernel_cases import Case, Pass, Problem
from benchmarks.kernel_timing import Timed
from benchmarks.peer_sides import PEERS

MEASURED = ("rounds", "p20_us", "p50_us", "p80_us", "tflops", "error", "differs", "plan_us", "compile_s", "failure")
COLUMNS = (*kernel_cases.COLUMNS, "pass", "side", "note", *MEASURED)
PASSES: tuple[Pass, ...] = ("forward", "both")
OURS = ("hopper", "triton")
#: rounding in bfloat16 stays below a third of it
MAX_ERROR = 0.02
IMPORTS = bench_h200.IMPORTS
#: no side is begun so shortly before the end of a wave, so that its process is not late; what a second wave has to have left
_LAST_SECONDS, _SECOND_WAVE = 15.0, 25.0
_PLANS = 5
_TIMING = "timing"

#: the most telling first
CASES: tuple[Case, ...] = tuple(
    {case.name: case for case in (*kernel_cases.CASES, *select_cases.CASES)}[name]
    for name in (
        "padding_right padded_causal_gqa_d128_s8192 documents_causal window_d128_s8192 causal_d128_s8192 causal_d128_s2048 "
        "causal_d64_s8192 full_d128_s8192 sinks_gqa_d64_s8192 softcap_d128_s8192"
    ).split()
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A case. by: of time.monotonic(); no side is begun later. failed: sides that are left out, and why. progress: a file with the name of
    the side that is under way."""

    case: Case
    device: str
    seconds: float
    sides: tuple[str, ...]
    by: float
    progress: str
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> dict[str, str]:
        return self.case.names

    def begin(self, what: str) -> None:
        """Say what is under way."""
        Path(self.progress).write_text(what)

    @property
    def under_way(self) -> str:
        path = Path(self.progress)
        return path.read_text() if path.exists() else ""


Rows = dict[tuple[str, Pass], dict[str, str]]


def prepare(job: Job, lock: AbstractContextManager[Any]) -> waves.Finish:
    """Compile and check every side; rows follow by timing them, as JSON. lock: held while the right results are computed."""
    warnings.simplefilter("ignore")
    job.begin("")
    rows: Rows = {}
    timed: dict[Pass, dict[str, Timed]] = {which: {} for which in PASSES}
    plans: dict[tuple[str, Pass], Any] = {}
    try:
        how = {"device": job.device, "dtype": kernel_timing.dtype_of(job.device)}
        problems = {which: kernel_cases.build(job.case, **how, training=which != "forward") for which in PASSES}
        counted = peer_sides.counted_queries(job.case).to(job.device)[:, None, :, None]
        grad_out = kernel_timing.gradient_of_out(problems["both"]).mul_(counted)
        torch.eye(2, dtype=torch.float64, device=job.device).mm(grad_out[0, 0, :2, :1].double())  # loads the library
        with lock:
            parts = peer_sides.parts_of(job.case)
            right = {part: peer_sides.reference(problems["both"], grad_out, part) for part in parts}
            harness.give_back(job.device)
        check = functools.partial(_check, problems["both"], right, counted, {})
        for name in job.sides:
            failed = job.failed.get(name) or ("" if time.monotonic() < job.by else "no time was left to compile it")
            for which in PASSES:
                rows[name, which] = row = job.case.columns | {"pass": which, "side": name}
                if failed:
                    row["failure"] = failed
                    continue
                job.begin(name)
                begun = time.monotonic()
                try:
                    with contextlib.redirect_stdout(io.StringIO()):
                        peer = PEERS[name](problems[which])
                        step = kernel_timing.timed(peer.side, which, peer.taken(grad_out))
                        row |= {"note": peer.note, "pairs": str(peer.pairs)}
                        row |= check(name, which, [peer.whole(x) for x in step.run(None)[:3]])
                except Exception as failure:  # noqa: BLE001 (a row of its own says so)
                    row["failure"] = kernel_timing.reason(failure)
                    if not kernel_timing.is_usable(job.device):
                        gone = {"failure": row["failure"]}
                        return lambda: gone
                    continue
                row["compile_s"] = f"{time.monotonic() - begun:.1f}"
                timed[which][name] = step
                plans[name, which] = peer.plan
    except Exception as failure:  # noqa: BLE001 (as above)
        job.begin("")
        broken = {"failure": kernel_timing.reason(failure)}
        return lambda: broken
    job.begin(_TIMING)
    return functools.partial(_finish, job, rows, timed, plans)


def _check(
    problem: Problem,
    right: Mapping[peer_sides.Part, Mapping[str, Tensor]],
    counted: Tensor,
    firsts: dict[Pass, list[Tensor]],
    name: str,
    which: Pass,
    found: Sequence[Tensor],
) -> dict[str, str]:
    """Columns: how far the results are from what is right, and from the first side's. firsts: of the passes, filled in here."""
    group = problem.case.heads_q // problem.case.heads_kv
    worst = 0.0
    for (row, head), expected in right.items():
        heads = slice(head * group, (head + 1) * group)
        mine = (
            {"out": found[0][row, heads]}
            if which == "forward"
            else {"q": found[0][row, heads], "k": found[1][row, head], "v": found[2][row, head]}
        )
        for what, x in mine.items():
            kept = counted[row] if what in ("out", "q") else None
            worst = max(worst, peer_sides.distance(x, expected[what], kept))
    columns = {"error": f"{worst:.2g}"}
    if which in firsts:
        kept_of = [counted, None, None]
        pairs = zip(found, firsts[which], kept_of, strict=False)
        columns["differs"] = f"{max(peer_sides.distance(*pair) for pair in pairs):.2g}"
    elif name in OURS:
        firsts[which] = [x.clone() for x in found]
    return columns


def _finish(
    job: Job, rows: Rows, timed: Mapping[Pass, Mapping[str, Timed]], plans: Mapping[tuple[str, Pass], Any]
) -> waves.Row:
    for which in PASSES:
        times = bench_select.contest(timed[which], job.device, job.seconds)
        for name, values in times.items():
            row = rows[name, which]
            row |= harness.kernel_times(values, job.case.flops(which) * int(row["pairs"]) / job.case.pairs)
    for key, plan in plans.items():
        if plan is not None:
            rows[key]["plan_us"] = f"{_wall_us(plan, job.device):.0f}"
    return {"rows": json.dumps(list(rows.values()))}


def _wall_us(plan: Any, device: str) -> float:
    took = []
    for _ in range(_PLANS):
        harness.synchronize(device)
        begun = time.perf_counter()
        plan()
        harness.synchronize(device)
        took.append((time.perf_counter() - begun) * 1e6)
    return statistics.median(took)


def results(jobs: Sequence[Job], given: Namespace) -> harness.Measured:
    """The rows of each case, as they come. Of cases that failed with a side under way, those of a second wave without it."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = [replace(job, progress=str(Path(folder) / job.case.name)) for job in jobs]
        again = []
        for job, found in _wave(jobs, given, given.wave_seconds):
            side = job.under_way
            if not waves.rows_of(found) and side in job.sides:
                failure = (found or {}).get("failure", "") or "its process failed"
                again.append(replace(job, failed={**job.failed, side: failure}))
            else:
                yield rows_of(job, found)
        left = given.until - time.monotonic()
        if left < _SECOND_WAVE:
            yield from (rows_of(job, None) for job in again)
            return
        again = [replace(job, by=given.until - _LAST_SECONDS) for job in again]
        yield from (rows_of(job, found) for job, found in _wave(again, given, left))


def _wave(jobs: Sequence[Job], given: Namespace, seconds: float) -> waves.Found:
    imports = IMPORTS if given.device != "cpu" else ()
    how: dict[str, Any] = {"wave_seconds": seconds, "wave_cases": len(jobs) or 1, "imports": imports}
    return waves.run(jobs, prepare, jobs=given.jobs, until=given.until, **how)


def rows_of(job: Job, given: waves.Row | None) -> list[dict[str, str]]:
    """What a wave gave of a case: its rows, or some that say what went wrong."""
    failures = dict(job.failed) or {"": (given or {}).get("failure", "its process failed")}
    failed = [job.case.columns | {"side": side, "failure": failure} for side, failure in failures.items()]
    return waves.rows_of(given) or failed


def print_table(rows: Sequence[Row]) -> None:
    """A line for each pass of each case: TFLOP/s of every side, and what a plan takes."""

    def plan(name: str) -> Callable[[Mapping[str, Row]], str]:
        return lambda sides: sides.get(name, {}).get("plan_us", "")

    further = {f"{name} µs": plan(name) for name in ("cudnn_flex", "flex")}
    title = "TFLOP/s on allowed pairs, medians; * packed beforehand; µs: a mask's plan, once"
    harness.print_sides(rows, _cell, title=title, further=further)


def _cell(row: Row) -> str:
    packed = "*" if row.get("note", "").startswith("packed") else ""
    return harness.speed({**row, "tflops": row.get("tflops", "") + packed}, wrong=is_wrong(row))


def is_wrong(row: Row) -> bool:
    """Whether its results are further from the right ones, or ours, than rounding takes them."""
    return any(float(row.get(name) or 0) > MAX_ERROR for name in ("error", "differs"))


def failures(rows: Sequence[Row]) -> bool:
    """Whether a side of ours fails or is wrong. What is wrong with peers is in their rows."""
    return any(row.get("failure") or is_wrong(row) for row in rows if row["side"] in ("", *OURS))


def jobs(given: Namespace) -> list[Job]:
    """A case each."""
    how = {"device": given.device, "seconds": given.seconds, "sides": tuple(given.sides), "progress": ""}
    cases = harness.picked(CASES, given.cases)
    by = given.begun + given.wave_seconds - _LAST_SECONDS
    return [Job(case=case if given.size == "full" else case.small, by=by, **how) for case in cases]


BENCH = Bench(
    doc=__doc__,
    results="peers_gpus.csv",
    columns=COLUMNS,
    cases=jobs,
    rows=results,
    sides=PEERS,
    options=(harness.PATTERNS, arg("--sides", nargs="+", default=list(PEERS), choices=list(PEERS))),
    seconds=0.4,
    budget=200.0,
    sized=True,
    jobs=True,
    where=bench_select.where,
    short=("case", "pass", "side", "tflops", "failure"),
    table=print_table,
    failed=failures,
)
main = harness.run(BENCH)

if __name__ == "__main__":
    sys.exit(main())
