"""One model of the table: how to build it, and the calls that people make of it.

A model has its real sizes, few layers, and no memory: its tensors are on the meta device, in bfloat16. One whose code reads numbers of its
inputs, such as the sizes of images, is tiny and on the CPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.hf.family import set_dropout
from tests.hf.packages import import_package

Kwargs = dict[str, Any]

VOCAB = 160
TOKENS: Mapping[str, Any] = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True, kw_only=True)
class Call:
    """inputs(model): the arguments. training: with gradients, in train mode. checkpoint: with gradient checkpointing, too."""

    name: str
    inputs: Callable[[Any], Kwargs]
    training: bool = False
    checkpoint: bool = False


@dataclass(frozen=True, kw_only=True)
class Model:
    """package, cls: the model's class. make(package): what the class is made of, and how. calls: in the order of the table.

    device: "meta" for real sizes, "cpu" for tiny ones.
    """

    name: str
    package: str
    make: Callable[[Any], nn.Module]
    calls: tuple[Call, ...]
    device: str = "meta"

    def build(self) -> nn.Module:
        """Without dropout. Raises Unavailable where the package is missing."""
        package = import_package(self.package)
        torch.manual_seed(0)
        with torch.device(self.device):
            model = self.make(package)
        # Some make a parameter on the CPU, whatever device is current.
        model = model.to(device=self.device, dtype=torch.bfloat16).eval()
        set_dropout(model, 0.0)
        return model


@dataclass(frozen=True, kw_only=True)
class FromConfig:
    """A model of transformers. model, config: names of classes. impl: its attention implementation. settings: of the config."""

    model: str
    config: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    impl: str = "sdpa"

    def __call__(self, package: Any) -> nn.Module:
        config = getattr(package, self.config)(**copy.deepcopy(dict(self.settings)))
        made: nn.Module = getattr(package, self.model)._from_config(config, attn_implementation=self.impl)
        return made


@dataclass(frozen=True, kw_only=True)
class FromArguments:
    """A model of diffusers."""

    model: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, package: Any) -> nn.Module:
        made: nn.Module = getattr(package, self.model)(**self.settings)
        return made


def zeros(model: nn.Module, *shape: int) -> torch.Tensor:
    """What a real model is called with: bfloat16 on its device."""
    return torch.zeros(shape, dtype=torch.bfloat16, device=next(model.parameters()).device)


def integers(model: nn.Module, *shape: int, value: int = 0) -> torch.Tensor:
    return torch.full(shape, value, dtype=torch.long, device=next(model.parameters()).device)
