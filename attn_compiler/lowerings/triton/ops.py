"""The leaf op of the Triton kernels, `attn_compiler::triton`: its text is a `shared.parts.kernel_plan.Call`.

operands: the plan's, in its order. The backward's list holds the gradients of `Plan.differentiable`. The first call imports triton: a dump
or a fake needs none.
"""

from __future__ import annotations

from attn_compiler.lowerings.shared.ops.leaf_ops import late, register_family
from attn_compiler.lowerings.shared.parts import site_parts as parts

register_family(
    "triton",
    forward=late("triton.launch", "forward", site="ForwardSite", notes=True),
    backward=late("triton.launch", "gradients", site="BackwardSite", notes=True),
    differentiable=parts.differentiable,
    dispatch_key="CompositeExplicitAutograd",
    has_part=True,
)
