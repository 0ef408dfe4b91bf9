"""Functions compiled again and again, as later processes would compile them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import attn_compiler
from tests.passes.rewrites.watching import Seen, watched


def compiled(function: Callable[..., Any], *inputs: Any, **options: Any) -> tuple[Any, list[Seen]]:
    """What the compiled function gives, and the graphs. Nothing in memory is left of compilations before."""
    torch._dynamo.reset()
    attn_compiler.reset()
    with watched() as seen:
        out = torch.compile(function, backend="attn_compiler", options={"inner": "eager", **options})(*inputs)
    return out, seen


def is_again(function: Callable[..., Any], *inputs: Any, **options: Any) -> bool:
    """Whether the one graph of a function was kept before."""
    _, (seen,) = compiled(function, *inputs, **options)
    assert seen.report.from_cache is not bool(seen.ran)
    return seen.report.from_cache


def why_not(function: Callable[..., Any], *inputs: Any, **options: Any) -> str | None:
    """Why the rewrite of the one graph of a function is not kept; None if it is."""
    _, (seen,) = compiled(function, *inputs, **options)
    assert seen.ran
    return seen.report.not_kept


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) * 0.25, -1) @ v


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    at = torch.arange(q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=at[:, None] >= at)


def qkv(*shape: int, **more: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape or (2, 3, 8, 16), generator=generator).to(**more) for _ in range(3)]
