"""Attention in half precision on Hopper's own instructions (kernels/forward_sm90.py). call.py chooses the fastest backward, or the fastest
of those that give the same bits in every run if the user wants that.

Imports no Triton: a site is described, decided and rewritten on machines that have none.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from attn_compiler.lowerings.base import Emitter, LayoutDemand, Operands, first_two
from attn_compiler.lowerings.hopper import added, limits, mask_bits
from attn_compiler.lowerings.hopper.call import FOR_ALL, HopperCall, backward_of, call_of
from attn_compiler.lowerings.hopper.ops import IN_ORDER, given_op, grad_operands
from attn_compiler.lowerings.shared.limits import kernel_limits
from attn_compiler.lowerings.shared.parts import part_tensors, site_parts
from attn_compiler.lowerings.shared.parts.by_parts import ByParts
from attn_compiler.lowerings.shared.parts.kernel_plan import Plan
from attn_compiler.lowerings.shared.parts.part_tensors import Size
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason, refuse
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.target import Target


class HopperAttention(ByParts):
    """`attn_compiler::hopper` (ops.py)."""

    name = "hopper"

    def unavailable(self, target: Target) -> list[Reason]:
        return limits.check_machine(target)

    def cannot_package(self) -> list[Reason]:
        return refuse(
            Code.PACKAGED,
            "what is in an exported program is compiled by Inductor, which takes kernels in Triton's language",
            f"the kernel of {self.name} is in Gluon",
            "the Triton kernels and PyTorch's own serve exported programs; this one serves torch.compile(model, "
            "backend='attn_compiler')",
        )

    def why_not(self, spec: AttentionSpec, target: Target) -> list[Reason]:
        return limits.check_hopper(spec, target)

    def demand(self, spec: AttentionSpec) -> LayoutDemand:
        return kernel_limits.DEMAND

    def gives_means(self, spec: AttentionSpec, target: Target) -> bool:
        ours = not spec.needs_grad or backward_of(spec, target) in (self.name, FOR_ALL)
        return ours and (site_parts.leaves_out(spec) or spec.adds_unread)

    def plan(self, spec: AttentionSpec, target: Target) -> HopperCall:
        return call_of(spec, target)

    def emit(self, emitter: Emitter, plan: HopperCall, operands: Operands, /) -> fx.Node:
        return emitter.call(operator.getitem, _outputs(emitter, plan, operands), 0)

    def emit_with_lse(self, emitter: Emitter, plan: HopperCall, operands: Operands, /) -> tuple[fx.Node, fx.Node]:
        return first_two(emitter, _outputs(emitter, plan, operands))


def _outputs(emitter: Emitter, call: HopperCall, operands: Operands) -> fx.Node:
    given, read = [operands.q, operands.k, operands.v], _read_by_forward(emitter, call, operands)
    if call.backward is None:
        return _leaf(emitter, given, read, call.text)
    detached, read = ([emitter.call(torch.Tensor.detach, x) for x in nodes] for nodes in (given, read))
    outputs = _leaf(emitter, detached, read, call.text)
    results = [emitter.call(operator.getitem, outputs, i) for i in range(2)]
    emitter.note("; ".join([f"backward: {call.backward}", *(f"{IN_ORDER}: {why}" for why in call.not_in_order)]))
    further = _read_by_backward(emitter, call, operands)
    with_gradient = getattr(torch.ops.attn_compiler, given_op(call.backward, is_part=call.spec.lse == "merged")).default
    return emitter.call(with_gradient, *given, [*results, *detached, *further], call.text)


def _leaf(emitter: Emitter, tensors: list[fx.Node], read: list[fx.Node], text: str) -> fx.Node:
    return emitter.call(torch.ops.attn_compiler.hopper.default, *tensors, read, text)


def _read_by_forward(emitter: Emitter, call: HopperCall, operands: Operands) -> list[fx.Node]:
    made = part_tensors.emit(emitter, call.spec, operands, call.tiles, ordered=call.ordered)
    named = dict(zip(call.parts.operands, made, strict=True))
    read = [node for name, node in named.items() if name != "tiles_by_key"]
    return [*read, *_further(emitter, call, operands, named, by_key=False)]


def _read_by_backward(emitter: Emitter, call: HopperCall, operands: Operands) -> list[fx.Node]:
    """Emit the operands of the backward, in the order of its family."""
    if call.grad_tiles is None:
        return []
    if call.backward == FOR_ALL:
        return part_tensors.emit(emitter, call.spec, operands, call.grad_tiles)
    made = part_tensors.emit(emitter, call.spec, operands, call.grad_tiles, ordered=call.ordered)
    named = dict(zip(call.parts.operands, made, strict=True))
    read = [named[name] for name in grad_operands(call.spec) if name in named]
    return [*read, *_further(emitter, call, operands, named, by_key=True)]


def _further(
    emitter: Emitter, call: HopperCall, operands: Operands, named: dict[str, fx.Node], *, by_key: bool
) -> list[fx.Node]:
    """Emit `further_operands`, and the lengths only for sites that have some."""
    if not mask_bits.is_there(call.parts) and not added.is_there(call.parts):
        return []
    lengths = part_tensors.lengths(emitter, call.spec, operands)
    return further_operands(emitter, call.parts, named, lengths, by_key=by_key)


def further_operands(
    emitter: Emitter, plan: Plan, named: dict[str, fx.Node], lengths: tuple[Size, Size], *, by_key: bool
) -> list[fx.Node]:
    """Emit this family's own operands: a dense mask as bits, and the added tensor that the copy engine reads. named: the plan's operands.
    lengths: of queries and of keys. by_key: the backward's bits."""
    emit, length = (mask_bits.emit_by_key, lengths[0]) if by_key else (mask_bits.emit, lengths[1])
    bits = [emit(emitter, named["mask"], length)] if mask_bits.is_there(plan) else []
    return [*bits, *([added.emit(emitter, plan, named, lengths)] if added.is_there(plan) else [])]
