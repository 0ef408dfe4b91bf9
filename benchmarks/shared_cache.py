"""A decoding step of a Llama whose cache GPUs share, and of one GPU that has all of it, for bench_shared_sequence.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import attn_compiler
from attn_compiler.integrations.transformers_cache import ShardedCache

BATCH = 8
#: positions that are not filled yet
_FREE = 8


def filled(model: nn.Module, length: int, device: str, cp: attn_compiler.ContextParallel | None, rank: int = 0) -> Any:
    """A cache with the same random keys and values on each rank. cp: ranks that share it; None: this one has all of it."""
    from transformers import StaticCache

    config: Any = model.config
    cache: Any = (
        StaticCache(config=config, max_cache_len=length)
        if cp is None
        else ShardedCache(config, cp, max_cache_len=length)
    )
    dtype = next(model.parameters()).dtype
    shape = (BATCH, config.num_key_value_heads, length, config.head_dim)
    draw = torch.Generator(device).manual_seed(1)
    for layer in cache.layers:
        new = torch.empty(*shape[:2], 1, shape[3], dtype=dtype, device=device)
        layer.lazy_initialization(new, new)
        for kept in (layer.keys, layer.values):
            all_of_it = torch.randn(shape, dtype=dtype, device=device, generator=draw)
            own = all_of_it if cp is None else all_of_it[:, :, rank :: cp.size]
            kept[:, :, : own.shape[2]].copy_(own)
    return cache


def stepper(model: Callable[..., Any], cache: Any, length: int, ids: Tensor) -> Callable[[], Tensor]:
    """One token for each row at the same position in each call; gives logits (B, 1, vocabulary)."""
    lengths: Sequence[Tensor] = [layer.cumulative_length for layer in cache.layers]

    def step() -> Tensor:
        with torch.no_grad():
            torch._foreach_zero_(lengths)
            torch._foreach_add_(lengths, length - _FREE)
            logits: Tensor = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
            return logits

    return step
