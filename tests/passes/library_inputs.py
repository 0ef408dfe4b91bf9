"""Inputs for the stand-ins of libraries' kernels, and a look at what is trained with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.passes.compiling import Compiled, compiled

B, H, HKV, S, D = 2, 4, 2, 16, 8
TOKENS = 20
OURS = {"lowerings": ["sdpa_cpu_flash", "math"]}


def qkv(queries: int = S, head_dim: int = D, heads_kv: int = HKV) -> list[Tensor]:
    sizes = ((queries, H), (S, heads_kv), (S, heads_kv))
    return [torch.randn(B, length, heads, head_dim) for length, heads in sizes]


def packed() -> list[Tensor]:
    bounds = torch.tensor([0, 5, 11, TOKENS], dtype=torch.int32)
    return [torch.randn(TOKENS, H, D), torch.randn(TOKENS, HKV, D), torch.randn(TOKENS, HKV, D), bounds]


def trained(function: Callable[..., Tensor], inputs: list[Tensor], **options: Any) -> Compiled:
    """Output and gradients are those of eager."""
    run = compiled(function, inner="aot_eager", **(options or OURS))
    results = []
    for called in (run, function):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = called(*leaves)
        given = torch.linspace(-1, 1, out.numel()).view(out.shape)
        results.append((out, *torch.autograd.grad(out, leaves, given, allow_unused=True)))
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted)
    return run
