"""Exchanges between the ranks of a group, with their gradients. The sum over ranks of their losses is what is differentiated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def gathered(x: Tensor, size: int, group: str) -> list[Tensor]:
    """x of each rank, which has the same shape on all of them."""
    flat: Tensor = _Gather.apply(x, size, group)  # type: ignore[no-untyped-call]
    return list(flat.view(size, *x.shape).unbind())


def summed(x: Tensor, group: str) -> Tensor:
    """The sum of x over the ranks."""
    total: Tensor = _Sum.apply(x, group)  # type: ignore[no-untyped-call]
    return total


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group: str) -> Tensor:
        ctx.size, ctx.group, ctx.shape = size, group, x.shape
        return _waited(torch.ops._c10d_functional.all_gather_into_tensor(x.reshape(-1), size, group))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        part = torch.ops._c10d_functional.reduce_scatter_tensor(gradient.contiguous(), "sum", ctx.size, ctx.group)
        return _waited(part).view(ctx.shape), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return _reduced(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return _reduced(gradients[0], ctx.group), None


def _reduced(x: Tensor, group: str) -> Tensor:
    return _waited(torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", group))


def _waited(x: Tensor) -> Tensor:
    waited: Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return waited
