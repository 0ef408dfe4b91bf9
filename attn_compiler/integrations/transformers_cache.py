"""A cache of keys and values for `generate` of transformers that ranks share: each keeps its part of the positions.

cache = ShardedCache(model.config, cp, max_cache_len=4096)
model.generate(ids, past_key_values=cache, do_sample=False, disable_compile=True)   # on every rank, with the same ids

A layer gives attention the keys of all ranks, so the model is right without a compiler: they are gathered in each call, for one layer at
a time. Compiled with options={"context_parallel": cp}, each rank attends to its own, and the ranks merge what they have.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import StaticLayer, get_layer_types_and_kwargs

from attn_compiler.context_parallel import ContextParallel, collectives as torch_collectives, slots
from attn_compiler.reasons.errors import ContextParallelUnsupported

_FULL = "full_attention"


class ShardedLayer(StaticLayer):  # type: ignore[no-untyped-call]
    """One layer. Lengths and positions are those of the whole sequence; `keys` and `values` have this rank's slots."""

    def __init__(self, cp: ContextParallel, max_cache_len: int, *, is_first: bool) -> None:
        self._slots = slots.count(max_cache_len, cp.size)
        super().__init__(max_cache_len=self._slots)
        self._size, self._group, self._is_first = cp.size, cp.group_name, is_first
        # Read by transformers: the capacity for the whole sequence.
        self._whole = self._slots * cp.size

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Initialise as a static layer. Store this rank's number as a tensor, so that compiled code reads an input and asks no group."""
        super().lazy_initialization(key_states, value_states)
        rank = torch_collectives.sequence_rank(self.cumulative_length, self._group)
        self._rank = rank.to(torch.int64)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keep this rank's positions of new keys and values, and return those of all ranks."""
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise _refused(
                "keys in a cache have no gradients",
                "keys that want one",
                "decode under torch.no_grad(), as generate does",
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self._is_first:
            key_states = torch_collectives.same_on_ranks(key_states, self._size, self._group)
        own: tuple[Any, Any] = (self.keys, self.values)
        slots.write(own, (key_states, value_states), self.cumulative_length, self._size, self._rank)
        self.cumulative_length.add_(key_states.shape[-2])
        keys, values = (torch_collectives.keys_of_slots(kept, self._size, self._group) for kept in own)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys that attention sees, and the position of the first."""
        return self._whole, 0

    def get_max_length(self) -> int:
        """Return the number of positions that all ranks hold."""
        return self._whole


class ShardedCache(Cache):
    """Cache for `generate`'s past_key_values, on every rank with the same inputs. Raises ContextParallelUnsupported. config: of the model.
    cp: the ranks that share the cache. max_cache_len: the most positions of a sequence, prompt and new tokens."""

    def __init__(self, config: PreTrainedConfig, cp: ContextParallel, max_cache_len: int) -> None:
        if config.is_encoder_decoder:
            remedy = "generate without context_parallel"
            raise _refused(
                "a decoder alone has a cache that ranks share", f"{config.model_type}, which has an encoder", remedy
            )
        kinds, _ = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
        others = sorted({kind for kind in kinds if kind != _FULL})
        if others:
            raise _refused(
                "each layer of a cache that ranks share keeps the keys of all positions",
                f"layers of {', '.join(others)}",
                "use a cache of transformers, compiled without context_parallel",
            )
        layers: list[Any] = [ShardedLayer(cp, max_cache_len, is_first=at == 0) for at in range(len(kinds))]
        super().__init__(layers=layers)

    def reorder_cache(self, beam_idx: Any) -> NoReturn:
        _cannot("reorder_cache (beam search)")

    def crop(self, tokens_to_remove: int) -> NoReturn:
        _cannot("crop (assisted generation)")

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        _cannot("batch_repeat_interleave")

    def batch_select_indices(self, indices: Any) -> NoReturn:
        _cannot("batch_select_indices")


def _cannot(call: str) -> NoReturn:
    raise _refused(
        "a cache that ranks share takes tokens at its end",
        call,
        "sample or take the likeliest token: num_beams=1, no assistant",
    )


def _refused(rule: str, observed: str, remedy: str) -> ContextParallelUnsupported:
    return ContextParallelUnsupported(module="ShardedCache", source=None, rule=rule, observed=observed, remedy=remedy)
