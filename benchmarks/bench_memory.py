"""What `attn_compiler.compare` says of the models in the README: first step, time and peak memory, beside Inductor and uncompiled.

    python -m benchmarks.bench_memory                                     # on a GPU
    python -m benchmarks.bench_memory --size small --device cpu --output /tmp/compared.csv

One model after another in one process, nothing on disk, compiled for the sizes of the case. `held` is what was allocated before a step
(weights and inputs), `peak` the most during one. What a dense mask and repeated K and V take is in the difference of two peaks. Exits with
1 where a side failed.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator

import attn_compiler
from benchmarks import bench_h200, compare, harness, models
from benchmarks.bench_h200 import Measured
from benchmarks.harness import Bench, Row, arg

CASES = (
    "gpt_oss/eager/prefill_padded llama/sdpa/prefill_padded llama/sdpa/train_padded gemma2/sdpa/prefill_padded "
    "t5/sdpa/train_padded vit/sdpa/train bert/sdpa/prefill_padded"
).split()
SIDES = ("eager", "inductor", "attn_compiler")
_OF_A_SIDE = ("first_s", "p50_ms", "held_mib", "peak_mib", "outputs_apart", "gradients_apart")
COLUMNS = ("gain", "lowerings", *(f"{side}_{name}" for side in SIDES for name in _OF_A_SIDE), "failure")


class Compared(Measured):
    """A case that `attn_compiler.compare` measures, called "llama/sdpa/prefill_padded"."""

    @classmethod
    def read(cls, words: str) -> Compared:
        family, implementation, scenario = words.split("/")
        return cls(family=family, implementation=implementation, scenario=models.SCENARIOS[scenario])

    @property
    def names(self) -> dict[str, str]:
        return {"model": self.family, "implementation": self.implementation, "scenario": self.scenario.name}


def row_of(found: attn_compiler.Comparison) -> dict[str, str]:
    """COLUMNS of a comparison; "" for what is not known, as memory on a CPU. Memory in MiB, how far a side is from eager as the largest
    difference of any element."""

    def said(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    row = {
        "gain": said(found.gain, ".3f"),
        "lowerings": compare.chosen(list(found.reports))["lowerings"],
        "failure": "; ".join(f"{side.name}: {side.failure}" for side in found.sides if side.failure)[:300],
    }
    for side in found.sides:
        held, peak = (None if x is None else x / 2**20 for x in (side.held_bytes, side.peak_bytes))
        apart = (None if x is None else x.largest for x in (side.outputs, side.gradients))
        p50 = None if side.milliseconds is None else side.milliseconds[1]
        values = (side.first_seconds, p50, held, peak, *apart)
        forms = (".1f", ".4g", ".0f", ".0f", ".3g", ".3g")
        row |= {f"{side.name}_{name}": said(*pair) for name, *pair in zip(_OF_A_SIDE, values, forms, strict=True)}
    return row


def compared(which: Compared, given: Namespace) -> attn_compiler.Comparison:
    """What a user sees of one case."""
    case = which.case(given.size, given.device)
    comparer = attn_compiler.comparer(training=case.training, seconds=given.seconds, dynamic=False)
    return comparer(case.model, **case.inputs)


def measure(which: Compared, given: Namespace) -> Iterator[Row]:
    found = compared(which, given)
    print(which.words, found, "", sep="\n", flush=True)
    yield {**which.names, **row_of(found)}


BENCH = Bench(
    doc=__doc__, results="memory_h200.csv", columns=("model", "implementation", "scenario", *COLUMNS),
    cases=lambda given: map(Compared.read, given.cases), measure=measure, sides=SIDES,
    options=(arg("--cases", nargs="+", default=CASES),), seconds=3.0, budget=300.0, sized=True,
    where=bench_h200.where, short=("gain", "failure"),
)  # fmt: skip
main = harness.run(BENCH)

if __name__ == "__main__":
    sys.exit(main())
