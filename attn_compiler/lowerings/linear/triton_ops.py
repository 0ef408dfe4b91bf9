"""`attn_compiler::linear_chunks`: the recurrence by our kernels, a leaf op with a fake and a formula for its gradient. Needs no triton.
`linear_one_token`: a step of decoding, which writes the new state over the old one and has no gradient.

    out, last = linear_chunks(q, k, v, g, beta, skip, state, text);  text: of a LinearForm
    out = linear_one_token(q, k, v, g, beta, skip, state, text);  state: contiguous, in the dtype of the form's states

q, k: (B, S, Hk, K), before normalisation. v: (B, S, H, V). g: (B, S, H), or (B, S, H, K). beta: (B, S, H); without the delta rule the
factor of v. skip: (H,), the factor of v that is added to the result, or None. state: in the order of the function, as `last`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attn_compiler.spec.linear import LinearForm
from attn_compiler.torch_private.op_library import NAMESPACE, Late, register_helper

_OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? skip, Tensor? state, str text"
_CHUNKS = f"({_OPERANDS}) -> (Tensor out, Tensor last)"
_BACKWARD = (
    f"(Tensor grad_out, Tensor grad_last, {_OPERANDS}) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_g, "
    "Tensor grad_beta, Tensor grad_skip, Tensor grad_state)"
)
#: operands that the last state depends on: all but q and the skip
_OF_LAST = (1, 2, 3, 4, 6)
_ROOM = "attn_compiler.lowerings.linear"


def _fake(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, skip: Tensor | None, state: Tensor | None, text: str
) -> tuple[Tensor, Tensor]:
    form = LinearForm.from_text(text)
    batch, _, heads, dim_v = v.shape
    sizes = (dim_v, k.shape[3]) if form.recurrence == "ssd" else (k.shape[3], dim_v)
    out = v.new_empty(v.shape, dtype=getattr(torch, form.out_dtype))
    return out, v.new_empty((batch, heads, *sizes), dtype=getattr(torch, form.state_dtype))


def _fake_backward(grad_out: Tensor, grad_last: Tensor, *given: Any) -> tuple[Tensor, ...]:
    return tuple(grad_out.new_empty(0) if x is None else x.new_empty(x.shape) for x in given[:-1])


def _fake_one(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, skip: Tensor | None, state: Tensor, text: str
) -> Tensor:
    return v.new_empty(v.shape, dtype=getattr(torch, LinearForm.from_text(text).out_dtype))


def _setup(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
    *tensors, ctx.text = inputs
    ctx.save_for_backward(*tensors)
    if not any(ctx.needs_input_grad[at] for at in _OF_LAST):
        ctx.mark_non_differentiable(output[1])


def _formula(ctx: Any, grad_out: Tensor, grad_last: Tensor) -> tuple[Tensor | None, ...]:
    given = ctx.saved_tensors
    grads = _OPS.linear_chunks_backward(grad_out, grad_last, *given, ctx.text)
    return *(None if x is None else grad for x, grad in zip(given, grads, strict=True)), None


_OPS: Any = getattr(torch.ops, NAMESPACE)
register_helper(
    "linear_chunks_backward",
    _BACKWARD,
    function=Late(f"{_ROOM}.triton_backward", "backward"),
    fake=_fake_backward,
    notes=True,
)
register_helper(
    "linear_chunks",
    _CHUNKS,
    function=Late(f"{_ROOM}.triton_launch", "forward"),
    fake=_fake,
    notes=True,
    differentiated=(_setup, _formula),
)
register_helper(
    "linear_one_token",
    f"({_OPERANDS.replace('Tensor? state', 'Tensor(a!) state')}) -> Tensor out",
    function=Late(f"{_ROOM}.triton_step", "one_token"),
    fake=_fake_one,
    notes=True,
    exact_strides=True,
)
