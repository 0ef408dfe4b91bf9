"""Masks that code around a graph made of a part of the sequence: a window that it may have left out, documents that it did not see."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from attn_compiler import ContextParallel
from attn_compiler.passes.context_parallel import lost_masks
from attn_compiler.reasons.errors import ContextParallelUnsupported
from attn_compiler.torch_private import rank_sync
from tests.passes.context_parallel.compiled import BATCH, HEADS, LENGTH, WIDTH, compile_and_run, fresh_mesh, positions

#: within the sequence of two ranks, and wider than a rank's part
WINDOW = LENGTH + 7


def _config(**given: Any) -> Any:
    return types.SimpleNamespace(**given)


_TYPES = ["full_attention", "sliding_attention", "chunked_attention"]
TOLD: dict[str, tuple[dict[str, Any], Any]] = {
    "nothing": ({}, None),
    "a configuration without one": ({"config": _config(sliding_window=None)}, None),
    "for all layers": ({"config": _config(sliding_window=9)}, ("sliding_window", 9)),
    "the module's own": ({"config": _config(sliding_window=9), "sliding_window": 10}, ("sliding_window", 10)),
    "the module has none": ({"config": _config(sliding_window=9), "sliding_window": None}, None),
    "a full layer": ({"config": _config(sliding_window=9, layer_types=_TYPES), "layer_idx": 0}, None),
    "a sliding layer": (
        {"config": _config(sliding_window=9, layer_types=_TYPES), "layer_idx": 1},
        ("sliding_window", 9),
    ),
    "a chunked layer": (
        {"config": _config(attention_chunk_size=8, sliding_window=9, layer_types=_TYPES), "layer_idx": 2},
        ("attention_chunk_size", 8),
    ),
    "chunks": ({"config": _config(attention_chunk_size=8)}, ("attention_chunk_size", 8)),
    "a switch": ({"config": _config(sliding_window=True)}, None),
}


@pytest.mark.parametrize("name", TOLD)
def test_what_a_module_says(name: str) -> None:
    given, expected = TOLD[name]
    assert lost_masks.told(_config(**given)) == expected


class Layer(nn.Module):
    """Compiled by itself. windowed: whether it makes its own mask."""

    def __init__(self, windowed: bool, **config: Any) -> None:
        super().__init__()
        self.attention = Attention(windowed, config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.attention(x)
        return found


class Attention(nn.Module):
    def __init__(self, windowed: bool, config: dict[str, Any]) -> None:
        super().__init__()
        self.q, self.windowed = nn.Linear(WIDTH, WIDTH), windowed
        self.layer_idx = config.pop("layer_idx", 0)
        self.config = _config(**config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        at = torch.arange(x.shape[1])
        distance = at[:, None] - at[None, :]
        mask = (distance >= 0) & (distance < WINDOW) if self.windowed else None
        out = scaled_dot_product_attention(q, q, q, attn_mask=mask, is_causal=mask is None)
        return out.transpose(1, 2).flatten(2)


def _run(*layers: Layer, **description: Any) -> None:
    with fresh_mesh() as mesh, pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_sync, "agree", lambda *_, **__: None)
        options = {"context_parallel": ContextParallel(mesh, **description), "inner": "eager"}
        for layer in layers:
            layer.compile(backend="attn_compiler", options=options, fullgraph=True)
            layer(torch.randn(BATCH, LENGTH, WIDTH))


def test_a_window_that_a_mask_does_not_have_is_refused() -> None:
    with pytest.raises(ContextParallelUnsupported, match=rf"sliding_window is {WINDOW} of {2 * LENGTH} positions"):
        _run(Layer(False, sliding_window=WINDOW))
    _run(Layer(False, sliding_window=WINDOW), allow=("window",))


def test_a_window_that_a_mask_has_or_that_holds_all_is_none() -> None:
    _run(Layer(True, sliding_window=WINDOW))
    _run(Layer(False, sliding_window=2 * LENGTH))


@pytest.mark.parametrize("first", [0, 1])
def test_code_of_a_full_layer_does_not_serve_one_with_a_window(first: int) -> None:
    """Both layers have one graph."""
    kinds = ["full_attention", "sliding_attention"]
    layers = [Layer(False, sliding_window=WINDOW, layer_types=kinds, layer_idx=i) for i in (first, 1 - first)]
    with pytest.raises(ContextParallelUnsupported, match="the window that its module names"):
        _run(*layers)


def test_documents_that_a_mask_does_not_read_are_refused() -> None:
    with pytest.raises(ContextParallelUnsupported, match="packed documents reads where they begin"):
        compile_and_run(packed=True)


def test_documents_that_a_mask_reads_are_taken() -> None:
    def attend(m: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, data: Any) -> torch.Tensor:
        document = (data["position_ids"] == 0).long().cumsum(-1)
        mask = (document[:, None, :, None] == document[:, None, None, :]).tril()
        return scaled_dot_product_attention(q, k, v, attn_mask=mask)

    compile_and_run(attend=attend, data={"position_ids": positions() % 7}, packed=True)
