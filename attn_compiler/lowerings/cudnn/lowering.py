"""cuDNN's attention by its own graph API, for sites that `sdpa_cudnn` can't express: windows, sinks, bottom-right, lengths, other head
dims.

Needs the optional package nvidia-cudnn-frontend (`pip install nvidia-cudnn-frontend`). Plans are built when a graph is compiled, for the
backward too: a shape that cuDNN refuses is refused here, with cuDNN's own message. A plan serves one shape, so symbolic sizes are refused:
a plan for each new length would be built in the middle of a step.
"""

from __future__ import annotations

import math
import operator

import torch
from torch import fx

from attn_compiler.lowerings.base import Emitter, LayoutDemand, Operands
from attn_compiler.lowerings.cudnn import limits as graph_limits, operands as cudnn_operands, plan, plans as cudnn_plans
from attn_compiler.lowerings.cudnn.plan import CudnnCall
from attn_compiler.lowerings.cudnn.takes import TAKES
from attn_compiler.lowerings.shared.limits import common as limits, cudnn_limits, mask_limits, takes
from attn_compiler.lowerings.shared.parts.by_parts import ByParts
from attn_compiler.lowerings.shared.parts.site_parts import Parts
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason, refuse
from attn_compiler.spec import dims
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.target import Target

#: most bytes of workspace of a backward for all scores at once
WORKSPACE_LIMIT = 2 * 2**30


class CudnnAttention(ByParts):
    """`attn_compiler::cudnn` (ops.py)."""

    name = "cudnn"

    def unavailable(self, target: Target) -> list[Reason]:
        return graph_limits.check_machine(target)

    def why_not(self, spec: AttentionSpec, target: Target) -> list[Reason]:
        return self.unavailable(target) or rules(spec, target)

    def cannot_build(self, spec: AttentionSpec, target: Target) -> list[Reason]:
        return cudnn_plans.refusals(call_of(spec, target), spec, self.demand(spec), target)

    def demand(self, spec: AttentionSpec) -> LayoutDemand:
        return LayoutDemand(alignment=plan.ALIGNMENT, zero_strides=False)

    def _parts(self, spec: AttentionSpec) -> Parts:
        return plan.parts(spec)

    def emit(self, emitter: Emitter, spec: AttentionSpec, operands: Operands) -> fx.Node:
        call = call_of(spec, emitter.target)
        further = cudnn_operands.emit(emitter, call, spec, operands)
        given = {"q": operands.q, "k": operands.k, "v": operands.v} | dict(zip(call.operands, further, strict=True))
        values = {name: emitter.value(node) for name, node in given.items()}
        plans = cudnn_plans.built(call, values, emitter.target)
        if plans:
            emitter.note(cudnn_plans.words(plans))
        leaf = torch.ops.attn_compiler.cudnn.default
        outputs = emitter.call(leaf, operands.q, operands.k, operands.v, further, call.to_text())
        return emitter.call(operator.getitem, outputs, 0)


def rules(spec: AttentionSpec, target: Target) -> list[Reason]:
    """Return the refusals on a machine that has cuDNN, before cuDNN is asked."""
    machine = limits.check_device(spec, "cuda")
    if machine:
        return machine
    reasons = [
        *takes.refused(TAKES, spec),
        *cudnn_limits.check_dropout(spec, target),
        *plan.reasons(spec),
    ]
    if reasons:
        return reasons
    call = call_of(spec, target)
    return [*_check_call(call, spec), *graph_limits.check_graph(call, spec, target)]


def call_of(spec: AttentionSpec, target: Target) -> CudnnCall:
    """Return the call for a spec that `plan.reasons` does not refuse."""
    return graph_limits.counted(plan.call_of(spec, deterministic=target.deterministic), spec, target)


def _check_call(call: CudnnCall, spec: AttentionSpec) -> list[Reason]:
    """Refuse combinations that cuDNN's graph can't express."""
    reasons = mask_limits.check_no_keyless_rows(spec)
    if call.right is not None and call.right < 0:
        reasons += refuse(Code.MASK_KIND, "a query may use the key at its own position", spec.mask.words)
    if call.left is not None and call.left < 0:
        reasons += refuse(Code.MASK_KIND, "a window reaches back from the query's own position", spec.mask.words)
    more_queries = dims.at_least(spec.seqlen_q) > dims.at_least(spec.seqlen_kv)
    if more_queries and (call.from_end or call.left is not None):
        rule = "with a window or a diagonal from the bottom right, no more queries than keys"
        reasons.append(mask_limits.lengths_reason(spec, rule))
    if call.from_end and (call.bias or call.lengths or call.dropout_p):
        rule = "with a diagonal from the bottom right, no bias, no lengths and no dropout"
        reasons += refuse(Code.DIAGONAL, rule, f"{spec.mask.words}, {spec.score.words}")
    added = spec.added_tensor
    if call.bias and added is not None and spec.seqlen_q != 1 and (1, *added.shape)[-2] == 1:
        # On an H200 with cuDNN 9.19 one row for all queries gave wrong gradients, and wrong outputs with a gradient of its own.
        reasons += refuse(Code.MASK_SHAPE, "a bias has a row for each query", added.words)
    if call.sinks and spec.seqlen_q == 1:
        reasons += refuse(Code.LENGTHS, "with sinks, more than one query", "seqlen_q 1")
    return reasons + _check_workspace(call, spec)


def _check_workspace(call: CudnnCall, spec: AttentionSpec) -> list[Reason]:
    """Bound the workspace: a backward that adds up in a fixed order, or makes a bias's gradient, keeps all of dP, in half precision."""
    if not (call.deterministic or call.bias_grad):
        return []
    sizes = (spec.batch, spec.num_heads_q, _padded(spec.seqlen_q), _padded(spec.seqlen_kv))
    needed = 2 * math.prod(dims.at_least(size) for size in sizes)
    if needed <= WORKSPACE_LIMIT:
        return []
    what = "a deterministic backward" if call.deterministic else "a bias with gradient"
    rule = f"{what} takes at most {WORKSPACE_LIMIT // 2**20} MiB for all scores"
    return refuse(Code.MEMORY, rule, f"{needed // 2**20} MiB", "use a smaller batch")


def _padded(size: int | str) -> int:
    return -(-dims.at_least(size) // 64) * 64
