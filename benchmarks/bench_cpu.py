"""On a CPU, our backend beside Inductor's own: a real sentence model on a padded batch, and a small Llama, sdpa and eager.

    python -m benchmarks.bench_cpu

Writes benchmarks/results/cpu.csv and prints a table. Exits with 1 where a side is slower beyond noise or a result is wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from benchmarks import compare, harness, inputs, models
from benchmarks.compare import Case
from examples.quickstart import load_minilm, sentences

RESULTS = Path(__file__).parent / "results" / "cpu.csv"
KEYS = ("model", "implementation", "scenario", "dtype", "inputs")


def minilm(implementation: str) -> Case:
    """all-MiniLM-L6-v2 with its own weights, on 32 sentences of English prose padded to the longest."""
    tokenizer, model = load_minilm(attn_implementation=implementation)
    batch = dict(tokenizer(sentences(32), padding=True, return_tensors="pt"))
    return Case(model=model, inputs=batch, valid=batch["attention_mask"].bool())


def llama(implementation: str, scenario: str) -> Case:
    """The registry's small Llama, random weights."""
    way = inputs.SCENARIOS[scenario]
    model = models.build("llama", "small", implementation).train(way.training)
    return Case(model=model, inputs=inputs.example_inputs("llama", "small", way), training=way.training)


def cases() -> Iterator[tuple[Mapping[str, str], Case]]:
    """Every case with the columns that name it."""
    for implementation in ("sdpa", "eager"):
        yield _named("MiniLM-L6-v2", implementation, "padded batch", minilm(implementation))
        for scenario in ("prefill", "train"):
            yield _named("llama small", implementation, scenario, llama(implementation, scenario))


def _named(model: str, implementation: str, scenario: str, case: Case) -> tuple[Mapping[str, str], Case]:
    shape = " x ".join(str(n) for n in case.inputs["input_ids"].shape)
    dtype = str(next(case.model.parameters()).dtype).removeprefix("torch.")
    return dict(zip(KEYS, (model, implementation, scenario, dtype, shape), strict=True)), case


def main() -> int:
    """Measure every case; 0 where none is slower or wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="timing of one case (default %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of a kernel")
    parser.add_argument(
        "--clock",
        choices=("wall", "process"),
        default="wall",
        help="process: the process's own time, steadier on a busy machine; of use with one thread (default %(default)s)",
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="the commit to name in the rows, where this is no checkout")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    where = harness.environment("cpu", options.commit)
    where["clock"] = options.clock
    file = harness.CsvFile(options.output, [*KEYS, *compare.COLUMNS, *where])
    for names, case in cases():
        print("measuring", *names.values(), flush=True)
        row = compare.compare(case, compare.compile_both(case), seconds=options.seconds, clock=options.clock)
        file.add({**names, **row, **where})
    harness.print_table(file.rows, (*KEYS[:3], "lowerings"))
    return harness.failures(file.rows)


if __name__ == "__main__":
    sys.exit(main())
