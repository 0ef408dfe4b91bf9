"""Make the rows that say where FP8 is faster, from what bench_fp8.py and bench_select.py measured.

    python -m benchmarks.fp8_rows

Reads benchmarks/results/fp8_h200.csv and select_h200.csv, and writes attn_compiler/lowerings/choice/fp8_sm90.csv: effective TFLOP/s of each
lowering for each case. Lowerings that only the second file has are placed by their speed relative to cuDNN's of that file, since the two
were measured at different times.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence

from attn_compiler.lowerings.base import FP8
from attn_compiler.lowerings.choice import fp8_speed
from benchmarks import bench_fp8, harness, select_rows
from benchmarks.harness import command

#: head dims that a measured one stands for
HEAD_DIMS = {64: (33, 64), 128: (65, 128), 256: (129, 256)}
#: recipes whose rows say how fast a lowering is: "scaling" and "backward" of fp8_speed.SpeedRow
_RECIPES = {
    "": ("block", "no"), "per head": ("head", "no"), "per tensor": ("tensor", "no"), "delayed": ("before", "no"),
    "accurate": ("accurate", "no"), "per tensor, backward": ("tensor", "yes"), "delayed, backward": ("before", "yes"),
}  # fmt: skip
OTHERS = ("fa4", "cudnn", "hopper")
KNOWN = (*FP8, *OTHERS, "triton", bench_fp8.BASELINE)

#: lowering, "scaling" and "backward" of fp8_speed.SpeedRow
Key = tuple[str, str, str]
#: TFLOP/s of a case and whether it is training
Speeds = dict[tuple[str, bool], dict[Key, float]]


def measured(rows: Sequence[Mapping[str, str]]) -> dict[tuple[str, bool], dict[Key, Mapping[str, str]]]:
    """Rows of bench_fp8.py as `Speeds` has them. The newest one of a side counts, and the kernel alone only where the whole was not
    measured: nothing is faster."""
    found: dict[tuple[str, bool], dict[Key, Mapping[str, str]]] = {}
    for row in sorted(rows, key=lambda row: row["part"] == "whole"):
        # The file also has times of a kernel in FP8 that is there no more.
        if row["recipe"] in _RECIPES and row.get("tflops") and row["side"] in KNOWN:
            scaling, backward = _RECIPES[row["recipe"]] if row["side"] in FP8 else ("", "")
            found.setdefault((row["case"], row["pass"] == "both"), {})[row["side"], scaling, backward] = row
    return found


def beside(rows: Sequence[Mapping[str, str]]) -> Speeds:
    """Of bench_select.py: forward, and forward with backward, by case and side."""
    microseconds: dict[tuple[str, str], dict[str, float]] = {}
    flops: dict[tuple[str, str], float] = {}
    for row in rows:
        if row.get("p50_us"):
            key = (row["case"], row["pass"])
            microseconds.setdefault(key, {})[row["side"]] = float(row["p50_us"])
            flops[key] = float(row["p50_us"]) * float(row["tflops"])
    found: Speeds = {}
    for (case, which), sides in microseconds.items():
        if which != "forward":
            continue
        found[case, False] = {(side, "", ""): flops[case, which] / took for side, took in sides.items()}
        backward = microseconds.get((case, "backward"), {})
        total = flops[case, which] + flops.get((case, "backward"), 0.0)
        found[case, True] = {
            (side, "", ""): total / (took + backward[side]) for side, took in sides.items() if side in backward
        }
    return found


def rows_of(fp8: Sequence[Mapping[str, str]], select: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Rows of fp8_speed.TABLE."""
    facts = {row["case"]: row for row in fp8}
    others, shapes = beside(select), {_shape(row): row["case"] for row in select}
    found = []
    for (case, training), of_case in measured(fp8).items():
        speeds = {key: float(row["tflops"]) for key, row in of_case.items()}
        merged = speeds
        other = others.get((shapes.get(_shape(facts[case]), case), training), {})
        base = (bench_fp8.BASELINE, "", "")
        if base in other and base in speeds:
            share = speeds[base] / other[base]
            placed = {(name, "", ""): other[name, "", ""] * share for name in OTHERS if (name, "", "") in other}
            merged = placed | speeds
        first, last = HEAD_DIMS[int(facts[case]["head_dim"])]
        keys = int(facts[case]["pairs"]) / (int(facts[case]["batch"]) * int(facts[case]["seqlen"]))
        for key, tflops in merged.items():
            lowering, scaling, backward = key
            found.append(
                {
                    "lowering": lowering,
                    "mask": case.split("_")[0],
                    "head_dim_from": str(first),
                    "head_dim_to": str(last),
                    "seqlen": facts[case]["seqlen"],
                    "keys": f"{keys:.1f}",
                    "grouped": "no" if facts[case]["heads_q"] == facts[case]["heads_kv"] else "yes",
                    "training": "yes" if training else "no",
                    "scaling": scaling,
                    "backward": backward,
                    "tflops": f"{tflops:.0f}",
                    "since": of_case.get(key, facts[case])["date"],
                    "case": case,
                }
            )
    return found


def _shape(row: Mapping[str, str]) -> tuple[str, ...]:
    """What makes two cases the same, whatever they are called."""
    sizes = ("batch", "heads_q", "heads_kv", "seqlen", "head_dim", "head_dim_v", "pairs")
    return row["case"].split("_")[0], *(row.get(name, row["case"]) for name in sizes)


@command(__doc__)
def main(_: Namespace) -> None:
    """Write the file anew."""
    select = select_rows.joined(select_rows.read(), select_rows.read(select_rows.LATER))
    rows = rows_of(harness.read(bench_fp8.RESULTS, missing_ok=True), select)
    harness.write(fp8_speed.TABLE.path, fp8_speed.TABLE.columns, rows, lineterminator="\r\n")


if __name__ == "__main__":
    sys.exit(main())
