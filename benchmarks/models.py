"""Shapes of real models as data, what makes a model out of a row, ways to call it, and the inputs of each.

A `Family` names a configuration and a model class of transformers, and holds one set of their arguments a size: "full" is the real model's
width (with fewer layers, which all look alike), "small" runs on two CPU cores. Weights are random, from a fixed seed. To add a model: a
table in models.toml.
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


def whisper(width: int, inner: int, layers: int, heads: int, frames: int, text: int) -> dict[str, Any]:
    """Arguments of a small Whisper's configuration."""
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
            config = whisper(*numbers)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """One way to call a model. use_cache: a decoder also fills and returns its key-value cache, as generation's first step does.
    checkpointed: layers are computed again in the backward."""

    name: str
    training: bool = False
    padded: bool = False
    use_cache: bool = False
    checkpointed: bool = False


SCENARIOS: Mapping[str, Scenario] = {
    s.name: s
    for s in (
        Scenario(name="prefill"),
        Scenario(name="prefill_padded", padded=True),
        Scenario(name="prefill_cache", use_cache=True),
        Scenario(name="train", training=True),
        Scenario(name="train_padded", training=True, padded=True),
        Scenario(name="train_checkpointed", training=True, checkpointed=True),
    )
}


def applies(name: str, scenario: Scenario) -> bool:
    """Whether the family can be called that way: only text has padding here, only a decoder has a cache of its own."""
    kind = FAMILIES[name].inputs
    return not (scenario.padded and kind in ("image", "patches", "audio")) and not (
        scenario.use_cache and kind != "decoder"
    )


def example_inputs(
    name: str, size: Size, scenario: Scenario, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
) -> dict[str, Any]:
    """Keyword arguments for `build(name, size, …)`: the same seed gives the same values on every device."""
    family = FAMILIES[name]
    shape = family.sizes[size]
    batch = max(1, shape.batch // 2) if scenario.training else shape.batch
    generator = torch.Generator().manual_seed(seed)

    def tokens(seqlen: int) -> torch.Tensor:
        return torch.randint(3, 1000, (batch, seqlen), generator=generator).to(device)

    inputs: dict[str, Any]
    if family.inputs == "image":
        side = shape.config["image_size"]
        inputs = {"pixel_values": torch.randn(batch, 3, side, side, generator=generator).to(device, dtype)}
    elif family.inputs == "patches":
        # Images of as many patches each, in one row after another, two frames of each patch.
        side = int(shape.seqlen**0.5)
        patches = torch.randn(batch * side * side, 3 * 2 * 16 * 16, generator=generator)
        inputs = {
            "hidden_states": patches.to(device, dtype),
            "grid_thw": torch.tensor([[1, side, side]] * batch).to(device),
        }
    elif family.inputs == "audio":
        inputs = {
            "input_features": torch.randn(batch, 80, shape.seqlen, generator=generator).to(device, dtype),
            "decoder_input_ids": tokens(shape.config["max_target_positions"]),
            "use_cache": False,
        }
    elif family.inputs == "text2text":
        inputs = {"input_ids": tokens(shape.seqlen), "decoder_input_ids": tokens(shape.seqlen), "use_cache": False}
    else:
        inputs = {"input_ids": tokens(shape.seqlen)}
        if family.inputs == "decoder":
            inputs["use_cache"] = scenario.use_cache
    if scenario.padded:
        inputs["attention_mask"] = padding_mask(batch, shape.seqlen, left=family.inputs == "decoder").to(device)
    return inputs


def padding_mask(batch: int, seqlen: int, *, left: bool) -> torch.Tensor:
    """int64 (batch, seqlen), 1 for a real token: lengths fall evenly from seqlen to about half of it. left: padding comes first."""
    lengths = seqlen - torch.arange(batch) * (seqlen // 2) // max(1, batch)
    mask = (torch.arange(seqlen)[None, :] < lengths[:, None]).long()
    return mask.flip(-1) if left else mask
