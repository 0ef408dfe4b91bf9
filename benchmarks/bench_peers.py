"""On a Hopper GPU: our kernels beside those of other libraries, in bfloat16, forward, and forward with backward.

    python -m benchmarks.bench_peers --budget-seconds 200 --wave-seconds 135 --jobs 10

Sides: our lowerings hopper and triton; "fa4", FlashAttention-4 (flash-attn-4); "cudnn_flex", cudnn.flex_attention (from about
nvidia-cudnn-frontend 1.32, with nvidia-cutlass-dsl); "sdpa_cudnn", PyTorch's cuDNN kernel; "flex", FlexAttention compiled. `note` says
where a side was given something else than the others, as packed rows.

Each case has a process, which compiles and checks its sides while other cases do; cases are timed one after another, all sides of a
case in turn. Times are microseconds of the GPU, as in bench_kernels.py, and TFLOP/s count allowed pairs (`pairs`: those that the side
computes). `plan_us`: of the wall clock, what a library takes once a mask before it runs, which the times hold nothing of.

`error` is the distance to attention in float64, by norms, of two heads of k and v with the q's that read them: of out, or the largest of
the gradients. `differs` is the same of all heads to our first side. Padded queries have no part in either.

A side that fails is a row with the reason. One that takes its process with it, or hangs, is left out when the case is tried once more.
Writes benchmarks/results/peers_gpus.csv. Exits with 1 where a side of ours fails or is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import functools
import io
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from attn_compiler.spec.target import Target
from benchmarks import bench_h200, bench_kernels, bench_select, harness, kernel_cases, peer_sides, select_cases, waves
from benchmarks.bench_kernels import Timed
from benchmarks.kernel_cases import Case, Pass, Problem
from benchmarks.peer_sides import PEERS

RESULTS = Path(__file__).parent / "results" / "peers_gpus.csv"
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

_KERNEL_CASES = {case.name: case for case in kernel_cases.CASES}
#: the most telling first
CASES: tuple[Case, ...] = (
    _KERNEL_CASES["padding_right"],
    select_cases.BY_NAME["padded_causal_gqa_d128_s8192"],
    _KERNEL_CASES["documents_causal"],
    *(
        select_cases.BY_NAME[name]
        for name in (
            *("window_d128_s8192", "causal_d128_s8192", "causal_d128_s2048", "causal_d64_s8192", "full_d128_s8192"),
            *("sinks_gqa_d64_s8192", "softcap_d128_s8192"),
        )
    ),
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
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device != "cpu" else torch.float32

    def begin(self, what: str) -> None:
        """Say what is under way."""
        Path(self.progress).write_text(what)

    @property
    def under_way(self) -> str:
        path = Path(self.progress)
        return path.read_text() if path.exists() else ""


Rows = dict[tuple[str, Pass], dict[str, str]]


# ---- a case in its process ----------------------------------------------------------------------------------------


def prepare(job: Job, lock: AbstractContextManager[Any]) -> waves.Finish:
    """Compile and check every side; rows follow by timing them, as JSON. lock: held while the right results are computed."""
    warnings.simplefilter("ignore")
    job.begin("")
    rows: Rows = {}
    timed: dict[Pass, dict[str, Timed]] = {which: {} for which in PASSES}
    plans: dict[tuple[str, Pass], Any] = {}
    try:
        problems = {
            which: kernel_cases.build(job.case, device=job.device, dtype=job.dtype, training=which != "forward")
            for which in PASSES
        }
        counted = peer_sides.counted_queries(job.case).to(job.device)[:, None, :, None]
        grad_out = bench_kernels.gradient_of_out(problems["both"]).mul_(counted)
        torch.eye(2, dtype=torch.float64, device=job.device).mm(grad_out[0, 0, :2, :1].double())  # loads the library
        with lock:
            right = {
                part: peer_sides.reference(problems["both"], grad_out, part) for part in peer_sides.parts_of(job.case)
            }
            _give_back(job.device)
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
                        step = bench_kernels.timed(peer.side, which, peer.taken(grad_out))
                        row |= {"note": peer.note, "pairs": str(peer.pairs)}
                        row |= check(name, which, [peer.whole(x) for x in step.run(None)[:3]])
                except Exception as failure:  # noqa: BLE001 (a row of its own says so)
                    row["failure"] = bench_kernels.reason(failure, [])
                    if not bench_kernels.is_usable(job.device):
                        gone = {"failure": row["failure"]}
                        return lambda: gone
                    continue
                row["compile_s"] = f"{time.monotonic() - begun:.1f}"
                timed[which][name] = step
                plans[name, which] = peer.plan
    except Exception as failure:  # noqa: BLE001 (as above)
        job.begin("")
        broken = {"failure": bench_kernels.reason(failure, [])}
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
            p20, p50, p80 = harness.percentiles(values)
            share = int(row["pairs"]) / job.case.pairs
            row |= {"rounds": str(len(values)), "tflops": f"{job.case.flops(which) * share / p50 / 1e6:.1f}"}
            row |= {"p20_us": f"{p20:.1f}", "p50_us": f"{p50:.1f}", "p80_us": f"{p80:.1f}"}
    for key, plan in plans.items():
        if plan is not None:
            rows[key]["plan_us"] = f"{_wall_us(plan, job.device):.0f}"
    return {"rows": json.dumps(list(rows.values()))}


def _wall_us(plan: Any, device: str) -> float:
    took = []
    for _ in range(_PLANS):
        _synchronize(device)
        begun = time.perf_counter()
        plan()
        _synchronize(device)
        took.append((time.perf_counter() - begun) * 1e6)
    return statistics.median(took)


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def _give_back(device: str) -> None:
    if device != "cpu":
        torch.cuda.empty_cache()


# ---- all of them --------------------------------------------------------------------------------------------------


def results(jobs: Sequence[Job], *, until: float, at_once: int, wave_seconds: float) -> Iterator[list[dict[str, str]]]:
    """The rows of each case, as they come. Of cases that failed with a side under way, those of a second wave without it."""
    if not jobs:
        return
    again = []
    imports = IMPORTS if jobs[0].device != "cpu" else ()
    for job, given in waves.run(
        jobs, prepare, jobs=at_once, until=until, wave_seconds=wave_seconds, wave_cases=len(jobs), imports=imports
    ):
        side = job.under_way
        if "rows" not in (given or {}) and side in job.sides:
            failure = (given or {}).get("failure", "") or "its process failed"
            again.append(replace(job, failed={**job.failed, side: failure}))
        else:
            yield rows_of(job, given)
    left = until - time.monotonic()
    if not again or left < _SECOND_WAVE:
        yield from (rows_of(job, None) for job in again)
        return
    by = time.monotonic() + left - _LAST_SECONDS
    again = [replace(job, by=by) for job in again]
    for job, given in waves.run(
        again, prepare, jobs=at_once, until=until, wave_seconds=left, wave_cases=len(again), imports=imports
    ):
        yield rows_of(job, given)


def rows_of(job: Job, given: waves.Row | None) -> list[dict[str, str]]:
    """What a wave gave of a case: its rows, or some that say what went wrong."""
    if given is not None and "rows" in given:
        rows: list[dict[str, str]] = json.loads(given["rows"])
        return rows
    failures = dict(job.failed) or {"": (given or {}).get("failure", "its process failed")}
    return [job.case.columns | {"side": side, "failure": failure} for side, failure in failures.items()]


def print_table(rows: Sequence[Mapping[str, str]]) -> None:
    """A line for each pass of each case: TFLOP/s of every side, and what a plan takes."""
    names = list(PEERS)
    table = Table(title="TFLOP/s on allowed pairs, medians; * packed beforehand; µs: a mask's plan, once")
    for column in ("case", "pass", *names, "cudnn_flex µs", "flex µs"):
        table.add_column(column)
    for case in dict.fromkeys(row["case"] for row in rows):
        for which in PASSES:
            cells = {row["side"]: row for row in rows if row["case"] == case and row.get("pass") in (which, "", None)}
            plans = (cells.get(name, {}).get("plan_us", "") for name in ("cudnn_flex", "flex"))
            table.add_row(case, which, *(_cell(cells.get(name, {})) for name in names), *plans)
    Console(width=None if sys.stdout.isatty() else 180).print(table)


def _cell(row: Mapping[str, str]) -> str:
    if row.get("failure"):
        return f"[yellow]{escape(row['failure'][:24])}"
    text = row.get("tflops", "") + ("*" if row.get("note", "").startswith("packed") else "")
    return f"[red]{text} WRONG" if is_wrong(row) else text


def is_wrong(row: Mapping[str, str]) -> bool:
    """Whether its results are further from the right ones, or ours, than rounding takes them."""
    return any(float(row.get(name) or 0) > MAX_ERROR for name in ("error", "differs"))


def failures(rows: Sequence[Mapping[str, str]]) -> int:
    """1 where a side of ours fails or is wrong; else 0: an exit status. What is wrong with peers is in their rows."""
    ours = [row for row in rows if row["side"] in ("", *OURS)]
    return int(any(row.get("failure") or is_wrong(row) for row in ours))


def main() -> int:
    """Measure what the budget allows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    waves.add_arguments(parser, budget_seconds=200.0)
    parser.add_argument("--seconds", type=float, default=0.4, help="timing of one pass of a case (%(default)s)")
    parser.add_argument(
        "--cases", nargs="+", default=["*"], metavar="PATTERN", help="names, or patterns like 'causal*'"
    )
    parser.add_argument("--sides", nargs="+", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--size", choices=("full", "small"), default="full", help="small: for a look at the script")
    parser.add_argument("--device", default="cuda:0", help="on cpu, in float32, with TRITON_INTERPRET=1")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="the commit to name in the rows, where this is no checkout")
    given = parser.parse_args()
    start = time.monotonic()
    where = bench_kernels.environment(given.device, given.commit)
    target = Target.current(given.device)
    where |= {name: getattr(target, name) for name in bench_select.PACKAGES}
    file = harness.CsvFile(given.output, [*COLUMNS, *where])
    cases = [case for case in CASES if any(fnmatch.fnmatch(case.name, pattern) for pattern in given.cases)]
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            Job(
                case=case if given.size == "full" else case.small,
                device=given.device,
                seconds=given.seconds,
                sides=tuple(given.sides),
                by=start + given.wave_seconds - _LAST_SECONDS,
                progress=str(Path(folder) / case.name),
            )
            for case in cases
        ]
        until = start + given.budget_seconds
        for rows in results(jobs, until=until, at_once=given.jobs, wave_seconds=given.wave_seconds):
            for row in rows:
                file.add({**row, **where})
            took = time.monotonic() - start
            print(f"{took:4.0f} s", rows[0]["case"], *map(_summary, rows), sep="  ", flush=True)
    print_table(file.rows)
    return failures(file.rows)


def _summary(row: Mapping[str, str]) -> str:
    return f"{row['side']} {row.get('tflops') or row.get('failure', '')[:60]}"


if __name__ == "__main__":
    sys.exit(main())
