"""On a GPU, our backend beside Inductor's own on models that nothing was tuned for: the rule is in benchmarks/held_out.py.

    python -m benchmarks.bench_held_out --budget-seconds 540 --jobs 8

Measured as bench_h200.py measures. Models of diffusers want diffusers, the newest ones a new transformers; one that can't be made is
a row with the failure. What the budget leaves out is done by a later run with --append. Writes benchmarks/results/held_out_h200.csv, and
prints a table, the geometric mean and the slowest case. Exits with 1 where a result is wrong, or where the profiler saw another attention
kernel than the report names. A case that is slower is no failure: to find those is what this is for.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import bench_h200, compare, harness, held_out, waves

RESULTS = Path(__file__).parent / "results" / "held_out_h200.csv"
KEYS = ("model", "call")
_SHORT = ("lowerings", "inductor_p50_ms", "attn_compiler_p50_ms", "ratio", "numerics", "pinned", "failure")


def summed_up(rows: Sequence[Mapping[str, str]]) -> str:
    """How many times as fast as Inductor, over all rows: the geometric mean, the slowest, and how many have no figure."""
    measured = [row for row in rows if row.get("ratio")]
    if not measured:
        return "nothing was measured"
    ratios = [float(row["ratio"]) for row in measured]
    slowest = min(measured, key=lambda row: float(row["ratio"]))
    return (
        f"{len(ratios)} cases, geometric mean {statistics.geometric_mean(ratios):.2f}x, "
        f"the slowest {min(ratios):.2f}x ({slowest['model']}, {slowest['call']}), {len(rows) - len(measured)} failed"
    )


def main() -> int:
    """Measure what the budget allows; 0 where nothing is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    waves.add_arguments(parser, budget_seconds=540.0)
    parser.add_argument("--seconds", type=float, default=1.0, help="timing of one case (default %(default)s)")
    parser.add_argument("--models", nargs="+", default=[model.name for model in held_out.drawn()])
    parser.add_argument("--append", action="store_true", help="keep the rows of the file and measure only the others")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="the commit to name in the rows, where this is no checkout")
    parser.set_defaults(size="full")
    options = parser.parse_args()
    start = time.monotonic()
    where = harness.environment(options.device, options.commit) | {"extras": bench_h200.extras()}
    columns = [*KEYS, *compare.COLUMNS, "graphs", *bench_h200.KERNELS, *bench_h200.SECONDS, "failure", *where]
    file = harness.CsvFile(options.output, columns, append=options.append)
    done = {tuple(row[key] for key in KEYS) for row in file.rows}
    cases = [x for x in held_out.plan() if x.model in options.models and tuple(x.names.values()) not in done]
    left = len(cases)
    for case, row in bench_h200.results(cases, options, start + options.budget_seconds):
        left -= 1
        file.add({**case.names, **(row or {"failure": "it has no such attention"}), **where})
        took = time.monotonic() - start
        print(f"{took:4.0f} s", case.words, *((row or {}).get(key, "") for key in _SHORT), flush=True)
    harness.print_table(file.rows, (*KEYS, "lowerings"))
    print(summed_up(file.rows), f"{left} cases left for a run with --append" if left else "", sep="\n")
    return int(any(row.get("pinned") == "NO" or row.get("numerics") == "WRONG" for row in file.rows))


if __name__ == "__main__":
    sys.exit(main())
