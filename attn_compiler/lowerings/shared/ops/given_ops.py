"""Leaf ops for a forward of several nodes: `attn_compiler::<name>_given` returns its first two operands, out and lse, as outputs of q, k
and v, and computes their gradients.

Compiled code is without them (`ops.without_autograd`). Elsewhere the op copies its operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attn_compiler.lowerings.shared.ops import leaf_ops as ops
from attn_compiler.lowerings.shared.ops.leaf_ops import GIVEN, LEAF_SCHEMA, Differentiable, OfTensor
from attn_compiler.torch_private import op_library
from attn_compiler.torch_private.op_library import NAMESPACE

Tensors = Sequence[torch.Tensor]
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

#: number of leading operands: out and lse
_LEADING = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """Inputs of a registered backward: q, k, v, and its text."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    text: str


def register_given(
    family: str,
    name: str,
    *,
    leading: Callable[[str], int],
    read: Callable[[Tensors, str], Read],
    differentiable: Differentiable,
    prepare_grad_out: OfTensor = ops.as_it_is,
    is_part: bool = False,
) -> None:
    """Define `name` with the backward of a registered family, which reads other tensors in place of the op's q, k and v.

    leading(text): how many of the operands after out and lse `read` gets, besides the op's text; traced, in front of the backward. The
    others are the family's own. is_part: the gradient of the lse is minus delta, and out is not saved. Otherwise as `ops.register_family`.
    """
    if hasattr(getattr(torch.ops, NAMESPACE), name):
        return

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        *_, operands, ctx.spec = inputs
        ctx.save_for_backward(*operands[1:] if is_part else operands)

    def backward(ctx: Any, grad_out: torch.Tensor, grad_lse: torch.Tensor) -> tuple[Any, ...]:
        grad_out = prepare_grad_out(grad_out)
        out, lse, *kept = (ops.out_for_minus_delta(grad_out), *ctx.saved_tensors) if is_part else ctx.saved_tensors
        count = leading(ctx.spec)
        found, operands = read(kept[:count], ctx.spec), kept[count:]
        leaf = getattr(getattr(torch.ops, NAMESPACE), f"{family}_backward").default
        tensors = (grad_out, grad_lse, found.q, found.k, found.v, operands, out, lse)
        *grads, grad_operands = leaf(*tensors, found.text)
        own = iter(grad_operands)
        wanted = differentiable(operands, found.text)
        return *grads, [None] * (_LEADING + count) + [next(own) if is_wanted else None for is_wanted in wanted], None

    op_library.define(name, LEAF_SCHEMA, _hand_on, "CompositeExplicitAutograd")
    op = f"{NAMESPACE}::{name}"
    op_library.register_fake(name, ops.fake_forward)
    torch.library.register_autograd(op, backward, setup_context=setup_context, lib=op_library.LIBRARY)


def register_given_with(name: str, *, formula: Callable[[torch.Tensor, Tensors, str], Gradients]) -> None:
    """Define `<name>_given` with a backward of ordinary nodes and leaf ops.

    formula(grad_out, operands, text): traced; the gradients of q, k and v. It gets the operands after out and lse, and neither q, k, v
    nor those two: every tensor that it reads has to be among them. No operand gets a gradient.
    """
    op = f"{NAMESPACE}::{name}{GIVEN}"
    if hasattr(getattr(torch.ops, NAMESPACE), name + GIVEN):
        return
    op_library.define(name + GIVEN, LEAF_SCHEMA, _hand_on, "CompositeExplicitAutograd")
    op_library.register_fake(name + GIVEN, ops.fake_forward)
    torch.library.register_autograd(op, _backward(formula), setup_context=_setup_context, lib=op_library.LIBRARY)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *_, operands, ctx.spec = inputs
    ctx.save_for_backward(*operands[_LEADING:])


def _backward(formula: Callable[[torch.Tensor, Tensors, str], Gradients]) -> Callable[..., tuple[Any, ...]]:
    def backward(ctx: Any, grad_out: torch.Tensor, grad_lse: torch.Tensor) -> tuple[Any, ...]:
        operands = ctx.saved_tensors
        grads = formula(grad_out, operands, ctx.spec)
        return *grads, [None] * (_LEADING + len(operands)), None

    return backward


def _hand_on(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Tensors, text: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return operands[0].clone(), operands[1].clone()
