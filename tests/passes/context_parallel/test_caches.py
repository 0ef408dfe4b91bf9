"""Keys that a cache holds beside those of the call are refused by name, however they are taken in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import Cache, DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from attn_compiler import ContextParallel, ContextParallelUnsupported
from attn_compiler.context_parallel import rank_sync
from tests.passes.context_parallel.compiled import (
    BATCH,
    HEADS,
    LENGTH,
    WIDTH,
    Attend,
    Data,
    compile_and_run,
    fresh_mesh,
)

_CACHED = r"keys that are kept in \w*cache.*use_cache=False; to decode, .*ShardedCache"


def _in_place(model: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, data: Data) -> torch.Tensor:
    cache = data["cache"]
    cache.index_copy_(2, torch.arange(LENGTH), k)
    return scaled_dot_product_attention(q, cache, cache)


def _by_slice(model: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, data: Data) -> torch.Tensor:
    cache = data["cache"]
    cache[:, :, :LENGTH] = k
    return scaled_dot_product_attention(q, cache * 1.0, v)


def _joined(model: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, data: Data) -> torch.Tensor:
    keys, values = (torch.cat((data["cache"], x), 2) for x in (k, v))
    return scaled_dot_product_attention(q, keys, values)


_TAKEN: Mapping[str, tuple[Attend, int]] = {
    "in place": (_in_place, LENGTH),
    "by a slice": (_by_slice, LENGTH),
    "joined": (_joined, 7),
}


@pytest.mark.parametrize("name", _TAKEN)
def test_keys_that_are_taken_into_a_cache_are_refused(name: str) -> None:
    attend, held = _TAKEN[name]
    with pytest.raises(ContextParallelUnsupported, match=_CACHED):
        compile_and_run(attend=attend, data={"cache": torch.randn(BATCH, HEADS, held, WIDTH // HEADS)})


def test_keys_that_every_rank_has_may_be_joined() -> None:
    """Near miss: keys before those of a text, all of which every rank has, are no cache."""

    def attend(model: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, data: Data) -> torch.Tensor:
        keys = torch.cat((data["cache"], model.split(model.k(data["text"]))), 2)
        return scaled_dot_product_attention(q, keys, keys) + scaled_dot_product_attention(q, k, v, is_causal=True)

    data = {"cache": torch.randn(BATCH, HEADS, 3, WIDTH // HEADS), "text": torch.randn(BATCH, 7, WIDTH)}
    found = compile_and_run(attend=attend, data=data, replicated=("cache", "text"))
    assert found.shape == (BATCH, LENGTH, WIDTH)
    with pytest.raises(ContextParallelUnsupported, match=_CACHED):
        compile_and_run(attend=attend, data=data, replicated=("text",))


_LLAMA = LlamaConfig(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=64,
)


def _step(cache: Cache, length: int, *, held: int) -> None:
    """One call of a compiled model with a cache that holds some positions."""
    model = LlamaForCausalLM(_LLAMA).eval()
    with fresh_mesh() as mesh, pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(rank_sync, "agree", lambda *_, **__: None)
        ids = torch.randint(40, (2, held + length))
        if held:
            model(input_ids=ids[:, :held], past_key_values=cache)
        options = {"context_parallel": ContextParallel(mesh), "inner": "eager"}
        compiled = torch.compile(model, backend="attn_compiler", options=options, dynamic=False)
        positions = torch.arange(held, held + length).expand(2, -1).contiguous()
        compiled(input_ids=ids[:, held:], position_ids=positions, past_key_values=cache)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize(
    ("kind", "length", "held"),
    [("static", 6, 0), ("static", 6, 2), ("static", 1, 8), ("dynamic", 6, 2), ("dynamic", 1, 8)],
)
def test_steps_of_generate_are_refused(kind: str, length: int, held: int) -> None:
    cache = StaticCache(config=_LLAMA, max_cache_len=16) if kind == "static" else DynamicCache()
    with pytest.raises(ContextParallelUnsupported, match=r"keys that are kept in .*use_cache=False"):
        _step(cache, length, held=held)
