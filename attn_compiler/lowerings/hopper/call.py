"""Decisions on a site that Hopper's forward takes, made before any node: its tiles and the family of its backward."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from attn_compiler.lowerings.base import LayoutDemand, Tiles
from attn_compiler.lowerings.choice import in_order
from attn_compiler.lowerings.hopper import plan
from attn_compiler.lowerings.hopper.ops import FAMILY, IN_ORDER
from attn_compiler.lowerings.shared.calls import cudnn_backward
from attn_compiler.lowerings.shared.parts import site_parts, tile_table
from attn_compiler.lowerings.shared.parts.kernel_plan import Call, Plan
from attn_compiler.reasons.decisions import Reason
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.target import Target

#: the family whose backward takes all that this one takes, and gives the same bits in every run
FOR_ALL = "triton"
_NO_REPEATED = LayoutDemand(last_stride_one=False, zero_strides=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class HopperCall:
    """Everything that `emit` needs.

    spec: of the site.
    parts: parts of its mask and score changes.
    text: of the leaf op, with the Triton family's tiles, which may run the backward.
    tiles: tiles of the forward's lists.
    ordered: programs take blocks by the lengths of their lists.
    backward: the family of its backward; None without gradients.
    grad_tiles: tiles of that backward's lists; None if it reads no parts.
    not_in_order: reasons why a deterministic site does not get this family's backward.
    """

    spec: AttentionSpec
    parts: Plan
    text: str
    tiles: Tiles
    ordered: bool
    backward: str | None = None
    grad_tiles: Tiles | None = None
    not_in_order: tuple[Reason, ...] = ()


def call_of(spec: AttentionSpec, target: Target) -> HopperCall:
    """Build the call of a spec that the family takes on that machine."""
    of_triton = tile_table.tiles(spec, target)
    family = backward_of(spec, target) if spec.needs_grad else None
    return HopperCall(
        spec=spec,
        parts=site_parts.make_plan(spec),
        text=Call(spec=spec, tiles=of_triton).to_text(),
        tiles=dataclasses.replace(of_triton, forward=plan.blocks_of(spec).tile),
        ordered=plan.is_ordered(spec),
        backward=family,
        grad_tiles=_grad_tiles(family, spec, of_triton),
        not_in_order=tuple(why_not_in_order(spec, target)) if family == FOR_ALL else (),
    )


def _grad_tiles(family: str | None, spec: AttentionSpec, of_triton: Tiles) -> Tiles | None:
    if family == FAMILY and plan.is_wide(spec):
        return plan.wide_grad_tiles(of_triton, spec)
    if family in (FAMILY, IN_ORDER):
        return dataclasses.replace(of_triton, grad_kv=plan.grad_blocks_of(spec, site_parts.make_plan(spec)).tile)
    return of_triton if family == FOR_ALL else None


def backward_of(spec: AttentionSpec, target: Target) -> str:
    """Return the family of a site's backward.

    This family's for the head dims that it takes, unless cuDNN's was measured to be faster. Otherwise cuDNN's where PyTorch's op takes
    the site, else that of our Triton kernels. cuDNN's backward reads no expanded axes (stride 0), which this forward does.

    Under torch.use_deterministic_algorithms: this family's in a fixed order, or the Triton kernels'. The others add up in no fixed order.
    Dynamo compiles anew when that is switched. Above 256 head dims each element has one writer, in this family and in Triton's.
    """
    if plan.has_wide_backward(spec):
        return FAMILY if plan.wide_is_faster(spec) else FOR_ALL
    is_repeated = any(_NO_REPEATED.broken_by(x) for x in (spec.q, spec.k, spec.v))
    takes_cudnn = not is_repeated and not cudnn_backward.why_not(spec, target)
    if target.deterministic:
        return IN_ORDER if plan.has_backward(spec) and not why_not_in_order(spec, target) else FOR_ALL
    if plan.has_backward(spec) and not (takes_cudnn and plan.cudnn_is_faster(spec)):
        return FAMILY
    return cudnn_backward.FAMILY if takes_cudnn else FOR_ALL


def why_not_in_order(spec: AttentionSpec, target: Target) -> list[Reason]:
    """Return the reasons against this family's backward in a fixed order. Empty for sites that need none, or whose head dims it does not
    take."""
    return in_order.check_order_speed(spec, target) if target.deterministic and plan.has_backward(spec) else []
