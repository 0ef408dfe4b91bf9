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
from attn_compiler.lowerings.cudnn.fp8 import CudnnFp8
from attn_compiler.lowerings.cudnn.lowering import CudnnAttention
from attn_compiler.lowerings.decode.latent import DecodeLatent
from attn_compiler.lowerings.decode.lowering import Decode
from attn_compiler.lowerings.fa4.lowering import FlashAttention4
from attn_compiler.lowerings.hopper.fp8 import HopperFp8
from attn_compiler.lowerings.hopper.lowering import HopperAttention
from attn_compiler.lowerings.linear import table as linear_table
from attn_compiler.lowerings.linear.reference import run as by_chunks
from attn_compiler.lowerings.plain.absorbed import Absorbed
from attn_compiler.lowerings.plain.fp8_reference import ReferenceFp8
from attn_compiler.lowerings.plain.plain_math import PlainMath
from attn_compiler.lowerings.plain.reference import Reference
from attn_compiler.lowerings.plain.untouched import Untouched
from attn_compiler.lowerings.rows.lowering import CpuRows
from attn_compiler.lowerings.sdpa.lowering import SdpaCpuFlash, SdpaCudnn, SdpaEfficient, SdpaFlash
from attn_compiler.lowerings.shared.calls import keyless_gradient, tables
from attn_compiler.lowerings.shared.calls.failures import FAILURES
from attn_compiler.lowerings.shared.limits import untried
from attn_compiler.lowerings.shared.limits.common import check_scope
from attn_compiler.lowerings.shared.limits.mask_limits import check_own_rows
from attn_compiler.lowerings.shared.parts import score_changes
from attn_compiler.lowerings.triton.fp8 import TritonFp8
from attn_compiler.lowerings.triton.lowering import TritonAttention
from attn_compiler.reasons.decisions import Reason
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.linear import LinearSpec
from attn_compiler.spec.target import Target

__all__ = [
    "LINEAR_NAMES",
    "LOWERINGS",
    "PACKAGES",
    "Emitter",
    "LayoutDemand",
    "Lowering",
    "Operands",
    "by_chunks",
    "by_name",
    "cannot_build",
    "check_added_speed",
    "check_flex_call",
    "check_fp8_speed",
    "check_own_rows",
    "check_scope",
    "estimate",
    "evidence",
    "faster",
    "first_unopposed",
    "has_failed",
    "keyless_gradient",
    "linear_table",
    "names",
    "order",
    "packaged_twin",
    "score_changes",
    "standing",
    "tables",
    "timed",
    "with_reason",
]

LOWERINGS: tuple[Lowering, ...] = (
    Reference(),
    ReferenceFp8(),
    SdpaCudnn(),
    SdpaFlash(),
    SdpaEfficient(),
    SdpaCpuFlash(),
    CpuRows(),
    FlashAttention4(),
    HopperAttention(),
    TritonAttention(),
    HopperFp8(),
    TritonFp8(),
    CudnnAttention(),
    CudnnFp8(),
    Decode(),
    DecodeLatent(),
    PlainMath(),
    Absorbed(),
    Untouched(),
)

#: the lowerings of linear attention, whose specs are others (linear/table.py)
LINEAR_NAMES: tuple[str, ...] = tuple(lowering.name for lowering in linear_table.LINEAR_LOWERINGS)

_BY_NAME = {lowering.name: lowering for lowering in LOWERINGS}


def by_name(name: str) -> Lowering:
    """Return the lowering of that name. Raises KeyError that lists the known names."""
    if name not in _BY_NAME:
        raise KeyError(f"no lowering {name!r}; there are {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


def names() -> tuple[str, ...]:
    """Return the names that options may give."""
    return *(lowering.name for lowering in LOWERINGS), *LINEAR_NAMES


def cannot_build(name: str, spec: AttentionSpec, target: Target) -> list[Reason]:
    """Return why a lowering's kernels can't be built for a spec: they failed before, or the lowering itself says so."""
    return has_failed(name, spec, target) or by_name(name).cannot_build(spec, target)


def has_failed(name: str, spec: AttentionSpec | LinearSpec, target: Target) -> list[Reason]:
    """Return the failures of a lowering's kernels so far, for this spec or on this machine."""
    return FAILURES.reasons(name, spec) or untried.reasons(name, target)


def packaged_twin(op: Any) -> Any:
    """Return the op that replaces one of ours in an exported program (shared/launching/packaged_ops.py), or None if there is none."""
    from attn_compiler.lowerings.shared.launching.packaged_ops import twin

    return twin(op)
