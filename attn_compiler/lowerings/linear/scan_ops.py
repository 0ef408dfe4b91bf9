"""Leaf ops of the reference: the only part of the recurrence that goes chunk by chunk, and a triangular solve.

    Sᵢ₊₁ = cdᵢ Sᵢ + kdᵢᵀ vᵢ,  vᵢ = uᵢ - wᵢ Sᵢ, or uᵢ

Chunks stand first, so that all of one chunk lies in one piece. `linear_solve` is an op since the strides that PyTorch's own fake gives the
gradient of solve_triangular are not those that it has.
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
_SOLVE = "(Tensor lower, Tensor right) -> Tensor"
_SOLVE_BACKWARD = "(Tensor grad, Tensor lower, Tensor solved) -> (Tensor grad_lower, Tensor grad_right)"


def scan(u: Tensor, kd: Tensor, cd: Tensor, state: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """u: (N, P, C, V), of N chunks and P pairs of a batch row and a head. kd, w: (N, P, C, K); w None: without the delta rule. cd: the
    decay over a chunk, (N, P, K or 1, 1). state: (P, K, V). Gives the state before each chunk, the last one, and v; of v nothing without w.
    """
    states = u.new_empty(u.shape[0], *state.shape)
    kdt = kd.transpose(-1, -2)
    v = u.new_empty(0) if w is None else torch.empty_like(u, memory_format=torch.contiguous_format)
    for i in range(u.shape[0]):
        states[i] = state
        if w is None:
            state = torch.baddbmm(state * cd[i], kdt[i], u[i])
        else:
            torch.baddbmm(u[i], w[i], state, alpha=-1, out=v[i])
            state = torch.baddbmm(state * cd[i], kdt[i], v[i])
    return states, state.clone() if u.shape[0] == 0 else state, v


def _fake_scan(u: Tensor, kd: Tensor, cd: Tensor, state: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    last = state.new_empty(state.shape)
    return u.new_empty(u.shape[0], *state.shape), last, u.new_empty(0) if w is None else u.new_empty(u.shape)


def scan_backward(
    grad_states: Tensor, grad_last: Tensor, grad_v: Tensor, kd: Tensor, cd: Tensor, w: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the state after each chunk, of u, and of the first state."""
    after = torch.empty_like(grad_states, memory_format=torch.contiguous_format)
    grad_u = torch.empty(*kd.shape[:3], grad_last.shape[-1], dtype=kd.dtype, device=kd.device)
    state = grad_last
    for i in reversed(range(kd.shape[0])):
        after[i] = state
        if w is None:
            torch.bmm(kd[i], state, out=grad_u[i])
            state = torch.addcmul(grad_states[i], state, cd[i])
        else:
            torch.baddbmm(grad_v[i], kd[i], state, out=grad_u[i])
            state = torch.addcmul(grad_states[i], state, cd[i])
            state = torch.baddbmm(state, w[i].transpose(-1, -2), grad_u[i], alpha=-1)
    return after, grad_u, state.clone(memory_format=torch.contiguous_format)


def _fake_scan_backward(
    grad_states: Tensor, grad_last: Tensor, grad_v: Tensor, kd: Tensor, cd: Tensor, w: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    grad_u = kd.new_empty(*kd.shape[:3], grad_last.shape[-1])
    return grad_states.new_empty(grad_states.shape), grad_u, grad_last.new_empty(grad_last.shape)


def _setup_scan(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
    u, kd, cd, _, w = inputs
    states, _, v = output
    ctx.save_for_backward(kd, cd, w, states, u if w is None else v)


def _of_scan(ctx: Any, grad_states: Tensor, grad_last: Tensor, grad_v: Tensor) -> tuple[Tensor | None, ...]:
    kd, cd, w, states, v = ctx.saved_tensors
    after, grad_u, grad_state = _OPS.linear_scan_backward(grad_states, grad_last, grad_v, kd, cd, w)
    grad_cd = (after * states).sum(-1, keepdim=True)
    if cd.shape[-2] == 1:
        grad_cd = grad_cd.sum(-2, keepdim=True)
    grad_w = None if w is None else -(grad_u @ states.transpose(-1, -2))
    return grad_u, v @ after.transpose(-1, -2), grad_cd, grad_state, grad_w


def solve(lower: Tensor, right: Tensor) -> Tensor:
    """(1 + the part of `lower` below the diagonal)⁻¹ right."""
    found: Tensor = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    return found.contiguous()


def _fake_solve(lower: Tensor, right: Tensor) -> Tensor:
    return right.new_empty(right.shape)


def solve_backward(grad: Tensor, lower: Tensor, solved: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of both operands."""
    of_right = torch.linalg.solve_triangular(lower.mT, grad, upper=True, unitriangular=True).contiguous()
    return -(of_right @ solved.mT).tril(-1), of_right


def _fake_solve_backward(grad: Tensor, lower: Tensor, solved: Tensor) -> tuple[Tensor, Tensor]:
    return lower.new_empty(lower.shape), grad.new_empty(grad.shape)


def _setup_solve(ctx: Any, inputs: Sequence[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _of_solve(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = _OPS.linear_solve_backward(grad, *ctx.saved_tensors)
    return found


_OPS: Any = getattr(torch.ops, NAMESPACE)

register_helper("linear_scan_backward", _SCAN_BACKWARD, function=scan_backward, fake=_fake_scan_backward)
register_helper("linear_scan", _SCAN, function=scan, fake=_fake_scan, differentiated=(_setup_scan, _of_scan))
register_helper("linear_solve_backward", _SOLVE_BACKWARD, function=solve_backward, fake=_fake_solve_backward)
register_helper("linear_solve", _SOLVE, function=solve, fake=_fake_solve, differentiated=(_setup_solve, _of_solve))
