"""The leaf op of attention by rows, on a CPU. Its operands are those of `pieces.operand_names`; its text is `AttentionSpec.to_text()`."""

from __future__ import annotations

from attn_compiler.lowerings.shared.ops.leaf_ops import Tensors, late, register_family


def _differentiable(operands: Tensors, spec: str) -> list[bool]:
    return [False] * len(operands)


register_family(
    "rows",
    forward=late("rows.run", "forward"),
    backward=late("rows.run", "backward"),
    differentiable=_differentiable,
    dispatch_key="CPU",
)
