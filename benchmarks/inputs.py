"""Ways to call a model of the registry, and the inputs of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.models import FAMILIES, Size


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
