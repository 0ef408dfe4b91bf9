"""The leaf op of the Triton kernels, `attn_compiler::triton`: its text is a `triton_plan.Call`.

operands: those that the plan names, in its order. The backward's list holds the gradients of `Plan.differentiable`.
triton itself is imported by the first call, not before: a dump or a fake needs none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attn_compiler.lowerings.shared import parts
from attn_compiler.lowerings.shared.kernel_plan import Call
from attn_compiler.lowerings.shared.ops import late, register_family

Tensors = Sequence[torch.Tensor]


def differentiable(operands: Tensors, text: str) -> list[bool]:
    """For each operand whether it gets a gradient. Raises ValueError if their number is not the plan's."""
    plan = parts.of(Call.from_text(text).spec)
    if len(plan.operands) != len(operands):
        raise ValueError(f"the plan has the operands {', '.join(plan.operands) or 'none'}; got {len(operands)}")
    return [name in plan.differentiable for name in plan.operands]


register_family(
    "triton",
    forward=late("triton.launch", "forward"),
    backward=late("triton.launch", "gradients"),
    differentiable=differentiable,
    dispatch_key="CompositeExplicitAutograd",
)
