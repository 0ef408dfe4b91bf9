"""Ops that merge parts of one attention, each over other keys, by their logsumexp. Passes insert them around such parts.

    acc, lse = merged_parts(acc, lse, out_j, lse_j)      for each part after the first
    out = whole_of_parts(acc, lse, sinks, dtype)         once

A part is `attention_with_lse(..., is_part=True)` (lse_op.py). Its backward gets minus delta in place of the gradient of the lse. Minus
delta is that gradient less sum(out_j · grad_out_j).

With P the weights over all keys, the gradient of a part's scores is P · (grad_out vᵀ - delta). Here delta = sum(out · grad_out) of the
whole attention, for every part. So the backward needs no part's output. `whole_of_parts` computes minus delta from the one output, and the
backward of each merge multiplies minus delta and grad_out by the part's share of the weights. FlashAttention's backward does the same with
the output and the lse of all keys.

Parts are summed in acc's dtype (float32, or float64). A row whose lse is -inf in every part has an out of 0, and no gradient.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attn_compiler.torch_private.op_library import LIBRARY, NAMESPACE


def shares(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return exp(a) and exp(b) over their sum, the shares of two parts. They add up to 1, and are a half in rows without any key."""
    apart = torch.where(a == b, 0.0, a - b)
    return torch.sigmoid(apart), torch.sigmoid(-apart)


def _joined(a: Tensor, b: Tensor) -> Tensor:
    """Return log(exp a + exp b); -inf for two -inf."""
    top = torch.maximum(a, b)
    shift = torch.where(top == -math.inf, 0.0, top)
    return shift + torch.log(torch.exp(a - shift) + torch.exp(b - shift))


# ---- two parts -----------------------------------------------------------------------------------------------------------


def _merged(acc: Tensor, acc_lse: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    ours, theirs = shares(acc_lse, lse)
    return acc * ours[..., None] + out.to(acc.dtype) * theirs[..., None], _joined(acc_lse, lse)


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, acc: Tensor, acc_lse: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        found, total = _merged(acc, acc_lse, out, lse)
        ctx.save_for_backward(acc_lse, lse)
        ctx.dtype = out.dtype
        return found, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        grad, minus_delta = grads
        ours, theirs = shares(*ctx.saved_tensors)
        return (
            grad * ours[..., None],
            minus_delta * ours,
            (grad * theirs[..., None]).to(ctx.dtype),
            minus_delta * theirs,
        )


# ---- the whole -----------------------------------------------------------------------------------------------------------


def _whole(acc: Tensor, lse: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the output of the whole attention. sinks: (Hq,), a logit of each head that joins the softmax and has no value."""
    if sinks is None:
        # The output of an op must not alias its input.
        return acc.to(dtype, copy=True)
    of_keys, _ = shares(lse, sinks.to(lse.dtype)[:, None])
    return (acc * of_keys[..., None]).to(dtype)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, acc: Tensor, lse: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
        out = _whole(acc, lse, sinks, dtype)
        ctx.save_for_backward(out, lse, sinks)
        ctx.wide = acc.dtype
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        out, lse, sinks = ctx.saved_tensors
        grad = grads[0].to(ctx.wide)
        minus_delta = -(grad * out.to(ctx.wide)).sum(-1).to(lse.dtype)
        if sinks is None:
            return grad, minus_delta, None, None
        of_keys, of_sink = shares(lse, sinks.to(lse.dtype)[:, None])
        of_sinks = (of_sink * minus_delta).sum((0, 2)).to(sinks.dtype)
        return grad * of_keys[..., None], minus_delta * of_keys, of_sinks, None


# ---- a part whose lowering differentiates plain nodes ----------------------------------------------------------------------


def _as_part(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return out.clone(), lse.clone()


class _AsPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(out)
        return _as_part(out, lse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        grad, minus_delta = grads
        (out,) = ctx.saved_tensors
        wide = minus_delta.dtype
        return grad, minus_delta + (grad.to(wide) * out.to(wide)).sum(-1)


if not hasattr(getattr(torch.ops, NAMESPACE), "merged_parts"):
    for name, schema, function, formula in (
        ("merged_parts", "(Tensor acc, Tensor acc_lse, Tensor out, Tensor lse) -> (Tensor, Tensor)", _merged, _Merged),
        ("whole_of_parts", "(Tensor acc, Tensor lse, Tensor? sinks, ScalarType dtype) -> Tensor", _whole, _Whole),
        ("as_part", "(Tensor out, Tensor lse) -> (Tensor, Tensor)", _as_part, _AsPart),
    ):
        LIBRARY.define(name + schema)
        LIBRARY.impl(name, formula.apply, "Autograd")
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")

merged_parts = getattr(torch.ops, NAMESPACE).merged_parts.default
whole_of_parts = getattr(torch.ops, NAMESPACE).whole_of_parts.default
#: returns an output and its lse unchanged; its backward converts minus delta, as for a part, to the gradient of the lse
as_part = getattr(torch.ops, NAMESPACE).as_part.default
