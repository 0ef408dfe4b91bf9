"""The leaf op of FlashAttention-4, `attn_compiler::fa4`: its text is a `plan.Fa4Call`. operands: the sinks (Hq,), if the spec has some.

The first call imports flash_attn: a dump or a fake needs none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attn_compiler.lowerings.fa4.plan import Fa4Call
from attn_compiler.lowerings.shared.ops.leaf_ops import late, register_family

Tensors = Sequence[torch.Tensor]


def differentiable(operands: Tensors, text: str) -> list[bool]:
    """Return for each operand whether it gets a gradient. Raises ValueError if their number is not the spec's."""
    settings = Fa4Call.from_text(text).settings
    if len(operands) != settings.sinks:
        raise ValueError(f"the spec has {'sinks' if settings.sinks else 'no operands'}; got {len(operands)}")
    return [settings.sinks_grad] * len(operands)


register_family(
    "fa4",
    forward=late("fa4.launch", "forward", site="ForwardSite"),
    backward=late("fa4.launch", "gradients", site="BackwardSite"),
    differentiable=differentiable,
    dispatch_key="CompositeExplicitAutograd",
)
