"""Our own Triton kernels: every mask and score change that a spec can hold, forward and backward, any GPU since Ampere.

The kernels are independent of graphs (`Plan` holds their arguments); ordinary nodes make their run-time operands here. Imports no Triton:
a site is described, decided and rewritten on machines that have none.
"""

from __future__ import annotations

import operator

from torch import fx

from attn_compiler.lowerings.base import Emitter, LayoutDemand, Operands, first_two
from attn_compiler.lowerings.shared.limits import kernel_limits
from attn_compiler.lowerings.shared.ops import leaf_ops as ops
from attn_compiler.lowerings.shared.parts import part_tensors, tile_table
from attn_compiler.lowerings.shared.parts.by_parts import ByParts
from attn_compiler.lowerings.shared.parts.kernel_plan import Call
from attn_compiler.lowerings.shared.parts.site_parts import leaves_out
from attn_compiler.reasons.decisions import Reason
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.target import Target


class TritonAttention(ByParts):
    """`attn_compiler::triton` (ops.py)."""

    name = "triton"

    def unavailable(self, target: Target) -> list[Reason]:
        return kernel_limits.check_machine(target)

    def cannot_package(self) -> list[Reason]:
        return []

    def why_not(self, spec: AttentionSpec, target: Target) -> list[Reason]:
        return kernel_limits.check_site(spec, target)

    def demand(self, spec: AttentionSpec) -> LayoutDemand:
        return kernel_limits.DEMAND

    def gives_means(self, spec: AttentionSpec, target: Target) -> bool:
        return leaves_out(spec) or spec.adds_unread

    def emit(self, emitter: Emitter, spec: AttentionSpec, operands: Operands) -> fx.Node:
        return emitter.call(operator.getitem, _outputs(emitter, spec, operands), 0)

    def emit_with_lse(self, emitter: Emitter, spec: AttentionSpec, operands: Operands) -> tuple[fx.Node, fx.Node]:
        return first_two(emitter, _outputs(emitter, spec, operands))


def _outputs(emitter: Emitter, spec: AttentionSpec, operands: Operands) -> fx.Node:
    one_kv = operands.k is operands.v
    tiles = (tile_table.tiles_of_one if one_kv else tile_table.tiles)(spec, emitter.target)
    further = part_tensors.emit(emitter, spec, operands, tiles)
    text = Call(spec=spec, tiles=tiles, one_kv=one_kv).to_text()
    return emitter.call(ops.leaf_op("triton", spec), operands.q, operands.k, operands.v, further, text)
