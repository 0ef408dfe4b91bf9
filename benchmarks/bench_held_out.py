"""On a GPU, our backend beside Inductor's own on models that nothing here was tuned for, drawn by a rule.

    python -m benchmarks.bench_held_out --budget-seconds 540 --jobs 8

The rule. Candidates are the models that people download now (tests/hf/today, docs/models.md), where they have real sizes. Left out are the
architectures that a benchmark of whole models times already, since choices were measured with those. Of the rest the DRAWN whose names have
the smallest SHA-256 are held out: nobody picked one. Each is timed in inference and in training, as its calls are there. What these rows
say changes no choice, no tile and no table; they are measured again for each release.

Measured as bench_h200.py measures. Models of diffusers want diffusers, the newest ones a new transformers; one that can't be made is a row
with the failure. What the budget leaves out is done by a later run with --append. Writes benchmarks/results/held_out_h200.csv, and prints a
table, the geometric mean and the slowest case. Exits with 1 where a result is wrong, or where the profiler saw another attention kernel
than the report names. A case that is slower is no failure: to find those is what this is for.
"""

from __future__ import annotations

import dataclasses
import hashlib
import statistics
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from benchmarks import bench_h200, harness, models
from benchmarks.compare import Case
from benchmarks.harness import Bench, Row, arg
from tests.hf.today.every import MODEL, MODELS
from tests.hf.today.model import VOCAB, Call, Model

KEYS = ("model", "call")
#: how many models
DRAWN = 24
#: what makes a model (its config, or its class in diffusers), where a result of another benchmark has it: the file of benchmarks/results
TIMED: Mapping[str, str] = {
    **{family.config: "h200.csv" for family in models.FAMILIES.values()}, "DeepseekV3Config": "first_step_h200.csv",
    "Gemma3TextConfig": "first_step_h200.csv", "ModernBertConfig": "unpad_h200.csv",
    "SD3Transformer2DModel": "first_step_h200.csv", "XLMRobertaConfig": "unpad_h200.csv",
}  # fmt: skip
#: a step of decoding has a benchmark of its own
_NOT_TIMED = "decode with a cache"


def architecture(model: Model) -> str:
    """The name of its config, or of its class in diffusers."""
    return getattr(model.make, "config", "") or str(getattr(model.make, "model", ""))


def drawn() -> tuple[Model, ...]:
    """The models that are held out, in the order of their hashes."""
    found = [model for model in MODELS if model.device == "meta" and architecture(model) not in TIMED]
    return tuple(sorted(found, key=lambda model: hashlib.sha256(model.name.encode()).hexdigest())[:DRAWN])


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """One call of one model. model, call: as in docs/models.csv."""

    model: str
    call: str

    @property
    def names(self) -> dict[str, str]:
        return {"model": self.model, "call": self.call}

    #: of our side
    options = None

    def case(self, _size: models.Size, device: str) -> Case:
        """On a device, in bfloat16, at its only size. Raises tests.hf.packages.Unavailable where its package is missing."""
        model = MODEL[self.model]
        call = next(call for call in model.calls if call.name == self.call)
        built = dataclasses.replace(model, device=device).build().train(call.training)
        given = arguments(built, call, device)
        return Case(
            model=built,
            inputs=given,
            device=device,
            training=call.training,
            valid=given["attention_mask"].bool() if "input_ids" in given else None,
        )


def plan() -> list[HeldOut]:
    """Every case: of each model, inference and training."""
    return [
        HeldOut(model=model.name, call=call.name)
        for model in drawn()
        for call in model.calls
        if call.name != _NOT_TIMED
    ]


def arguments(model: nn.Module, call: Call, device: str) -> dict[str, Any]:
    """A call's arguments with random tokens and numbers, and with padding as benchmarks/models.py has it: on the left of a prompt.

    Labels are left out: what goes back is the same product with noise as in the other benchmarks.
    """
    generator = torch.Generator().manual_seed(0)

    def filled(path: Any, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        name = str(getattr(path[0], "key", ""))
        return _filled(name, value, generator, left="prefill" in call.name).to(device)

    given = {name: value for name, value in call.inputs(model).items() if name != "labels"}
    found: dict[str, Any] = pytree.tree_map_with_path(filled, given)
    return found


def _filled(name: str, value: torch.Tensor, generator: torch.Generator, *, left: bool) -> torch.Tensor:
    if name.endswith("mask"):
        return models.padding_mask(value.shape[0], value.shape[1], left=left).to(value.dtype)
    if name.endswith("input_ids"):
        return torch.randint(3, VOCAB, value.shape, generator=generator)
    if value.is_floating_point() and not name.endswith("_ids"):
        return torch.randn(value.shape, generator=generator).to(value.dtype)
    return value.to("cpu") if value.device.type != "meta" else torch.ones(value.shape, dtype=value.dtype)


def summed_up(rows: Sequence[Row]) -> str:
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


def rows(cases: Sequence[HeldOut], given: Namespace) -> harness.Measured:
    """As of other models; each has an attention."""
    for case, found in zip(cases, bench_h200.rows(cases, given), strict=False):
        yield found or [{**case.names, "failure": "it has no such attention"}]


def print_table(rows: Sequence[Row]) -> None:
    harness.print_table(rows, (*KEYS, "lowerings"))
    print(summed_up(rows))


BENCH = Bench(
    doc=__doc__, results="held_out_h200.csv", columns=bench_h200.columns(KEYS, "graphs"),
    cases=lambda given: [case for case in plan() if case.model in given.models], rows=rows,
    sides=(harness.BASELINE, harness.BACKEND),
    options=(arg("--models", nargs="+", default=[model.name for model in drawn()]),), seconds=1.0, budget=540.0,
    jobs=True, where=bench_h200.where, short=(*KEYS, *bench_h200.SHORT), table=print_table,
    failed=lambda rows: any(row.get("pinned") == "NO" or row.get("numerics") == "WRONG" for row in rows),
)  # fmt: skip
main = harness.run(BENCH)

if __name__ == "__main__":
    sys.exit(main())
