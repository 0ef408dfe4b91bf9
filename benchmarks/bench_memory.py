"""What `attn_compiler.compare` says of the models in the README: first step, time and peak memory, beside Inductor and uncompiled.

    python -m benchmarks.bench_memory                                     # on a GPU
    python -m benchmarks.bench_memory --size small --device cpu --output /tmp/compared.csv

One model after another in one process, nothing on disk, compiled for the sizes of the case. `held` is what was allocated before a step
(weights and inputs), `peak` the most during one. What a dense mask and repeated K and V take is in the difference of two peaks.
Writes benchmarks/results/memory_h200.csv. Exits with 1 where a side failed.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import attn_compiler
from benchmarks import bench_h200, compare, harness, inputs, models
from benchmarks.bench_h200 import Measured

RESULTS = Path(__file__).parent / "results" / "memory_h200.csv"
CASES = (
    "gpt_oss/eager/prefill_padded",
    "llama/sdpa/prefill_padded",
    "llama/sdpa/train_padded",
    "gemma2/sdpa/prefill_padded",
    "t5/sdpa/train_padded",
    "vit/sdpa/train",
    "bert/sdpa/prefill_padded",
)
KEYS = ("model", "implementation", "scenario")
SIDES = ("eager", "inductor", "attn_compiler")
_OF_A_SIDE = ("first_s", "p50_ms", "held_mib", "peak_mib", "outputs_apart", "gradients_apart")
COLUMNS = ("gain", "lowerings", *(f"{side}_{name}" for side in SIDES for name in _OF_A_SIDE), "failure")


def row_of(found: attn_compiler.Comparison) -> dict[str, str]:
    """COLUMNS of a comparison; "" for what is not known, as memory on a CPU. Memory in MiB, how far a side is from eager as the largest
    difference of any element."""
    row = {
        "gain": "" if found.gain is None else f"{found.gain:.3f}",
        "lowerings": compare.chosen(list(found.reports))["lowerings"],
        "failure": "; ".join(f"{side.name}: {side.failure}" for side in found.sides if side.failure)[:300],
    }
    for side in found.sides:
        values = (
            None if side.first_seconds is None else f"{side.first_seconds:.1f}",
            None if side.milliseconds is None else f"{side.milliseconds[1]:.4g}",
            None if side.held_bytes is None else f"{side.held_bytes / 2**20:.0f}",
            None if side.peak_bytes is None else f"{side.peak_bytes / 2**20:.0f}",
            None if side.outputs is None else f"{side.outputs.largest:.3g}",
            None if side.gradients is None else f"{side.gradients.largest:.3g}",
        )
        row |= {f"{side.name}_{name}": value or "" for name, value in zip(_OF_A_SIDE, values, strict=True)}
    return row


def measure(words: str, size: models.Size, device: str, seconds: float) -> attn_compiler.Comparison:
    """One case by its name, "llama/sdpa/prefill_padded"."""
    family, implementation, scenario = words.split("/")
    case = Measured(family=family, implementation=implementation, scenario=inputs.SCENARIOS[scenario]).case(
        size, device
    )
    comparer = attn_compiler.comparer(training=case.training, seconds=seconds, dynamic=False)
    return comparer(case.model, **case.inputs)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare each, print what a user sees, and write the rows; 0 where no side failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--size", choices=("full", "small"), default="full")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seconds", type=float, default=3.0, help="timing of one case (default %(default)s)")
    parser.add_argument("--budget-seconds", type=float, default=300.0, help="begin no case after this (%(default)s)")
    parser.add_argument("--append", action="store_true", help="keep the rows of the file and measure only the others")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="the commit to name in the rows, where this is no checkout")
    options = parser.parse_args(argv)
    start = time.monotonic()
    where = harness.environment(options.device, options.commit) | {"extras": bench_h200.extras()}
    file = harness.CsvFile(options.output, [*KEYS, *COLUMNS, *where], append=options.append)
    done = {"/".join(row[key] for key in KEYS) for row in file.rows}
    for words in (words for words in options.cases if words not in done):
        if time.monotonic() - start > options.budget_seconds:
            print(f"{words} and what follows are left for a run with --append")
            break
        found = measure(words, options.size, options.device, options.seconds)
        print(words, found, "", sep="\n", flush=True)
        file.add({**dict(zip(KEYS, words.split("/"), strict=True)), **row_of(found), **where})
        gc.collect()
        if options.device != "cpu":
            torch.cuda.empty_cache()
    return int(any(row["failure"] for row in file.rows))


if __name__ == "__main__":
    sys.exit(main())
