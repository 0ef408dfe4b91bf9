"""Operands of a recurrence, in float64 and with gradients, and outputs and gradients held against each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_compiler.lowerings.graph_ops.linear_recurrence import LinearOperands


def prepared(
    *, channel: bool, delta: bool, length: int, has_state: bool, dtype: torch.dtype = torch.float64
) -> LinearOperands:
    batch, heads, dim_k, dim_v = 2, 3, 5, 7
    torch.manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype)

    tokens = (batch, length, heads)
    return LinearOperands(
        q=normal(*tokens, dim_k).requires_grad_(),
        k=F.normalize(normal(*tokens, dim_k), dim=-1).requires_grad_(),
        v=normal(*tokens, dim_v).requires_grad_(),
        g=(-F.softplus(normal(*tokens, dim_k) if channel else normal(*tokens))).requires_grad_(),
        beta=normal(*tokens).sigmoid().requires_grad_() if delta else None,
        state=normal(batch, heads, dim_k, dim_v).requires_grad_() if has_state else None,
    )


def operands(given: LinearOperands) -> list[Tensor]:
    every = (given.q, given.k, given.v, given.g, given.beta, given.state)
    return [x for x in every if x is not None]


def furthest(
    one: Callable[[], Sequence[Tensor]], other: Callable[[], Sequence[Tensor]], given: Sequence[Tensor]
) -> tuple[float, float]:
    """The largest difference of what both give, and of the gradients of what they were given."""
    outs = [list(one()), list(other())]
    weights = [torch.randn_like(x) for x in outs[0]]
    grads = [
        torch.autograd.grad(sum((x * w).sum() for x, w in zip(found, weights, strict=True)), given)  # type: ignore[arg-type]
        for found in outs
    ]
    return _far(*outs), _far(*grads)


def _far(ones: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    return max(float((x - y).detach().abs().nan_to_num(torch.inf).max()) for x, y in zip(ones, others, strict=True))
