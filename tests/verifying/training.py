"""Steps of training, verified: models, their inputs, and what the checks of one step found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import attn_compiler
from attn_compiler import verifying
from attn_compiler.verifying import Verification
from tests.passes.compiling import Compiled, compiled
from tests.verifying import planning
from tests.verifying.planning import LENGTH, SHAPE, Tensor, causal

BATCH, HEADS, _, DIM = SHAPE


def qkv(**more: Any) -> list[Tensor]:
    return planning.qkv(**{"grad": True, **more})


def found(subject: str) -> list[Verification]:
    return [v for v in attn_compiler.verifications() if v.subject == subject]


def assert_verified(*subjects: str, sites: int = 1) -> None:
    for subject in subjects:
        checks = found(subject)
        assert [v.skipped for v in checks] == [None] * (1 if subject.startswith("graph") else sites), checks
        assert all(v.elements > 0 for v in checks)


def assert_all_verified(sites: int = 1) -> None:
    assert_verified("output", "graph outputs", "graph gradients", sites=sites)


def trained(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[Compiled, Any]:
    """One step, verified; the loss weighs every element of the output differently."""
    model = compiled(function, verify=True, **options)
    out = model(*args)
    loss(out).backward()
    return model, out


def loss(out: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return (out.float() * torch.randn(out.shape, generator=generator)).sum()


# ---- models -------------------------------------------------------------------------------------------------------


def softmaxed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softmaxed(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))


def softcapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT * 0.3 / 5).tanh() * 5).softmax(-1) @ v


def with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = torch.cat([q @ k.mT * 0.3, sinks[None, :, None, None].expand(q.shape[0], -1, q.shape[2], 1)], -1)
    return scores.softmax(-1)[..., :-1] @ v


def with_table(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    apart = torch.arange(q.shape[2]) - torch.arange(q.shape[2])[:, None] + q.shape[2] - 1
    return (q @ k.mT + F.embedding(apart, table).permute(2, 0, 1)).softmax(-1) @ v


def checkpointed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return checkpoint(causal, q.sin(), k, v, use_reentrant=False) + 1


def two_layers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal(causal(q, k, v) + q, k, v)


def autocast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return softmaxed(q, k, v)


class Layer(nn.Module):
    """A pre-norm layer with rotary embedding and few heads of keys, or (bert) a post-norm one with biases."""

    def __init__(self, *, bert: bool) -> None:
        super().__init__()
        size, kv = HEADS * DIM, (HEADS if bert else 2) * DIM
        self.bert = bert
        self.q_proj, self.o_proj = nn.Linear(size, size, bias=bert), nn.Linear(size, size, bias=bert)
        self.k_proj, self.v_proj = nn.Linear(size, kv, bias=bert), nn.Linear(size, kv, bias=bert)
        self.norm = nn.LayerNorm(size) if bert else nn.RMSNorm(size)
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        read = x if self.bert else self.norm(x)
        q, k, v = (f(read).view(*x.shape[:2], -1, DIM).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        if not self.bert:
            angles = torch.arange(x.shape[1])[:, None] * 10.0 ** -torch.linspace(0, 2, DIM // 2)
            cos, sin = (f(torch.cat([angles] * 2, -1)).to(x.dtype) for f in (torch.cos, torch.sin))
            q, k = (y * cos + torch.cat([-y[..., DIM // 2 :], y[..., : DIM // 2]], -1) * sin for y in (q, k))
            k, v = (y.repeat_interleave(2, 1) for y in (k, v))
        mask = (1.0 - padding[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        if not self.bert:
            above = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            mask = mask.masked_fill(above, torch.finfo(x.dtype).min)
        attended = (q @ k.mT * DIM**-0.5 + mask).softmax(-1, dtype=torch.float32).to(x.dtype) @ v
        x = x + self.o_proj(attended.transpose(1, 2).flatten(2))
        x = self.norm(x) if self.bert else x
        return x + self.down(F.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, *, bert: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, HEADS * DIM)
        self.layers = nn.ModuleList(Layer(bert=bert) for _ in range(2))

    def forward(self, ids: Tensor, padding: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, padding)
        return x


IDS = torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) % 11
PADDING = torch.tensor([[1] * LENGTH, [1, 1, 1, 1, 0, 0]])

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def checked(found: Any) -> Callable[..., Any]:
    return verifying.checked(found.module.forward, found.plan)
