"""How long a model's first step takes, ours beside Inductor's: each in fresh processes, with empty caches and then with full ones.

    python -m benchmarks.bench_first_step --models llama t5 --calls prefill_left train_right --lengths 1024 6144 --jobs 4
    python -m benchmarks.bench_first_step --rows llama/prefill_left/16384 t5/train_right/1024 --jobs 4 --warm-runs 3
    python -m benchmarks.bench_first_step --device cpu
    python -m benchmarks.bench_first_step --size small --lengths 512 --further "777 1500" --compile-threads 1 --jobs 8

A row is a model, a call of it and a length; benchmarks/first_step.py says what each process measures. Both sides of a row run beside each
other, with empty caches and then --warm-runs times with full ones, of which the one with the median time counts. One after the other, the
second side had more of the machine to itself wherever other rows had ended in the meantime. Our package has its bytecode first, as an
installer leaves it: to compile it takes a process 0.7 s. Rows are on disk as soon as they are measured. --append leaves out those that the
file has. --further lengths are called after the first, one after another. --jobs rows are measured beside each other; --budget-seconds
begins no row after that. --profile FOLDER runs each side once more with full caches, under a profiler: benchmarks/first_step_profile.py
compares the two.
"""

from __future__ import annotations

import compileall
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import attn_compiler
from benchmarks import harness
from benchmarks.first_step import CALLS, MODELS, Job, applies
from benchmarks.harness import Bench, arg

SIDES = {"ours": harness.BACKEND, "inductor": harness.BASELINE}
CACHES = ("cold", "warm")
#: a row's name
ROW = ("model", "call", "length", "batch", "size", "jobs", "further", "compile_threads")
MEASURED = (
    *("first_seconds", "second_seconds", "further_seconds", "cpu_seconds", "import_seconds", "passes_seconds"),
    *("kernels_ahead", "kernels_late", "from_cache"),
)
#: what Inductor's side has not
_OURS = MEASURED[4:]
COLUMNS = (
    *ROW,
    *(
        f"{side}_{caches}_{name}"
        for side, caches, name in itertools.product(SIDES, CACHES, MEASURED)
        if side == "ours" or name not in _OURS
    ),
    *("sites", "warm_runs", "ratio_cold", "ratio_warm", "ratio_warm_cpu", "failure"),
)
#: folders that a process keeps what it compiled in
_FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")

Row = dict[str, str]
#: (job, folder of its caches) -> what benchmarks.first_step printed
Run = Callable[[Job, Path], Mapping[str, Any]]


class StepFailed(Exception):
    """A process failed, or took too long; its last words."""


def fresh_process(job: Job, caches: Path, *, seconds: float, threads: str) -> Mapping[str, Any]:
    """Raises StepFailed."""
    environment = {**os.environ, **{name: str(caches / name.lower()) for name in _FOLDERS}}
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = threads
    command = [sys.executable, "-m", "benchmarks.first_step", json.dumps(dataclasses.asdict(job))]
    root = Path(__file__).parents[1]
    try:
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise StepFailed(f"not done after {seconds:.0f} s") from error
    if done.returncode:
        raise StepFailed((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1][:300])
    found: Mapping[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(name: Row, device: str, run: Run, *, warm_runs: int = 1, profile: Path | None = None) -> Row:
    """A row. What fails is its failure, and other columns stay empty."""
    row = dict(name)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(SIDES)) as pool:

        def both(caches: str, profile: Path | None = None) -> dict[str, Mapping[str, Any]]:
            began = {side: pool.submit(run, _job(name, device, side, profile), Path(folder) / side) for side in SIDES}
            found = {}
            for side, future in began.items():
                try:
                    found[side] = future.result()
                except StepFailed as error:
                    raise StepFailed(f"{side} {caches}: {error}") from error
            return found

        try:
            for caches, times in zip(CACHES, (1, warm_runs), strict=True):
                found = [both(caches) for _ in range(times)]
                for side in SIDES:
                    # All of the process whose first step took the median time.
                    of_side = sorted((one[side] for one in found), key=lambda one: one["first_seconds"])
                    row |= _columns(side, caches, of_side[(len(of_side) - 1) // 2])
            if profile is not None:
                both("profiled", profile)
        except StepFailed as error:
            return row | {"failure": str(error)}

    def ratio(caches: str, measured: str) -> str:
        ours, theirs = (float(row[f"{side}_{caches}_{measured}"]) for side in SIDES)
        return f"{ours / theirs:.3f}"

    ratios = {f"ratio_{caches}": ratio(caches, "first_seconds") for caches in CACHES}
    return row | ratios | {"ratio_warm_cpu": ratio("warm", "cpu_seconds"), "warm_runs": str(warm_runs)}


def _job(name: Row, device: str, side: str, profile: Path | None) -> Job:
    file = "-".join((name["model"], name["call"], name["length"], side)) + ".prof"
    return Job(
        model=name["model"], call=name["call"], length=int(name["length"]), batch=int(name["batch"]), device=device,
        size="small" if name["size"] == "small" else "full", side=SIDES[side], further=name["further"],
        profile="" if profile is None else str(profile / file),
    )  # fmt: skip


def _columns(side: str, caches: str, found: Mapping[str, Any]) -> Row:
    wanted = {f"{side}_{caches}_{name}": found[name] for name in MEASURED}
    columns = {
        name: f"{value:.3f}" if isinstance(value, float) else str(value)
        for name, value in wanted.items()
        if name in COLUMNS
    }
    return columns | ({"sites": found["sites"]} if side == "ours" else {})


@dataclass(frozen=True)
class Named:
    """A row to measure. names: of ROW."""

    names: Row


def wanted(given: Namespace) -> list[Named]:
    """The rows that are asked for by name; else the shortest first, and of each length every model. Raises ValueError for a name that is
    none."""
    on_cpu = given.device == "cpu"
    found = [_parts(row) for row in given.rows or ()] or [
        (model, call, str(length))
        for length in sorted(given.lengths or ([128] if on_cpu else [1024, 6144, 16384]))
        for call in given.calls
        for model in given.models or [model.name for model in MODELS.values() if model.on_cpu or not on_cpu]
        if applies(MODELS[model], CALLS[call])
    ]
    threads = given.compile_threads or max(2, (os.cpu_count() or 2) // (len(SIDES) * given.jobs))
    size = "small" if on_cpu else given.size
    of_all = (str(given.batch), size, str(given.jobs), given.further, str(threads))
    return [Named(dict(zip(ROW, (*parts, *of_all), strict=True))) for parts in found]


def _parts(row: str) -> tuple[str, str, str]:
    match row.split("/"):
        case [model, call, length] if model in MODELS and call in CALLS and length.isdecimal():
            if applies(MODELS[model], CALLS[call]):
                return model, call, length
            raise ValueError(f"{model} is not called as {call}")
    raise ValueError(f"a row is model/call/length, such as llama/train_right/1024, and not {row}")


def means(rows: Iterable[Mapping[str, str]]) -> list[str]:
    """Lines for people: geometric means of ours / Inductor, by kind of call and of all."""
    good = [row for row in rows if not row["failure"]]
    kinds = {"prefill": [False], "training": [True], "all": [False, True]}
    lines = []
    for name, trains in kinds.items():
        some = [row for row in good if CALLS[row["call"]].training in trains]
        of = {c: statistics.geometric_mean(float(row[f"ratio_{c}"]) for row in some) for c in CACHES if some}
        said = ", ".join(f"{caches} {mean:.3f}" for caches, mean in of.items())
        lines += [f"{name}: {len(some)} rows, ours / Inductor {said}"] if some else []
    return lines


def said(row: Mapping[str, str]) -> str:
    """A row, for people."""
    name = f"{row['model']} {row['call']} {row['batch']} x {row['length']}"
    if row["failure"]:
        return f"{name}: FAILED, {row['failure']}"
    times = ", ".join(
        f"{caches} {row[f'ours_{caches}_first_seconds']} / {row[f'inductor_{caches}_first_seconds']} s"
        f" = {row[f'ratio_{caches}']}"
        for caches in CACHES
    )
    kernels = f"{row['ours_cold_kernels_ahead']} kernels ahead, {row['ours_cold_kernels_late']} late"
    return f"{name}: {times} ({kernels}; {row['sites'] or 'no site'})"


def rows(cases: Sequence[Named], given: Namespace) -> harness.Measured:
    """Those that are begun in time, as they come."""

    def one(case: Named) -> Row | None:
        if time.monotonic() > given.until:
            return None

        def run(job: Job, caches: Path) -> Mapping[str, Any]:
            threads = case.names["compile_threads"]
            return fresh_process(job, caches, seconds=given.process_seconds, threads=threads)

        how = {"warm_runs": given.warm_runs, "profile": given.profile}
        return {"failure": "", **measured(case.names, given.device, run, **how)}

    with ThreadPoolExecutor(given.jobs) as pool:
        for done in as_completed([pool.submit(one, case) for case in cases]):
            row = done.result()
            if row is not None:
                print(said(row), flush=True)
                yield [row]


def _begin(given: Namespace) -> None:
    compileall.compile_dir(Path(attn_compiler.__file__).parent, quiet=1)
    if given.profile is not None:
        given.profile.mkdir(parents=True, exist_ok=True)


BENCH = Bench(
    doc=__doc__, results="first_step.csv", columns=COLUMNS, cases=wanted, rows=rows, sides=SIDES,
    options=(
        arg("--models", nargs="+", choices=MODELS, help="all; on a CPU four"),
        arg("--calls", nargs="+", choices=CALLS, default=["prefill", "prefill_left", "train", "train_right"]),
        arg("--lengths", nargs="+", type=int, help="1024 6144 16384; on a CPU 128"),
        arg("--rows", nargs="+", metavar="MODEL/CALL/LENGTH", help="these, in this order"),
        arg("--warm-runs", type=int, default=1, choices=range(1, 10)),
        arg("--profile", type=Path, metavar="FOLDER"),
        arg("--further", default="", metavar="LENGTHS", help="such as '777 1500'"),
        arg("--compile-threads", type=int, help="of Inductor in each process; else what the cores allow"),
        arg("--batch", type=int, default=2),
        arg("--jobs", type=int, default=1),
        arg("--process-seconds", type=float, default=300),
    ),
    budget=1e9, sized=True, short=("ratio_cold", "ratio_warm"), begin=_begin, table=lambda rows: print("\n".join(means(rows))),
)  # fmt: skip
main = harness.run(BENCH)

if __name__ == "__main__":
    sys.exit(main())
