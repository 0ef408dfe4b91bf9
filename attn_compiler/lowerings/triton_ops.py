"""The leaf op of the Triton kernels, `attn_compiler::triton`: its text is a `triton_plan.Call`.

operands: those that the plan names, in its order. The backward's list holds the gradients of `Plan.differentiable`.
triton itself is imported by the first call, not before: a dump or a fake needs none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attn_compiler.lowerings import triton_planning
from attn_compiler.lowerings.ops import register_family
from attn_compiler.lowerings.triton_plan import Call

Tensors = Sequence[torch.Tensor]


def differentiable(operands: Tensors, text: str) -> list[bool]:
    """For each operand whether it gets a gradient. Raises ValueError if their number is not the plan's."""
    plan = triton_planning.of(Call.from_text(text).spec)
    if len(plan.operands) != len(operands):
        raise ValueError(f"the plan has the operands {', '.join(plan.operands) or 'none'}; got {len(operands)}")
    return [name in plan.differentiable for name in plan.operands]


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Tensors, spec: str
) -> tuple[torch.Tensor, torch.Tensor]:
    from attn_compiler.lowerings import triton_launch

    return triton_launch.forward(q, k, v, operands, spec)


def _backward(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    operands: Tensors,
    out: torch.Tensor,
    lse: torch.Tensor,
    spec: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    from attn_compiler.lowerings import triton_launch

    return triton_launch.gradients(grad_out, grad_lse, q, k, v, operands, out, lse, spec)


register_family(
    "triton",
    forward=_forward,
    backward=_backward,
    differentiable=differentiable,
    dispatch_key="CompositeExplicitAutograd",
)
