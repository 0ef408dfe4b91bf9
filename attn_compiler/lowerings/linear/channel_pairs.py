"""Leaf op of the reference where each channel of k has a decay: products of two tokens with the decay between them.

    Pᵢⱼ = Σ xᵢ yⱼ exp(sum of g after j and up to i)        sums over channels, for j up to i

A chunk is halved again and again. The pairs of a later half with the earlier one beside it are a product of matrices: one has the decays
from the cut on, the other those up to the cut. Their exponents are sums of g, and none is above 0 where g is not. So nothing overflows, no
product has zeros of a triangle, and gradients of g are sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_compiler.torch_private.op_library import NAMESPACE, register_helper

_PAIRS = "(Tensor rows, Tensor y, Tensor g) -> (Tensor pairs, Tensor start, Tensor end)"
_BACKWARD = (
    "(Tensor grad_pairs, Tensor grad_start, Tensor grad_end, Tensor rows, Tensor y, Tensor g) -> "
    "(Tensor grad_rows, Tensor grad_y, Tensor grad_g)"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Halves:
    """Halves of one size. size: tokens of a half. late: the decays of later halves from the cut on, (N, P, many, size, K). early: of
    earlier ones, up to it."""

    size: int
    late: Tensor
    early: Tensor


def _halves(start: Tensor, end: Tensor) -> Iterator[_Halves]:
    """Yield halves from the smallest on. start, end: first g and zeros; become the sums of g (N, P, C, K) up to each token and after it."""
    size = 1
    while size < start.shape[2]:
        (early, late), (early_end, _) = _cut(start, size), _cut(end, size)
        yield _Halves(size=size, late=late.exp(), early=early_end.exp())
        early_end += late[:, :, :, -1:]
        late += early[:, :, :, -1:]
        size *= 2


def _cut(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return views of the earlier and of the later halves, (N, P, many, size, ...), of x (N, P, C, ...)."""
    early, late = x.view(*x.shape[:2], -1, 2, size, *x.shape[3:]).unbind(3)
    return early, late


def _squares(pairs: Tensor, size: int) -> Tensor:
    """Return a view of pairs (N, P, C, X, C): later halves with the earlier ones beside them, (N, P, many, size X, size)."""
    batch, heads, length, rows, _ = pairs.shape
    shape = (batch, heads, length // (2 * size), size * rows, size)
    strides = (*pairs.stride()[:2], 2 * size * (rows * length + 1), length, 1)
    return pairs.as_strided(shape, strides, pairs.storage_offset() + size * rows * length)


def pairs(rows: Tensor, y: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return P (N, P, C, X, C), and the sums of g up to each token and after it. rows: x, (N, P, C, X, K), X of them for each token. y, g:
    (N, P, C, K); C is a power of 2."""
    rows, y, start = rows.contiguous(), y.contiguous(), g.clone(memory_format=torch.contiguous_format)
    end, found = torch.zeros_like(start), rows.new_zeros(*rows.shape[:4], y.shape[2])
    _diagonal(found).copy_((rows * y.unsqueeze(3)).sum(-1))
    for halves in _halves(start, end):
        x = _cut(rows, halves.size)[1] * halves.late.unsqueeze(4)
        keys = _cut(y, halves.size)[0] * halves.early
        _squares(found, halves.size).copy_(x.flatten(3, 4) @ keys.mT)
    return found, start, end


def _diagonal(pairs: Tensor) -> Tensor:
    """Return a view of each token's pair with itself, (N, P, C, X)."""
    return pairs.diagonal(dim1=2, dim2=4).mT


def pairs_backward(
    grad_pairs: Tensor, grad_start: Tensor, grad_end: Tensor, rows: Tensor, y: Tensor, g: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the operands of `pairs`. grad_pairs is not read above the diagonal."""
    grad_pairs, rows, y = grad_pairs.contiguous(), rows.contiguous(), y.contiguous()
    start, grad_start, grad_end = (x.clone(memory_format=torch.contiguous_format) for x in (g, grad_start, grad_end))
    own = _diagonal(grad_pairs).unsqueeze(-1)
    grad_rows = torch.mul(own, y.unsqueeze(3), out=torch.empty_like(rows))
    grad_y = (own * rows).sum(3).contiguous()
    for halves in reversed(list(_halves(start, torch.zeros_like(start)))):
        (early, late), (early_end, _) = _cut(grad_start, halves.size), _cut(grad_end, halves.size)
        of_early, of_late = late.sum(3), early_end.sum(3)
        early[:, :, :, -1] += of_early
        late[:, :, :, -1] += of_late
        late_decay = halves.late.unsqueeze(4)
        x = _cut(rows, halves.size)[1] * late_decay
        keys = _cut(y, halves.size)[0] * halves.early
        grad = _squares(grad_pairs, halves.size)
        of_x, of_keys = (grad @ keys).view(x.shape), grad.mT @ x.flatten(3, 4)
        _cut(grad_rows, halves.size)[1].addcmul_(of_x, late_decay)
        _cut(grad_y, halves.size)[0].addcmul_(of_keys, halves.early)
        late += (of_x * x).sum(4)
        early_end.addcmul_(of_keys, keys)
    return grad_rows, grad_y, grad_start


def _fake_pairs(rows: Tensor, y: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return rows.new_empty(*rows.shape[:4], y.shape[2]), g.new_empty(g.shape), g.new_empty(g.shape)


def _fake_backward(
    grad_pairs: Tensor, grad_start: Tensor, grad_end: Tensor, rows: Tensor, y: Tensor, g: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return rows.new_empty(rows.shape), y.new_empty(y.shape), g.new_empty(g.shape)


def _setup(ctx: Any, inputs: Sequence[Tensor], output: Sequence[Tensor]) -> None:
    ctx.save_for_backward(*inputs)


def _grad_pairs(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    found: tuple[Tensor, Tensor, Tensor] = _OPS.linear_channel_pairs_backward(*grads, *ctx.saved_tensors)
    return found


_OPS: Any = getattr(torch.ops, NAMESPACE)

register_helper("linear_channel_pairs_backward", _BACKWARD, function=pairs_backward, fake=_fake_backward)
register_helper("linear_channel_pairs", _PAIRS, function=pairs, fake=_fake_pairs, differentiated=(_setup, _grad_pairs))
