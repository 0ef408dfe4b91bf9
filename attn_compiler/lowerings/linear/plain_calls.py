"""The recurrence by plain ops, and its gradients, in place of kernels that can't be compiled or started.

Takes the arguments of `linear_chunks` and of its backward (triton_ops.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_compiler.lowerings.graph_ops.linear_recurrence import LinearOperands, normalised
from attn_compiler.lowerings.linear.chunks import by_chunks
from attn_compiler.lowerings.shared.launching.on_device import on
from attn_compiler.spec.linear import LinearForm


def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, skip: Tensor | None, state: Tensor | None, text: str
) -> tuple[Tensor, Tensor]:
    """Compute `linear_chunks`."""
    with on(v.device), torch.no_grad():
        return _computed(q, k, v, g, beta, skip, state, text)


def backward(grad_out: Tensor, grad_last: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """Compute `linear_chunks_backward` by autograd: gradients are contiguous, and empty for an absent operand."""
    *operands, text = given
    with on(grad_out.device), torch.enable_grad():
        wanted: list[Any] = [None if x is None else x.detach().requires_grad_() for x in operands]
        leaves = [x for x in wanted if x is not None]
        found = torch.autograd.grad(_computed(*[*wanted, text]), leaves, [grad_out, grad_last], materialize_grads=True)
    each = iter(found)
    return tuple(grad_out.new_empty(0) if x is None else next(each).to(x.dtype).contiguous() for x in operands)


def _computed(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, skip: Tensor | None, state: Tensor | None, text: str
) -> tuple[Tensor, Tensor]:
    form, heads = LinearForm.from_text(text), v.shape[2]
    is_delta = form.recurrence == "delta"
    q, k, wide, g, beta = (x.to(torch.float32) for x in (q, k, v, g, beta))
    q, k = (normalised(x, form.eps).repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
    if is_delta:
        q, values = q * q.shape[3] ** -0.5, wide
    else:
        values = wide * beta.unsqueeze(-1)
    first = None if state is None else (state if is_delta else state.mT).to(torch.float32)
    out, last = by_chunks(LinearOperands(q=q, k=k, v=values, g=g, beta=beta if is_delta else None, state=first))
    if skip is not None:
        out = out + skip.to(torch.float32).unsqueeze(-1) * wide
    dtypes = getattr(torch, form.out_dtype), getattr(torch, form.state_dtype)
    return out.to(dtypes[0]).contiguous(), (last if is_delta else last.mT).to(dtypes[1]).contiguous()
