"""Shapes of real models as data, and the function that makes a model out of a row.

A `Family` names a configuration and a model class of transformers, and holds one set of their arguments a size: "full" is the
real model's width (with fewer layers, which all look alike), "small" runs on two CPU cores. Weights are random, from a fixed seed.
To add a model: a table in models.toml.
"""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

Size = Literal["full", "small"]
#: an `attn_implementation` that only reads q, k and v and writes as much as attention does: what is left is the rest of the model
NOTHING = "nothing"
Inputs = Literal["decoder", "encoder", "image", "patches", "audio", "text2text"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The inputs of one size: batch of a forward (a training step takes half), seqlen in tokens or mel frames, arguments of the config."""

    batch: int
    seqlen: int
    config: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One model family.

    shared: arguments of the configuration in every size.
    softcap: attention scores go through tanh. SDPA has none: with it, such a family has other numbers, or no such implementation.
    sinks: the softmax has them. SDPA has none either.
    implementations: those of its attention, if not all.
    """

    name: str
    config: str
    model: str
    inputs: Inputs
    sizes: Mapping[Size, Shape]
    shared: Mapping[str, Any] = field(default_factory=dict)
    softcap: bool = False
    sinks: bool = False
    implementations: tuple[str, ...] | None = None


_ENCODER = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_DECODER = (*_ENCODER, "num_key_value_heads", "head_dim")


def _whisper(width: int, inner: int, layers: int, heads: int, frames: int, text: int) -> dict[str, Any]:
    sides = {"layers": layers, "attention_heads": heads, "ffn_dim": inner}
    both = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in sides.items()}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "vocab_size": 1024}
    # The encoder's convolution halves the frames.
    return {"d_model": width, **both, "max_source_positions": frames // 2, "max_target_positions": text, **tokens}


def _shape(given: dict[str, Any]) -> Shape:
    config: dict[str, Any] = {}
    match given:
        case {"decoder": numbers}:
            config = dict(zip(_DECODER, numbers, strict=True)) | {"max_position_embeddings": 8192, "vocab_size": 1024}
        case {"encoder": numbers}:
            config = dict(zip(_ENCODER, numbers, strict=True))
        case {"whisper": numbers}:
            config = _whisper(*numbers)
    return Shape(batch=given["batch"], seqlen=given["seqlen"], config=config | given.get("config", {}))


def read(name: str) -> Mapping[str, dict[str, Any]]:
    """The tables of a file beside this one."""
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


def _family(name: str, *, sizes: dict[Size, Any], implementations: Any = None, **given: Any) -> Family:
    shapes = {size: _shape(of_size) for size, of_size in sizes.items()}
    return Family(name=name, sizes=shapes, implementations=implementations and tuple(implementations), **given)


FAMILIES: Mapping[str, Family] = {name: _family(name, **given) for name, given in read("models.toml").items()}


def is_known(name: str) -> bool:
    """Whether the installed transformers has the family's model."""
    import transformers

    return hasattr(transformers, FAMILIES[name].model)


def build(
    name: str,
    size: Size,
    attn_implementation: str,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> nn.Module:
    """The model of a family with random weights, in eval mode. The weights are drawn on `device`, so they differ from one to another.

    Raises KeyError for an unknown family or size, and transformers' own ValueError where the family has no such
    `attn_implementation` ("sdpa", "eager", "flex_attention" or NOTHING; Bloom has only the second).
    """
    import transformers

    transformers.AttentionInterface.register(NOTHING, nothing)

    family = FAMILIES[name]
    # Nested dicts of a config (rope) are changed in place by transformers: FAMILIES must stay as it is.
    arguments = copy.deepcopy({**family.shared, **family.sizes[size].config})
    config = getattr(transformers, family.config)(attn_implementation=attn_implementation, **arguments)
    with torch.random.fork_rng(devices=[] if device in ("cpu", "meta") else [device]), torch.device(device):
        torch.manual_seed(seed)
        model: nn.Module = getattr(transformers, family.model)(config)
    return model.to(dtype=dtype).eval()


def nothing(
    _module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: Any, **_: Any
) -> tuple[torch.Tensor, None]:
    """NOTHING for transformers: q + k + v in place of attention. q, k, v: (batch, heads, seqlen, head_dim), of k and v maybe fewer heads,
    and another seqlen. Returns (batch, seqlen_q, heads_q, head_dim) and no weights."""
    both = key + value
    missing = query.shape[2] - both.shape[2]
    both = nn.functional.pad(both, (0, 0, 0, missing)) if missing > 0 else both[:, :, : query.shape[2]]
    groups = query.shape[1] // both.shape[1]
    grouped = torch.unflatten(query, 1, (both.shape[1], groups)) + both.unsqueeze(2)
    return grouped.flatten(1, 2).transpose(1, 2).contiguous(), None
