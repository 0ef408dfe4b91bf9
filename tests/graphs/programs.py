"""Four small attentions whose spec and rewritten graph are kept as text beside this file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

B, H, HKV, S, D = 2, 4, 2, 6, 8


@dataclass(frozen=True, kw_only=True)
class Program:
    """inputs: makes them; requires_grad: all of them want gradients."""

    function: Callable[..., Tensor]
    inputs: tuple[tuple[int, ...], ...]
    dynamic_sizes: tuple[int, ...] = ()
    requires_grad: bool = False

    @property
    def name(self) -> str:
        return self.function.__name__


def decoder_layer(x: Tensor, w: Tensor) -> Tensor:
    """SDPA with grouped heads repeated by hand, as a Llama has it."""
    q, k, v = F.linear(x, w).split([H * D, HKV * D, HKV * D], dim=-1)
    q, k, v = (t.unflatten(-1, (-1, D)).transpose(1, 2) for t in (q, k, v))
    k, v = (t[:, :, None].expand(-1, -1, H // HKV, -1, -1).flatten(1, 2) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def written_out_twice(q: Tensor, k: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
    """Two eager layers that share what is added to their scores."""
    for _ in range(2):
        q = F.softmax(q @ k.mT * D**-0.5 + mask + bias, dim=-1) @ k
    return q


def symbolic_lengths(x: Tensor, padding: Tensor) -> Tensor:
    """An encoder with padding; batch and length are symbolic."""
    heads = x.unflatten(-1, (H, D)).transpose(1, 2)
    scores = (heads @ heads.mT / D**0.5).masked_fill(padding[:, None, None, :] > 0, torch.finfo(x.dtype).min)
    return (scores.softmax(-1) @ heads).transpose(1, 2).reshape(x.shape)


def left_alone(q: Tensor, k: Tensor) -> Tensor:
    """A softcap, which no kernel here does."""
    return F.softmax(torch.tanh(q @ k.mT / 50.0) * 50.0, dim=-1) @ k


HEADS = (B, H, S, D)
PROGRAMS = (
    Program(function=decoder_layer, inputs=((B, S, H * D), ((H + 2 * HKV) * D, H * D)), requires_grad=True),
    Program(function=written_out_twice, inputs=(HEADS, HEADS, (B, 1, S, S), (1, H, S, S))),
    Program(function=symbolic_lengths, inputs=((B, S, H * D), (B, S)), dynamic_sizes=(B, S)),
    Program(function=left_alone, inputs=(HEADS, HEADS)),
)
