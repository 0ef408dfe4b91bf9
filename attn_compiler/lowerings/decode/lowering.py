"""Our own kernel for few queries over a cache: it reads only the filled part, from an unmodified model. Forward only.

Imports no Triton: a site is described, decided and rewritten on machines that have none.
"""

from __future__ import annotations

import dataclasses
import operator

import torch
from torch import fx

from attn_compiler.lowerings.base import Emitter, LayoutDemand, Operands, first_two
from attn_compiler.lowerings.choice.rows import MOST_QUERIES
from attn_compiler.lowerings.decode import gathered, operands as decode_operands, schedule as decode_schedule
from attn_compiler.lowerings.decode.plan import DecodeCall
from attn_compiler.lowerings.decode.takes import TAKES
from attn_compiler.lowerings.shared.limits import kernel_limits, mask_limits, takes
from attn_compiler.lowerings.shared.parts.by_parts import ByParts
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason, refuse
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.target import Target

#: first compute capability where Triton converts both FP8 dtypes, and bytes of a vector of them
_FP8_SINCE, _VECTOR = 89, 16


class Decode(ByParts):
    """`attn_compiler::decode` (ops.py)."""

    name = "decode"

    def unavailable(self, target: Target) -> list[Reason]:
        return kernel_limits.check_machine(target)

    def why_not(self, spec: AttentionSpec, target: Target) -> list[Reason]:
        refused = kernel_limits.check_site(spec, target)
        # An lse that is read shows rows whose scores are all very low numbers. A single query always has its own key.
        if spec.seqlen_q != 1 and spec.lse != "unread":
            refused += mask_limits.check_numbers_read(spec)
        # Only a spec that is not refused has known parts.
        return refused or [
            *takes.refused(TAKES, spec),
            *_check_queries(spec),
            *_check_heads_known(spec),
            *TAKES.check_parts(spec, "no packed {}"),
        ]

    def demand(self, spec: AttentionSpec) -> LayoutDemand:
        """Ask for no strides in float32, where a copy of the cache costs more than they gain: unaligned elements are loaded one by one."""
        return LayoutDemand(alignment=1 if spec.dtype == "float32" else _VECTOR)

    def gives_means(self, spec: AttentionSpec, target: Target) -> bool:
        return gathered.chosen_of(spec) is None

    def emit(self, emitter: Emitter, spec: AttentionSpec, operands: Operands) -> fx.Node:
        read = gathered.read(emitter, spec, operands)
        return read.restored(emitter, emitter.call(operator.getitem, _outputs(emitter, read.spec, read.operands), 0))

    def emit_with_lse(self, emitter: Emitter, spec: AttentionSpec, operands: Operands) -> tuple[fx.Node, fx.Node]:
        read = gathered.read(emitter, spec, operands)
        out, lse = first_two(emitter, _outputs(emitter, read.spec, read.operands))
        return read.restored(emitter, out), read.restored(emitter, lse)


def _outputs(emitter: Emitter, spec: AttentionSpec, operands: Operands) -> fx.Node:
    spec, k, v = as_read(spec, operands, emitter.target)
    call = DecodeCall(spec=spec, schedule=decode_schedule.schedule(spec, emitter.target), one_kv=k is v)
    text, further = decode_operands.emit(emitter, call, operands)
    return emitter.call(torch.ops.attn_compiler.decode.default, operands.q, k, v, further, text)


def as_read(spec: AttentionSpec, operands: Operands, target: Target) -> tuple[AttentionSpec, fx.Node, fx.Node]:
    """Return the spec of the tensors that the kernel reads, with k and v: those of an FP8 cache where the machine converts them and
    vectors are aligned."""
    kept = spec.stored
    if kept is not None and operands.stored is not None and (target.sm >= _FP8_SINCE or target.triton_interpreted):
        demand = LayoutDemand(alignment=_VECTOR)
        if not any(demand.broken_by(tensor) for tensor in (kept.k, kept.v)):
            return spec, operands.stored.k, operands.stored.v
    return dataclasses.replace(spec, stored=None), operands.k, operands.v


def _check_queries(spec: AttentionSpec) -> list[Reason]:
    if isinstance(spec.seqlen_q, int) and spec.seqlen_q <= MOST_QUERIES:
        return []
    rule = f"seqlen_q is known, and at most {MOST_QUERIES}"
    return refuse(Code.LENGTHS, rule, f"seqlen_q {spec.seqlen_q}")


def _check_heads_known(spec: AttentionSpec) -> list[Reason]:
    if isinstance(spec.num_heads_q, int) and isinstance(spec.num_heads_kv, int):
        return []
    observed = f"num_heads_q {spec.num_heads_q}, num_heads_kv {spec.num_heads_kv}"
    return refuse(Code.SYMBOLIC, "the numbers of heads are known", observed)
