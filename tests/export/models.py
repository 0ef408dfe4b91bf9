"""Small attentions as models write them, for exports."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

WIDTH, HEADS = 32, 4
#: batch and length, neither of them fixed
DYNAMIC = {0: Dim("batch", min=2, max=8), 1: Dim("length", min=2, max=64)}


class _Attention(nn.Module):
    """x: (B, S, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def heads(self, x: Tensor) -> Iterator[Tensor]:
        return (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))

    def joined(self, heads: Tensor) -> Tensor:
        out: Tensor = self.out(heads.transpose(1, 2).flatten(2))
        return out


class ByHand(_Attention):
    """Softmax of scores to which a constant is added where a key is padding."""

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        lowest = torch.finfo(x.dtype).min
        bias = torch.where(kept[:, None, None, :], torch.tensor(0.0, dtype=x.dtype), lowest)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + bias
        return self.joined(scores.float().softmax(-1).to(q.dtype) @ v)


class CausalMask(_Attention):
    """SDPA with a dense mask that is causal."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        return self.joined(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


class WithoutGradients(CausalMask):
    """The same inside of no_grad, which an export makes a body of its own."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return super().forward(x)


class InAutocast(CausalMask):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x)


class Capped(_Attention):
    """Gemma 2's softcap, which PyTorch's kernels do not have, and a causal mask that is added."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        scores = torch.tanh(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) / 50) * 50
        scores = scores + torch.full((x.shape[1], x.shape[1]), -torch.inf, device=x.device).triu(1)
        return self.joined(scores.softmax(-1) @ v)


class Heads(_Attention):
    """Its outputs are what the attention gives, and a view of that."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        q, k, v = self.heads(x)
        out = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1) @ v
        return {"heads": out, "joined": out.transpose(1, 2)}


class Cached(_Attention):
    """A step of decoding, whose cache is a buffer that the program writes to."""

    cache_k: Tensor
    cache_v: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("cache_k", "cache_v"):
            self.register_buffer(name, torch.zeros(2, HEADS, 24, WIDTH // HEADS))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        self.cache_k.index_copy_(2, position, k)
        self.cache_v.index_copy_(2, position, v)
        mask = torch.arange(24) <= position[:, None]
        return self.joined(F.scaled_dot_product_attention(q, self.cache_k, self.cache_v, attn_mask=mask))


def made(kind: type[nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return kind().eval()


def batch(batches: int = 2, length: int = 24) -> Tensor:
    return torch.randn(batches, length, WIDTH, generator=torch.Generator().manual_seed(1))


def kept(batches: int = 2, length: int = 24) -> Tensor:
    """The last keys of the first sequence are padding."""
    keys = torch.ones(batches, length, dtype=torch.bool)
    keys[0, length - 5 :] = False
    return keys


def exported(model: nn.Module, *args: Any, dynamic: bool = False, strict: bool = False) -> ExportedProgram:
    shapes = tuple(DYNAMIC for _ in args) if dynamic else None
    return export(model, args, dynamic_shapes=shapes, strict=strict)
