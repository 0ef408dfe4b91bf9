"""Attention on a CPU by rows: each run of queries that see the same keys is a call of PyTorch's flash kernel on those keys, without a mask.

Padding, documents, windows and the empty part of a cache cost nothing then. The host reads which keys those are.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from attn_compiler.lowerings.base import Emitter, LayoutDemand, Operands
from attn_compiler.lowerings.rows.pieces import operand_names
from attn_compiler.lowerings.rows.takes import TAKES
from attn_compiler.lowerings.shared.limits import common as limits, mask_limits
from attn_compiler.lowerings.shared.limits.takes import refused
from attn_compiler.lowerings.shared.parts import part_tensors, site_parts as parts
from attn_compiler.lowerings.shared.parts.by_parts import ByParts
from attn_compiler.lowerings.shared.parts.site_parts import ADDED
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason, refuse
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.target import Target


class CpuRows(ByParts):
    """`attn_compiler::rows` (ops.py)."""

    name = "rows"

    def unavailable(self, target: Target) -> list[Reason]:
        if target.device != "cpu":
            return refuse(Code.DEVICE, "runs on the CPU", f"device {target.device}")
        return limits.check_switch("flash", target)

    def why_not(self, spec: AttentionSpec, target: Target) -> list[Reason]:
        machine = self.unavailable(target) or limits.check_device(spec, "cpu")
        return machine or [*refused(TAKES, spec), *_check_parts(spec), *_check_added(spec)]

    def demand(self, spec: AttentionSpec) -> LayoutDemand:
        return LayoutDemand()

    def emit(self, emitter: Emitter, spec: AttentionSpec, operands: Operands) -> fx.Node:
        made = part_tensors.emit_parts(emitter, spec, operands, parts.parts(spec))
        further = [made[name] for name in operand_names(spec)]
        leaf = torch.ops.attn_compiler.rows.default
        outputs = emitter.call(leaf, operands.q, operands.k, operands.v, further, spec.to_text())
        return emitter.call(operator.getitem, outputs, 0)


def _check_added(spec: AttentionSpec) -> list[Reason]:
    """Refuse biases in float64 and biases with a gradient: float32 is computed here, and PyTorch's kernel has no such gradient."""
    if not parts.parts(spec).kinds & ADDED:
        return []
    if spec.dtype == "float64":
        rule = "what is added to the scores is computed in float32"
        return refuse(Code.DTYPE, rule, f"dtype {spec.dtype}", "run the model in float32")
    return mask_limits.check_no_bias_gradient(spec)


def _check_parts(spec: AttentionSpec) -> list[Reason]:
    found, beyond = parts.parts(spec), TAKES.beyond(spec)
    if beyond:
        rule = "what a query may see is an interval of keys, keys of a document, or known of each key"
        return refuse(Code.MASK_KIND, rule, spec.mask.words)
    if not found.kinds:
        return refuse(Code.NOTHING_LEFT_OUT, "some keys are left out", f"the mask is {spec.mask.words}")
    return []
