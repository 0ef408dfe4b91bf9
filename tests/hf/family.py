"""One row of the survey: how to build a tiny model of a family, what to feed it, and how many attention sites it has."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.hf.packages import import_package

VOCAB = 99
SEED = 20_261

Kwargs = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Size:
    """Batch size and sequence length (tokens) of one call."""

    batch: int = 2
    seqlen: int = 13


@dataclass(frozen=True, kw_only=True)
class Uncaptured:
    """sites: how many attentions of one run Dynamo leaves to Python. why: what in the model makes it."""

    sites: int
    why: str


@dataclass(frozen=True, kw_only=True)
class Family:
    """build(impl): the model in fp32 with dropout as its config says. impl: an attention implementation's name, see `impls`.

    inputs(size): keyword arguments of the model's forward, without a padding mask.
    mask: the keyword that takes a (B, S) padding mask, "" where the model has none. mask_true_is_padding: its polarity
    (torch.nn marks padding with True, HF marks real tokens with 1).
    sites: attention sites of one forward, by the family's own formula. sites_in: other numbers, by scenario.
    impls: the implementations it has. absent: scenario or implementation -> why the family does not have it.
    uncaptured: scenario -> attentions that never reach a backend, because Dynamo leaves their frame to Python.
    kind: "decoder" models generate from input_ids, "encoder_decoder" ones from decoder_input_ids.
    """

    name: str
    kind: str
    build: Callable[[str], nn.Module]
    inputs: Callable[[Size], Kwargs]
    sites: int
    mask: str = ""
    mask_true_is_padding: bool = False
    sites_in: Mapping[str, int] = field(default_factory=dict)
    impls: tuple[str, ...] = ("sdpa", "eager")
    absent: Mapping[str, str] = field(default_factory=dict)
    uncaptured: Mapping[str, Uncaptured] = field(default_factory=dict)

    def expected(self, scenario: str) -> int:
        """Sites of one forward in `scenario`."""
        return self.sites_in.get(scenario, self.sites)


def config_of(model: str) -> str:
    """The usual name of the config of a class in transformers."""
    return re.sub(r"(Model|For[A-Z]\w*|LMHeadModel|WithProjection)$", "", model) + "Config"


def hf_builder(model: str, settings: Mapping[str, Any], config: str = "") -> Callable[[str], nn.Module]:
    """A builder of `transformers.<model>` from its config (by default the usual one), randomly initialised."""

    def build(impl: str) -> nn.Module:
        transformers = import_package("transformers")
        cfg = getattr(transformers, config or config_of(model))(**settings)
        torch.manual_seed(SEED)
        built = getattr(transformers, model)._from_config(cfg, attn_implementation=impl)
        return spread_weights(built)

    return build


def spread_weights(model: nn.Module) -> nn.Module:
    """Draw every parameter so that attention scores are of order one; returns the model.

    A fresh model's weights (std 0.02) give almost uniform attention: a wrong scale or mask would hide below the tolerance.
    Norm weights keep their centre (1 in most, 0 where the model adds it), which is why vectors are only disturbed.
    """
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for param in model.parameters():
            noise = torch.randn(param.shape, generator=generator, dtype=torch.float32).to(param.dtype)
            if param.ndim >= 2:
                fan_in = param[0].numel()
                param.copy_(noise * fan_in**-0.5)
            else:
                param.add_(noise * 0.1)
    return model


_DROPOUT_ATTRIBUTES = frozenset(
    {
        "activation_dropout",
        "attention_dropout",
        "attn_dropout",
        "attn_dropout_p",
        "attn_pdrop",
        "attention_probs_dropout_prob",
        "dropout",
        "dropout_prob",
        "dropout_rate",
        "hidden_dropout",
        "resid_attn_dropout",
        "resid_mlp_dropout",
    }
)


def set_dropout(model: nn.Module, p: float) -> None:
    """Give every dropout of the model probability `p`: nn.Dropout modules, and the floats that HF reads from modules and configs."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = p
        for owner in (module, getattr(module, "config", None)):
            attributes = getattr(owner, "__dict__", {})
            for name in _DROPOUT_ATTRIBUTES & attributes.keys():
                if isinstance(attributes[name], float):
                    setattr(owner, name, p)


def token_ids(batch: int, seqlen: int, *, seed: int = 0, low: int = 3) -> torch.Tensor:
    """int64[batch, seqlen] of tokens in [low, VOCAB): the low ids are left to padding, start and end tokens."""
    generator = torch.Generator().manual_seed(SEED + seed)
    return torch.randint(low, VOCAB, (batch, seqlen), generator=generator)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    """float32 standard normal of `shape`, always the same for the same seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(SEED + seed))


def text_inputs(size: Size) -> Kwargs:
    return {"input_ids": token_ids(size.batch, size.seqlen)}
