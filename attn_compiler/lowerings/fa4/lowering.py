"""FlashAttention-4 (CuTe kernels, optional: `pip install flash-attn-4`): causal, windows, softcap, sinks; Hopper and Blackwell.

Its kernels are compiled when the site is decided, forward and backward, so that one that does not compile is a refusal. Imports
no flash_attn: a site is described, decided and rewritten on machines that have none.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from attn_compiler.lowerings.base import Emitter, LayoutDemand, Operands
from attn_compiler.lowerings.fa4 import limits
from attn_compiler.lowerings.fa4.plan import Fa4Call
from attn_compiler.lowerings.shared.ops.leaf_ops import late
from attn_compiler.lowerings.shared.parts.by_parts import ByParts
from attn_compiler.reasons.decisions import Reason
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.dtypes import HALVES
from attn_compiler.spec.target import Target

# TMA wants strides that are multiples of this many bytes.
_ALIGNMENT = 16
_why_not_compiled = late("fa4.launch", "why_not_compiled")
_SINK_DTYPES = (*HALVES, torch.float32)


class FlashAttention4(ByParts):
    """`attn_compiler::fa4` (ops.py)."""

    name = "fa4"

    def unavailable(self, target: Target) -> list[Reason]:
        return limits.check_machine(target)

    def why_not(self, spec: AttentionSpec, target: Target) -> list[Reason]:
        return limits.check_fa4(spec, target)

    def cannot_build(self, spec: AttentionSpec, target: Target) -> list[Reason]:
        refused: list[Reason] = _why_not_compiled(self.plan(spec, target))
        return refused

    def demand(self, spec: AttentionSpec) -> LayoutDemand:
        return LayoutDemand(alignment=_ALIGNMENT, zero_strides=False)

    def plan(self, spec: AttentionSpec, target: Target) -> Fa4Call:
        return Fa4Call(spec=spec, version=target.flash_attn_4, sm=target.sm, deterministic=target.deterministic)

    def emit(self, emitter: Emitter, plan: Fa4Call, operands: Operands, /) -> fx.Node:
        further = [] if operands.sinks is None else [_sinks(emitter, operands.sinks)]
        leaf = torch.ops.attn_compiler.fa4.default
        outputs = emitter.call(leaf, operands.q, operands.k, operands.v, further, plan.to_text())
        return emitter.call(operator.getitem, outputs, 0)


def _sinks(emitter: Emitter, sinks: fx.Node) -> fx.Node:
    if emitter.value(sinks).dtype in _SINK_DTYPES:
        return sinks
    return emitter.call(torch.Tensor.to, sinks, torch.float32)
