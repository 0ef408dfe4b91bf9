"""Attention in half precision on Hopper as its hardware wants it (kernels/forward_sm90.py). The backward is the one that is fastest there,
and of those that give the same bits in every run if the user wants that (`backward_of`).

Imports no Triton: a site is described, decided and rewritten on machines that have none.
"""

from __future__ import annotations

import dataclasses
import operator

import torch
from torch import fx

from attn_compiler.lowerings.base import Emitter, LayoutDemand, Lowering, Operands, Tiles, first_two
from attn_compiler.lowerings.choice import in_order
from attn_compiler.lowerings.hopper import added, limits, mask_bits
from attn_compiler.lowerings.hopper.ops import FAMILY, IN_ORDER, given_op
from attn_compiler.lowerings.hopper.plan import (
    blocks_of,
    cudnn_is_faster,
    grad_blocks_of,
    has_added,
    has_backward,
    is_ordered,
)
from attn_compiler.lowerings.shared.calls import cudnn_backward
from attn_compiler.lowerings.shared.limits import kernel_limits
from attn_compiler.lowerings.shared.parts import part_tensors, site_parts, tile_table
from attn_compiler.lowerings.shared.parts.kernel_plan import Call, Plan
from attn_compiler.lowerings.shared.parts.part_tensors import Size
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.target import Target

#: the family with a backward for all that this one takes, which gives the same bits in every run
_FOR_ALL = "triton"
_NO_REPEATED = LayoutDemand(last_stride_one=False, zero_strides=False)


class HopperAttention(Lowering):
    """`attn_compiler::hopper` (ops.py)."""

    name = "hopper"

    def unavailable(self, target: Target) -> list[Reason]:
        return limits.check_machine(target)

    def cannot_package(self) -> list[Reason]:
        return [
            Reason(
                code=Code.PACKAGED,
                rule="what is in an exported program is compiled by Inductor, which takes kernels in Triton's language",
                observed=f"the kernel of {self.name} is in Gluon",
                remedy="the Triton kernels and PyTorch's own serve exported programs; this one serves torch.compile(model, "
                "backend='attn_compiler')",
            )
        ]

    def why_not(self, spec: AttentionSpec, target: Target) -> list[Reason]:
        return limits.check_hopper(spec, target)

    def demand(self, spec: AttentionSpec) -> LayoutDemand:
        return kernel_limits.DEMAND

    def gives_means(self, spec: AttentionSpec, target: Target) -> bool:
        ours = not spec.needs_grad or backward_of(spec, target) in (self.name, _FOR_ALL)
        return ours and (site_parts.leaves_out(spec) or spec.adds_unread)

    def emit(self, emitter: Emitter, spec: AttentionSpec, operands: Operands) -> fx.Node:
        return emitter.call(operator.getitem, _outputs(emitter, spec, operands), 0)

    def emit_with_lse(self, emitter: Emitter, spec: AttentionSpec, operands: Operands) -> tuple[fx.Node, fx.Node]:
        return first_two(emitter, _outputs(emitter, spec, operands))


def _outputs(emitter: Emitter, spec: AttentionSpec, operands: Operands) -> fx.Node:
    tiles = tile_table.tiles(spec, emitter.target)
    text = Call(spec=spec, tiles=tiles).to_text()
    own = dataclasses.replace(tiles, forward=blocks_of(spec).tile)
    parts = part_tensors.emit(emitter, spec, operands, own, ordered=is_ordered(spec))
    read = [*_without("tiles_by_key", spec, parts), *_further(emitter, spec, operands, parts)]
    given = [operands.q, operands.k, operands.v]
    if not spec.needs_grad:
        return _call(emitter, given, read, text)
    detached, read = ([emitter.call(torch.Tensor.detach, x) for x in nodes] for nodes in (given, read))
    outputs = _call(emitter, detached, read, text)
    results = [emitter.call(operator.getitem, outputs, i) for i in range(2)]
    family = backward_of(spec, emitter.target)
    refused = why_not_in_order(spec, emitter.target) if family == _FOR_ALL else []
    emitter.note("; ".join([f"backward: {family}", *(f"{IN_ORDER}: {reason}" for reason in refused)]))
    further = read_by_backward(family, emitter, spec, operands, tiles)
    with_gradient = getattr(torch.ops.attn_compiler, given_op(family, is_part=spec.lse == "merged")).default
    return emitter.call(with_gradient, *given, [*results, *detached, *further], text)


def backward_of(spec: AttentionSpec, target: Target) -> str:
    """Whose backward a site gets: this family's for the head dims that it takes, but where cuDNN's was measured to be faster; else cuDNN's
    where PyTorch's takes the site, or that of our Triton kernels.

    cuDNN's reads no repeated axes. This lowering takes them as they are, so that none is copied.

    Under torch.use_deterministic_algorithms the Triton kernels' or this family's in one order: cuDNN's and this family's other one add up
    in no fixed order. Dynamo compiles anew when that is switched.
    """
    is_repeated = any(_NO_REPEATED.broken_by(x) for x in (spec.q, spec.k, spec.v))
    takes_cudnn = not is_repeated and not cudnn_backward.why_not(spec, target)
    if target.deterministic:
        return IN_ORDER if has_backward(spec) and not why_not_in_order(spec, target) else _FOR_ALL
    if has_backward(spec) and not (takes_cudnn and cudnn_is_faster(spec)):
        return FAMILY
    return cudnn_backward.FAMILY if takes_cudnn else _FOR_ALL


def why_not_in_order(spec: AttentionSpec, target: Target) -> list[Reason]:
    """Against this family's backward in one order, of a site that has to have one that gives the same bits in every run, and whose head
    dims it takes; nothing of other sites."""
    return in_order.check_order_speed(spec, target) if target.deterministic and has_backward(spec) else []


def read_by_backward(
    family: str, emitter: Emitter, spec: AttentionSpec, operands: Operands, tiles: Tiles
) -> list[fx.Node]:
    """The operands of a family's backward, in its order. tiles: of the Triton family."""
    if family == _FOR_ALL:
        return part_tensors.emit(emitter, spec, operands, tiles)
    if family not in (FAMILY, IN_ORDER):
        return []
    own = dataclasses.replace(tiles, grad_kv=grad_blocks_of(spec).tile)
    made = part_tensors.emit(emitter, spec, operands, own, ordered=is_ordered(spec))
    plan = site_parts.of(spec)
    named = dict(zip(plan.operands, made, strict=True))
    further = further_grad_operands(emitter, plan, named, part_tensors.lengths(emitter, spec, operands))
    return [*_without("tiles", spec, made), *further]


def _further(emitter: Emitter, spec: AttentionSpec, operands: Operands, parts: list[fx.Node]) -> list[fx.Node]:
    """Operands of this family's own: a dense mask as bits, what the copy engine brings to be added to the scores."""
    plan = site_parts.of(spec)
    if not plan.mask and not has_added(spec):
        return []
    named = dict(zip(plan.operands, parts, strict=True))
    return further_operands(emitter, plan, named, part_tensors.lengths(emitter, spec, operands))


def further_operands(
    emitter: Emitter, plan: Plan, named: dict[str, fx.Node], lengths: tuple[Size, Size]
) -> list[fx.Node]:
    """named: the plan's operands. lengths: of queries and of keys."""
    bits = [mask_bits.emit(emitter, named["mask"], lengths[1])] if mask_bits.is_there(plan) else []
    return [*bits, *([added.emit(emitter, plan, named, lengths)] if added.is_there(plan) else [])]


def further_grad_operands(
    emitter: Emitter, plan: Plan, named: dict[str, fx.Node], lengths: tuple[Size, Size]
) -> list[fx.Node]:
    """As `further_operands`, of the backward."""
    bits = [mask_bits.emit_by_key(emitter, named["mask"], lengths[0])] if mask_bits.is_there(plan) else []
    return [*bits, *([added.emit(emitter, plan, named, lengths)] if added.is_there(plan) else [])]


def _call(emitter: Emitter, tensors: list[fx.Node], read: list[fx.Node], text: str) -> fx.Node:
    return emitter.call(torch.ops.attn_compiler.hopper.default, *tensors, read, text)


def _without(left_out: str, spec: AttentionSpec, nodes: list[fx.Node]) -> list[fx.Node]:
    names = site_parts.of(spec).operands
    return [node for name, node in zip(names, nodes, strict=True) if name != left_out]
