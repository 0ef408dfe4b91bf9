"""Is this checkout slower than the figures that it has of the same device? Kernels, decoding, whole models and first steps.

    python -m benchmarks.gate                      # on the first GPU, against benchmarks/results/gate_h200.csv or what it is called
    python -m benchmarks.gate --device cpu         # against gate_cpu.csv
    python -m benchmarks.gate --device cpu --write # makes that file anew, from five runs

What is compared is the ratio of a peer's time to ours, both measured in turn in one process (benchmarks/gate_cases.py), so that a slower
machine alone changes nothing. Each run is a process of its own. A row whose ratio fell by more than counts (benchmarks/gate_rule.py) is
measured again in another process, and counts if that fell by as much. Exits with 1 and the rows where any did or failed, with 2 where there
is no file to compare with.

--rounds keeps every round as JSON. --warm compiles all rows before, several processes at a time, for a machine that has compiled none.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks import gate_cases, gate_rule, harness
from benchmarks.gate_rule import OURS, PEER, Baseline, Run
from benchmarks.harness import RESULTS, arg, command

MEASURED = ("run", "rounds", f"{OURS}_p50_ms", f"{PEER}_p50_ms", "ratio", "noise", "failure")
COLUMNS = ("kind", "row", "peer", *MEASURED)
#: what another value of makes ratios another thing, perhaps
_VERSIONS = ("device", "threads", "torch", "transformers")
_MOST_RUNS = 9

#: what one process measured: row -> {"ours": [...], "peer": [...]}, or {"failure": text}
Found = dict[str, dict[str, Any]]
#: (names of rows, or none for all) -> what a fresh process measured of them
Measure = Callable[[Sequence[str]], Found]


def measure_here(rows: Sequence[gate_cases.Row], device: str, seconds: float) -> Found:
    """Every row in turn. What fails of one is its failure."""
    found: Found = {}
    for row in rows:
        begin = time.perf_counter()
        try:
            found[row.name] = {side: list(times) for side, times in row.make(device)(seconds).items()}
        except Exception as error:  # noqa: BLE001 - the reason is the row's, and no other row is to be missed
            found[row.name] = {"failure": harness.failure(error)}
        took = time.perf_counter() - begin
        print(f"{row.kind}, {row.name}: {took:.1f} s {found[row.name].get('failure', '')}", file=sys.stderr, flush=True)
        torch.compiler.reset()
        gc.collect()
        if device != "cpu":
            torch.cuda.empty_cache()
    return found


def fresh_process(device: str, seconds: float) -> Measure:
    """A process for each run: what differs from one to the next is part of the noise."""

    def measure(names: Sequence[str]) -> Found:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "rounds.json"
            command = [sys.executable, "-m", "benchmarks.gate", "--device", device, "--seconds", str(seconds)]
            command += ["--once", str(out), *(["--only", *names] if names else [])]
            done = subprocess.run(command, cwd=Path(__file__).parents[1], check=False)
            if not out.exists():
                return {
                    name: {"failure": f"its process ended with {done.returncode}"} for name in names or ("all rows",)
                }
            found: Found = json.loads(out.read_text())
        return found

    return measure


def device_kind(name: str) -> str:
    """Of a GPU's name, in lower case: "h200" of "NVIDIA H200", "h100" of "NVIDIA H100 80GB HBM3"."""
    words = [word for word in name.lower().replace("-", " ").split() if word not in ("nvidia", "geforce", "tesla")]
    return words[0] if words else "gpu"


def results_of(device: str) -> Path:
    kind = "cpu" if device == "cpu" else device_kind(torch.cuda.get_device_name(device))
    return RESULTS / f"gate_{kind}.csv"


def csv_rows(runs: Sequence[Found], rows: Sequence[gate_cases.Row]) -> list[dict[str, str]]:
    """A line for each run of each row."""
    return [
        {"kind": row.kind, "row": row.name, "peer": row.peer, "run": str(number), **_measured(found[row.name])}
        for row in rows
        for number, found in enumerate(runs, 1)
        if row.name in found
    ]


def _measured(rounds: dict[str, Any]) -> dict[str, str]:
    if "failure" in rounds:
        return {"failure": rounds["failure"]}
    run = gate_rule.run_of(rounds)
    columns = {f"{side}_p50_ms": f"{statistics.median(rounds[side]):.5g}" for side in (OURS, PEER)}
    return {
        **columns,
        "rounds": str(len(rounds[OURS])),
        "ratio": f"{math.exp(run.value):.4f}",
        "noise": f"{run.noise:.5f}",
        "failure": "",
    }


def baselines_of(lines: Sequence[Mapping[str, str]]) -> dict[str, Baseline]:
    """Of a file's lines, those of rows that failed apart."""
    runs: dict[str, list[Run]] = {}
    for line in lines:
        if not line["failure"]:
            run = Run(value=math.log(float(line["ratio"])), noise=float(line["noise"]))
            runs.setdefault(line["row"], []).append(run)
    return gate_rule.baselines(runs, {line["row"]: line["kind"] for line in lines})


def compare(before: Mapping[str, Baseline], measure: Measure) -> list[dict[str, str]]:
    """What became of each row of the file: its verdict is "ok", "SLOWER" or "FAILED: ..."."""
    found = measure(())
    runs = {name: [gate_rule.run_of(rounds)] for name, rounds in found.items() if "failure" not in rounds}
    suspects = [name for name, baseline in before.items() if name in runs and gate_rule.is_slower(baseline, runs[name])]
    for name, rounds in measure(suspects).items() if suspects else ():
        if "failure" not in rounds:
            runs[name].append(gate_rule.run_of(rounds))
    return [_verdict(name, baseline, runs.get(name, []), found.get(name, {})) for name, baseline in before.items()]


def _verdict(name: str, baseline: Baseline, runs: Sequence[Run], found: Mapping[str, Any]) -> dict[str, str]:
    row = {"row": name, "before": f"{math.exp(baseline.value):.3f}"}
    if not runs:
        return row | {"verdict": f"FAILED: {found.get('failure', 'it was not measured')}"}
    slower = gate_rule.is_slower(baseline, runs)
    best = max(runs, key=lambda run: run.value)
    return row | {
        "now": f"{math.exp(best.value):.3f}",
        "decline": f"{gate_rule.decline(baseline, best):.1%}",
        "bound": f"{gate_rule.bound(baseline, best):.1%}",
        "runs": str(len(runs)),
        "verdict": "SLOWER" if slower else "ok",
    }


def print_verdicts(verdicts: Sequence[Mapping[str, str]]) -> None:
    names = ("row", "before", "now", "decline", "bound", "runs", "verdict")
    lines = ([harness.red(row.get(name, ""), when=row["verdict"] != "ok") for name in names] for row in verdicts)
    harness.show("ratio: the peer's time over ours. A decline beyond its bound counts", names, lines)


def other_versions(lines: Sequence[Mapping[str, str]], where: Mapping[str, str]) -> list[str]:
    """What the file was measured with, where that is not what is here."""
    return [
        f"{name}: {', '.join(sorted(before))} in the file, {where[name]} here"
        for name in _VERSIONS
        if (before := {line[name] for line in lines}) != {where[name]}
    ]


def write(path: Path, runs: Sequence[Found], rows: Sequence[gate_cases.Row], where: Mapping[str, str]) -> None:
    file = harness.CsvFile(path, [*COLUMNS, *where])
    for line in csv_rows(runs, rows):
        file.add({**line, **where})


def written(path: Path) -> int:
    """Says what a file has; 1 where a row failed."""
    lines = harness.read(path)
    for name, baseline in baselines_of(lines).items():
        print(f"{name}: {math.exp(baseline.value):.3f}, a run is off by {baseline.spread:.2%}")
    failed = [line for line in lines if line["failure"]]
    print("\n".join(f"FAILED {line['row']}: {line['failure']}" for line in failed) or f"wrote {path}")
    return int(bool(failed))


def repeated(measure: Measure, runs: int, end: float) -> Iterator[list[Found]]:
    """What was measured so far, after each of so many runs. end: of time.monotonic. No run begins that would end after it if it took as
    long as the longest one; the first begins anyhow."""
    longest, found = 0.0, list[Found]()
    for _ in range(runs):
        start = time.monotonic()
        if found and start + longest > end:
            return
        found.append(measure(()))
        longest = max(longest, time.monotonic() - start)
        yield found


def warm(names: Sequence[str], measure: Measure, jobs: int) -> None:
    """Has each row compiled by a process of its own, so that those which measure find its code on disk."""
    with ThreadPoolExecutor(jobs) as pool:
        for found in pool.map(lambda name: measure([name]), names):
            print(*(f"{name}: {row['failure']}" for name, row in found.items() if "failure" in row), sep="\n", end="")


@command(
    __doc__,
    arg("--device", default="cuda:0"),
    arg("--seconds", type=float, default=4.0, help="timing of one row (default %(default)s)"),
    arg("--only", nargs="+", default=[], metavar="ROW", help="rows by name"),
    arg("--write", action="store_true", help="make the file anew instead of comparing with it"),
    arg("--runs", type=int, default=5, choices=range(1, _MOST_RUNS + 1), help="for --write (default %(default)s)"),
    arg("--budget-seconds", type=float, default=1e9, help="for --write: begin no run that may end after this"),
    arg("--warm", type=int, default=0, metavar="JOBS", help="compile all rows before, so many at a time"),
    arg("--rounds", type=Path, help="keep every round of every run here, as JSON"),
    arg("--output", type=Path, help="the file, in place of the one that the device's name gives"),
    arg("--commit", help="the commit to name in the file, where this is no checkout"),
    arg("--once", type=Path, help=argparse.SUPPRESS),
)
def main(options: argparse.Namespace) -> int:
    rows = [row for row in gate_cases.rows(options.device) if not options.only or row.name in options.only]
    if options.device == "cpu":
        torch.set_num_threads(1)
    if options.once is not None:
        options.once.write_text(json.dumps(measure_here(rows, options.device, options.seconds)))
        return 0
    end = time.monotonic() + options.budget_seconds
    if options.warm:
        warm([row.name for row in rows], fresh_process(options.device, 0.0), options.warm)
    measure = fresh_process(options.device, options.seconds)
    path = options.output or results_of(options.device)
    where = harness.environment(options.device, options.commit)
    if options.write:
        for found in repeated(lambda names: measure(names or options.only), options.runs, end):
            # After each run: what ends the command later costs no run that was.
            _keep(options.rounds, found)
            write(path, found, rows, where)
        return written(path)
    if not path.exists():
        print(
            f"there is no {path}: python -m benchmarks.gate --device {options.device} --write makes it", file=sys.stderr
        )
        return 2
    lines = [line for line in harness.read(path) if not options.only or line["row"] in options.only]
    runs: list[Found] = []

    def kept(names: Sequence[str]) -> Found:
        runs.append(measure(names or options.only))
        return runs[-1]

    for said in other_versions(lines, where):
        print(f"not the same machine: {said}")
    verdicts = compare(baselines_of(lines), kept)
    _keep(options.rounds, runs)
    print_verdicts(verdicts)
    return int(any(row["verdict"] != "ok" for row in verdicts))


def _keep(path: Path | None, runs: Sequence[Found]) -> None:
    if path is not None:
        path.write_text(json.dumps(runs))


if __name__ == "__main__":
    sys.exit(main())
