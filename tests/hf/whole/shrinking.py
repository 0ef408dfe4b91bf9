"""Makes a config's model short by rules of names: a layer of each kind, few experts. Widths stay, for they decide which kernel there is."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

_LAYERS = re.compile(
    r"^(depth|layers|n_layers?|num_blocks|num_hidden_layers|num_layers|\w+_num_hidden_layers|encoder_layers|decoder_layers|[lxr]_layers|"
    r"num_(encoder|decoder|spatial|temporal|input|recurrent|output|attention|global)_layers|(encoder|decoder)_(num_layers|depth)|"
    r"\w+_(encoder|decoder)_layers|num_\w+_layers|\w+_num_layers|n_(input|recurrent|output)_layers)$"
)
#: numbers of layers that are not a model's own, or that shapes rest on
_NOT_LAYERS = re.compile(
    r"conv|feat_extract|adapter|res_block|upscale|downsample|upsample|interleave|kv_shared|dense_layers|mlp_layers"
)
_EXPERTS = re.compile(r"^(num_experts|num_local_experts|n_routed_experts|moe_num_experts)$")
_CHOSEN = re.compile(
    r"^(num_experts_per_(tok|token)|moe_top_?k|top_k_experts|moe_k|experts_per_token|num_experts_per_token)$"
)
_MOST_EXPERTS, _MOST_CHOSEN = 8, 2
_WORDS, _MOST_WORDS = frozenset({"vocab_size", "vocab_size_per_layer_input"}), 512


def shrink(config: Any, *, few_words: bool) -> None:
    """In place, with every config inside of it. few_words: of a model whose parameters take memory."""
    for inner in _inside(config):
        shrink(inner, few_words=few_words)
    fields = vars(config)
    kinds = _kinds(fields)
    for name, value in list(fields.items()):
        if isinstance(value, int) and not isinstance(value, bool):
            if _LAYERS.match(name) and not _NOT_LAYERS.search(name):
                _set(config, name, min(value, len(kinds) or 1))
            elif _EXPERTS.match(name):
                _set(config, name, min(value, _MOST_EXPERTS))
            elif _CHOSEN.match(name):
                _set(config, name, min(value, _MOST_CHOSEN))
        elif name == "depths" and isinstance(value, (list, tuple)):
            # Every second block of Swin's stages is shifted.
            _set(config, name, type(value)(min(depth, 2) for depth in value))
        elif kinds and isinstance(value, list) and len(value) == _length(fields):
            _set(config, name, [value[index] for index in kinds])
        if few_words and name in _WORDS and isinstance(value, int):
            _set(config, name, min(value, _MOST_WORDS))
    if few_words and isinstance(pad := fields.get("pad_token_id"), int) and pad >= _MOST_WORDS:
        _set(config, "pad_token_id", 0)
    for name in ("n_group", "topk_group"):
        if isinstance(fields.get(name), int):
            _set(config, name, 1)


def _inside(config: Any) -> Iterator[Any]:
    from transformers import PreTrainedConfig

    yield from (value for value in vars(config).values() if isinstance(value, PreTrainedConfig))


def _length(fields: Any) -> int | None:
    return len(kinds) if isinstance(kinds := fields.get("layer_types"), list) else None


def _kinds(fields: Any) -> Sequence[int]:
    """Where the first layer of each kind is, those of experts and of none apart."""
    types = fields.get("layer_types")
    if not isinstance(types, list):
        return ()
    first: dict[Any, int] = {}
    for index, kind in enumerate(types):
        first.setdefault(kind, index)
    return tuple(first.values())


def _set(config: Any, name: str, value: Any) -> None:
    """Past the checks, which hold between fields that are not all set yet."""
    config.__dict__[name] = value
