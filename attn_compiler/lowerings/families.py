"""The list of lowerings, and what passes ask of them."""

from __future__ import annotations

from typing import Any

from attn_compiler.lowerings.base import Emitter, LayoutDemand, Lowering, Operands
from attn_compiler.lowerings.choice import timed
from attn_compiler.lowerings.choice.evidence import estimate, evidence
from attn_compiler.lowerings.choice.first import first_unopposed, with_reason
from attn_compiler.lowerings.choice.flex import check_flex_call
from attn_compiler.lowerings.choice.fp8_speed import check_fp8_speed
from attn_compiler.lowerings.choice.hopper_added import check_added_speed
from attn_compiler.lowerings.choice.packages import PACKAGES, faster, standing
from attn_compiler.lowerings.choice.priorities import order
from attn_compiler.lowerings.homes import CLASSES, by_name
from attn_compiler.lowerings.linear import table as linear_table
from attn_compiler.lowerings.linear.reference import run as by_chunks
from attn_compiler.lowerings.shared.calls import keyless_gradient, tables
from attn_compiler.lowerings.shared.limits.common import check_scope
from attn_compiler.lowerings.shared.limits.mask_limits import check_own_rows
from attn_compiler.lowerings.shared.parts import score_changes

__all__ = [
    "LOWERINGS", "PACKAGES", "Emitter", "LayoutDemand", "Lowering", "Operands", "by_chunks", "check_added_speed",
    "check_flex_call", "check_fp8_speed", "check_own_rows", "check_scope", "estimate", "evidence", "faster",
    "first_unopposed", "keyless_gradient", "linear_table", "order", "packaged_twin", "score_changes", "standing",
    "tables", "timed", "with_reason",
]  # fmt: skip

LOWERINGS: tuple[Lowering, ...] = tuple(map(by_name, CLASSES))


def packaged_twin(op: Any) -> Any:
    """Return the op that replaces one of ours in an exported program (shared/launching/packaged_ops.py), or None if there is none."""
    from attn_compiler.lowerings.shared.launching.packaged_ops import twin

    return twin(op)
