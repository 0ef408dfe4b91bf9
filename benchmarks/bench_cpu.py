"""On a CPU, our backend beside Inductor's own: a real sentence model on a padded batch, and a small Llama, sdpa and eager.

python -m benchmarks.bench_cpu Exits with 1 where a side is slower beyond noise or a result is wrong.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from benchmarks import compare, harness, models
from benchmarks.compare import Case
from benchmarks.harness import Bench, Row, arg
from examples.quickstart import load_minilm, sentences

KEYS = ("model", "implementation", "scenario", "dtype", "inputs")


@dataclass(frozen=True, kw_only=True)
class OnCpu(harness.Named):
    """model: all-MiniLM-L6-v2 with its own weights, on 32 sentences padded to the longest; or the registry's small Llama."""

    model: str
    implementation: str
    scenario: str

    def case(self) -> Case:
        if self.model == "MiniLM-L6-v2":
            tokenizer, model = load_minilm(attn_implementation=self.implementation)
            batch = dict(tokenizer(sentences(32), padding=True, return_tensors="pt"))
            return Case(model=model, inputs=batch, valid=batch["attention_mask"].bool())
        way = models.SCENARIOS[self.scenario]
        model = models.build("llama", "small", self.implementation).train(way.training)
        return Case(model=model, inputs=models.example_inputs("llama", "small", way), training=way.training)


CASES = tuple(
    OnCpu(model=model, implementation=implementation, scenario=scenario)
    for implementation in ("sdpa", "eager")
    for model, scenario in (("MiniLM-L6-v2", "padded batch"), ("llama small", "prefill"), ("llama small", "train"))
)


def measure(which: OnCpu, given: Namespace) -> Iterator[Row]:
    case = which.case()
    shape = " x ".join(str(n) for n in case.inputs["input_ids"].shape)
    further = {"dtype": str(next(case.model.parameters()).dtype).removeprefix("torch."), "inputs": shape}
    row = compare.compare(case, compare.compile_both(case), seconds=given.seconds, clock=given.clock)
    yield {**which.names, **further, **row}


BENCH = Bench(
    doc=__doc__, results="cpu.csv", columns=(*KEYS, *compare.COLUMNS), cases=lambda given: CASES, measure=measure,
    options=(
        arg("--threads", type=int, default=torch.get_num_threads(), help="threads of a kernel"),
        arg(
            "--clock",
            choices=("wall", "process"),
            default="wall",
            help="process: the process's own time, of one thread",
        ),
    ),
    devices=("cpu",), seconds=20.0,
    where=lambda given: {**harness.environment("cpu", given.commit), "clock": given.clock},
    short=("model", "implementation", "scenario", "ratio", "numerics"),
    begin=lambda given: torch.set_num_threads(given.threads),
    table=lambda rows: harness.print_table(rows, (*KEYS[:3], "lowerings")), failed=harness.failures,
)  # fmt: skip
main = harness.run(BENCH)

if __name__ == "__main__":
    sys.exit(main())
