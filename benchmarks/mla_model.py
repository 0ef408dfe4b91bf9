"""A decoder with multi-head latent attention in plain PyTorch, written as transformers 5.24 writes it: the latent is cached, and k and v
are made of the whole cache in each step. Of its own, since older releases cache k and v."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """inner: of the feed-forward layers, those that one token uses. q_rank: None where q has one projection."""

    layers: int
    hidden: int
    inner: int
    heads: int
    q_rank: int | None = None
    rank: int = 512
    rope: int = 64
    nope: int = 128
    v: int = 128
    vocabulary: int = 32000

    @property
    def kept(self) -> int:
        """Numbers of a key in the cache."""
        return self.rank + self.rope


@dataclass(kw_only=True)
class Caches:
    """Static: latent (B, 1, S, rank) and rope (B, 1, S, rope) of each layer. length: (1,), how many are filled."""

    latent: list[Tensor]
    rope: list[Tensor]
    length: Tensor

    @staticmethod
    def filled(sizes: Sizes, batch: int, slots: int, dtype: torch.dtype, device: str, seed: int = 1) -> Caches:
        """Of random numbers. Their addresses stay what they are."""
        generator = torch.Generator(device=device).manual_seed(seed)

        def made(width: int) -> list[Tensor]:
            shape = (batch, 1, slots, width)
            found = [
                torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)
                for _ in range(sizes.layers)
            ]
            for tensor in found:
                torch._dynamo.mark_static_address(tensor)
            return found

        length = torch.zeros(1, dtype=torch.long, device=device)
        torch._dynamo.mark_static_address(length)
        return Caches(latent=made(sizes.rank), rope=made(sizes.rope), length=length)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        of_head = sizes.nope + sizes.rope
        if sizes.q_rank is None:
            self.q: nn.Module = nn.Linear(sizes.hidden, sizes.heads * of_head, bias=False)
        else:
            self.q = nn.Sequential(
                nn.Linear(sizes.hidden, sizes.q_rank, bias=False),
                nn.RMSNorm(sizes.q_rank),
                nn.Linear(sizes.q_rank, sizes.heads * of_head, bias=False),
            )
        self.kv_a = nn.Linear(sizes.hidden, sizes.kept, bias=False)
        self.norm = nn.RMSNorm(sizes.rank)
        self.kv_b = nn.Linear(sizes.rank, sizes.heads * (sizes.nope + sizes.v), bias=False)
        self.out = nn.Linear(sizes.heads * sizes.v, sizes.hidden, bias=False)

    def expanded(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """k and v of a cache."""
        sizes, (batch, _, slots, _) = self.sizes, latent.shape
        kv = self.kv_b(latent).view(batch, slots, -1, sizes.nope + sizes.v).transpose(1, 2)
        nope, v = torch.split(kv, [sizes.nope, sizes.v], dim=-1)
        k = kv.new_empty(*kv.shape[:-1], sizes.nope + sizes.rope)
        k[..., : sizes.nope].copy_(nope)
        k[..., sizes.nope :].copy_(rope.expand(-1, nope.shape[1], -1, -1))
        return k, v

    def forward(
        self, x: Tensor, latent: Tensor, rope: Tensor, at: Tensor, cos: Tensor, sin: Tensor, mask: Tensor
    ) -> Tensor:
        sizes, (batch, length, _) = self.sizes, x.shape
        q = self.q(x).view(batch, length, -1, sizes.nope + sizes.rope).transpose(1, 2)
        nope, rotary = torch.split(q, [sizes.nope, sizes.rope], dim=-1)
        q = torch.cat((nope, _rotated(rotary, cos, sin)), dim=-1)
        new, new_rope = torch.split(self.kv_a(x), [sizes.rank, sizes.rope], dim=-1)
        latent.index_copy_(2, at, self.norm(new).view(batch, 1, length, sizes.rank))
        rope.index_copy_(2, at, _rotated(new_rope.view(batch, 1, length, sizes.rope), cos, sin))
        k, v = self.expanded(latent, rope)
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=(sizes.nope + sizes.rope) ** -0.5)
        made: Tensor = self.out(out.transpose(1, 2).reshape(batch, length, -1))
        return made


class Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention = Attention(sizes)
        self.before, self.between = nn.RMSNorm(sizes.hidden), nn.RMSNorm(sizes.hidden)
        self.gate, self.up = (nn.Linear(sizes.hidden, sizes.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.inner, sizes.hidden, bias=False)

    def forward(self, x: Tensor, *given: Any) -> Tensor:
        x = x + self.attention(self.before(x), *given)
        inner = self.between(x)
        made: Tensor = x + self.down(silu(self.gate(inner)) * self.up(inner))
        return made


class Decoder(nn.Module):
    """One step: tokens (B, 1) to logits (B, 1, vocabulary). The caches get what is new, and their length counts on."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedded = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor, latent: list[Tensor], rope: list[Tensor], length: Tensor) -> Tensor:
        x = self.embedded(tokens)
        at = torch.arange(tokens.shape[1], device=tokens.device) + length
        half = self.sizes.rope // 2
        frequencies = 10000.0 ** (-torch.arange(half, device=x.device) / half)
        angles = (at[:, None] * frequencies).repeat(1, 2)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        slots = torch.arange(latent[0].shape[2], device=x.device)
        mask = (slots[None, :] <= at[:, None])[None, None].expand(tokens.shape[0], 1, -1, -1)
        length.add_(tokens.shape[1])
        for layer, own, own_rope in zip(self.layers, latent, rope, strict=True):
            x = layer(x, own, own_rope, at, cos, sin, mask)
        made: Tensor = self.head(self.norm(x))
        return made
