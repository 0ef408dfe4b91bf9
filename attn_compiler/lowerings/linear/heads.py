"""Widths of heads that the kernels of linear attention take: ours, and those of flash-linear-attention."""

from __future__ import annotations

from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason, refuse
from attn_compiler.spec.linear import LinearSpec

#: largest size of a head
_WIDEST = 256


def check_heads(spec: LinearSpec) -> list[Reason]:
    """Refuse heads that are too wide."""
    if max(spec.head_dim_k, spec.head_dim_v) <= _WIDEST:
        return []
    rule = f"a head of linear attention has at most {_WIDEST} channels"
    observed = f"{spec.head_dim_k} of k, {spec.head_dim_v} of v"
    return refuse(Code.HEAD_DIM, rule, observed)
