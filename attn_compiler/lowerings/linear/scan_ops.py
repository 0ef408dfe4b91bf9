"""Leaf op of the reference: the only part of the recurrence that goes chunk by chunk.

    Sᵢ₊₁ = cdᵢ Sᵢ + kdᵢᵀ vᵢ,  vᵢ = uᵢ - wᵢ Sᵢ, or uᵢ

Chunks are the first axis, so that each chunk is contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attn_compiler.torch_private.op_library import NAMESPACE, register_helper

_SCAN = "(Tensor u, Tensor kd, Tensor cd, Tensor state, Tensor? w) -> (Tensor states, Tensor last, Tensor v)"
_SCAN_BACKWARD = (
    "(Tensor grad_states, Tensor grad_last, Tensor grad_v, Tensor kd, Tensor cd, Tensor? w) -> "
    "(Tensor grad_after, Tensor grad_u, Tensor grad_state)"
)


def scan(u: Tensor, kd: Tensor, cd: Tensor, state: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the state before each chunk, the last state, and v (empty without w).

    u: (N, P, C, V), of N chunks and P pairs of a batch row and a head. kd, w: (N, P, C, K); w None: without the delta rule.
    cd: the decay over a chunk, (N, P, K or 1, 1). state: (P, K, V).
    """
    states, last = u.new_empty(u.shape[0], *state.shape), torch.empty_like(state)
    v = u.new_empty(0) if w is None else torch.empty_like(u, memory_format=torch.contiguous_format)
    each = [*states.unbind(), last]
    each[0].copy_(state)
    for at, (now, keys, values) in enumerate(zip(each, kd.mT, u, strict=False)):
        if w is not None:
            values = torch.baddbmm(values, w[at], now, alpha=-1, out=v[at])
        torch.mul(now, cd[at], out=each[at + 1]).baddbmm_(keys, values)
    return states, last, v


def _fake_scan(u: Tensor, kd: Tensor, cd: Tensor, state: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    last = state.new_empty(state.shape)
    return u.new_empty(u.shape[0], *state.shape), last, u.new_empty(0) if w is None else u.new_empty(u.shape)


def scan_backward(
    grad_states: Tensor, grad_last: Tensor, grad_v: Tensor, kd: Tensor, cd: Tensor, w: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the state after each chunk, of u, and of the first state."""
    after = torch.empty_like(grad_states, memory_format=torch.contiguous_format)
    grad_u = torch.empty(*kd.shape[:3], grad_last.shape[-1], dtype=kd.dtype, device=kd.device)
    grad_state = torch.empty_like(grad_last, memory_format=torch.contiguous_format)
    each = [grad_state, *after.unbind()]
    each[-1].copy_(grad_last)
    for at in reversed(range(kd.shape[0])):
        now = each[at + 1]
        if w is None:
            torch.bmm(kd[at], now, out=grad_u[at])
        else:
            torch.baddbmm(grad_v[at], kd[at], now, out=grad_u[at])
        torch.addcmul(grad_states[at], now, cd[at], out=each[at])
        if w is not None:
            each[at].baddbmm_(w[at].mT, grad_u[at], alpha=-1)
    return after, grad_u, grad_state


def _fake_scan_backward(
    grad_states: Tensor, grad_last: Tensor, grad_v: Tensor, kd: Tensor, cd: Tensor, w: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    grad_u = kd.new_empty(*kd.shape[:3], grad_last.shape[-1])
    return grad_states.new_empty(grad_states.shape), grad_u, grad_last.new_empty(grad_last.shape)


def _setup_scan(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
    u, kd, cd, _, w = inputs
    states, _, v = output
    ctx.save_for_backward(kd, cd, w, states, u if w is None else v)


def _grad_scan(ctx: Any, grad_states: Tensor, grad_last: Tensor, grad_v: Tensor) -> tuple[Tensor | None, ...]:
    kd, cd, w, states, v = ctx.saved_tensors
    after, grad_u, grad_state = _OPS.linear_scan_backward(grad_states, grad_last, grad_v, kd, cd, w)
    grad_cd = (after * states).sum(-1, keepdim=True)
    if cd.shape[-2] == 1:
        grad_cd = grad_cd.sum(-2, keepdim=True)
    grad_w = None if w is None else -(grad_u @ states.transpose(-1, -2))
    return grad_u, v @ after.transpose(-1, -2), grad_cd, grad_state, grad_w


_OPS: Any = getattr(torch.ops, NAMESPACE)

register_helper("linear_scan_backward", _SCAN_BACKWARD, function=scan_backward, fake=_fake_scan_backward)
register_helper("linear_scan", _SCAN, function=scan, fake=_fake_scan, differentiated=(_setup_scan, _grad_scan))
