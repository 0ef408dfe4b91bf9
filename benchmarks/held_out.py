"""Models that nothing here was tuned for, drawn by a rule, and what they are called with.

The rule. Candidates are the models that people download now (tests/hf/today, docs/models.md), where they have real sizes. Left out are the
architectures that a benchmark of whole models times already, since choices were measured with those. Of the rest the DRAWN whose names have
the smallest SHA-256 are held out: nobody picked one. Each is timed in inference and in training, as its calls are there. What these
rows say changes no choice, no tile and no table; they are measured again for each release.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from benchmarks import inputs, models
from benchmarks.compare import Case
from tests.hf.today.every import MODEL, MODELS
from tests.hf.today.model import VOCAB, Call, Model

#: how many models
DRAWN = 24
#: what makes a model (its config, or its class in diffusers), where a result of another benchmark has it: the file of benchmarks/results
TIMED: Mapping[str, str] = {
    **{family.config: "h200.csv" for family in models.FAMILIES.values()},
    "DeepseekV3Config": "first_step_h200.csv",
    "Gemma3TextConfig": "first_step_h200.csv",
    "ModernBertConfig": "unpad_h200.csv",
    "SD3Transformer2DModel": "first_step_h200.csv",
    "XLMRobertaConfig": "unpad_h200.csv",
}
#: a step of decoding has a benchmark of its own
_NOT_TIMED = "decode with a cache"


def architecture(model: Model) -> str:
    """The name of its config, or of its class in diffusers."""
    return getattr(model.make, "config", "") or str(getattr(model.make, "model", ""))


def drawn() -> tuple[Model, ...]:
    """The models that are held out, in the order of their hashes."""
    found = [model for model in MODELS if model.device == "meta" and architecture(model) not in TIMED]
    return tuple(sorted(found, key=lambda model: hashlib.sha256(model.name.encode()).hexdigest())[:DRAWN])


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """One call of one model. model, call: as in docs/models.csv."""

    model: str
    call: str
    forced: str = ""

    @property
    def words(self) -> str:
        return f"{self.model}/{self.call}"

    @property
    def names(self) -> dict[str, str]:
        return {"model": self.model, "call": self.call}

    @property
    def options(self) -> None:
        """Of our side: none."""
        return None

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
    """A call's arguments with random tokens and numbers, and with padding as benchmarks/inputs.py has it: on the left of a prompt.

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
        return inputs.padding_mask(value.shape[0], value.shape[1], left=left).to(value.dtype)
    if name.endswith("input_ids"):
        return torch.randint(3, VOCAB, value.shape, generator=generator)
    if value.is_floating_point() and not name.endswith("_ids"):
        return torch.randn(value.shape, generator=generator).to(value.dtype)
    return value.to("cpu") if value.device.type != "meta" else torch.ones(value.shape, dtype=value.dtype)
