"""Our Triton kernels with a forward in FP8, for sites with a recipe: any mask and score change that `triton` takes.

The backward is that of `triton`, from q, k and v as they were rounded (fp8/restoring.py), and the forward's out and lse. Tiles are those
of `triton`, except where others were measured (`_HOPPER`), or where they do not fit.
"""

from __future__ import annotations

import dataclasses

from torch import fx

from attn_compiler.lowerings.base import Emitter, LayoutDemand, Operands, Tile, Tiles, check_fp8_inputs
from attn_compiler.lowerings.fp8 import limits, quantise, restoring, visible_keys
from attn_compiler.lowerings.shared.limits import common as shared_limits, kernel_limits, mask_limits, takes
from attn_compiler.lowerings.shared.ops.leaf_ops import late, register_forward
from attn_compiler.lowerings.shared.parts import part_tensors, site_parts as parts, tile_table
from attn_compiler.lowerings.shared.parts.by_parts import ByParts
from attn_compiler.lowerings.shared.parts.kernel_plan import Call
from attn_compiler.lowerings.triton.takes import FP8
from attn_compiler.reasons.decisions import Reason
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.target import Target

#: head dims up to which the tiles of `triton` do not spill
_ROOMY = 128
#: By head dim, for masks of nothing but a band. On an H200, S 8192, causal and full, TFLOP/s: 545 and 568 at head dim 64 (64x64 w4 s3: 529
#: and 561), 773 and 834 at 128 (643 and 670).
_HOPPER = {64: Tile(queries=64, keys=128, warps=4, stages=2), 128: Tile(queries=64, keys=128, warps=4, stages=3)}
#: sites that the kernels in half precision take, which run the backward, with the head dims of those in FP8
_TAKES = dataclasses.replace(kernel_limits.TAKES, head_dims=FP8.head_dims)
_WIDE_HEADS = Tile(queries=64, keys=64, warps=8, stages=2)
# Visits the forward's lists, so its queries and keys are the same.
_WIDE_HEADS_GRAD_Q = Tile(queries=64, keys=64, warps=4, stages=1)


class TritonFp8(ByParts):
    """`attn_compiler::triton_fp8`, whose operands are those of fp8/quantise.py, then those of triton's plan."""

    name = "triton_fp8"

    def unavailable(self, target: Target) -> list[Reason]:
        old = [] if target.triton_interpreted else takes.check_gpu(FP8, target)
        return old or kernel_limits.check_machine(target)

    def why_not(self, spec: AttentionSpec, target: Target) -> list[Reason]:
        recipe = limits.check_recipe(spec)
        machine = self.unavailable(target) or shared_limits.check_device(spec, target.device)
        if machine or spec.fp8 is None:
            return [*recipe, *machine]
        inputs = check_fp8_inputs(spec)
        # Its logits are in units of log 2, where the dtype's lowest number becomes -inf.
        kernels = [*kernel_limits.check_site(spec, target, _TAKES), *mask_limits.check_numbers_read(spec)]
        return [*recipe, *inputs, *limits.check_shapes(spec), *kernels]

    def demand(self, spec: AttentionSpec) -> LayoutDemand:
        return kernel_limits.DEMAND

    def emit(self, emitter: Emitter, spec: AttentionSpec, operands: Operands) -> fx.Node:
        tiles = _tiles(spec, emitter.target)
        rounded = quantise.emit(emitter, spec, operands, seen=visible_keys.emit(emitter, spec, operands))
        emitter.note(f"FP8 forward: {quantise.recipe_of(spec).words}; backward in {spec.dtype}")
        further = part_tensors.emit(emitter, spec, operands, tiles)
        text = Call(spec=spec, tiles=tiles).to_text()
        return restoring.call_leaf(
            emitter, spec, operands, rounded, further, leaf=self.name, family="triton", text=text
        )


def _tiles(spec: AttentionSpec, target: Target) -> Tiles:
    """Return the tiles of `triton`, unless they leave no registers for a product with v beside the sum over tiles.

    In that case: the largest of the tiles compiled for sm90 that does not spill.
    """
    found = tile_table.tiles(spec, target)
    measured = _HOPPER.get(spec.head_dim_v) if isinstance(spec.head_dim_v, int) else None
    if measured is not None and _is_plain_on_hopper(spec, target) and found.forward.queries >= measured.queries:
        return dataclasses.replace(found, forward=measured)
    if (
        max(d for d in (spec.head_dim_qk, spec.head_dim_v) if isinstance(d, int)) <= _ROOMY
        or found.forward.queries <= 64
    ):
        return found
    listed = parts.make_plan(spec).tiles
    return dataclasses.replace(found, forward=_WIDE_HEADS, grad_q=_WIDE_HEADS_GRAD_Q if listed else found.grad_q)


def _is_plain_on_hopper(spec: AttentionSpec, target: Target) -> bool:
    """Return whether `_HOPPER` was measured for the site: nothing but a band, and no lists, whose tiles a backward shares."""
    return target.sm == 90 and not parts.make_plan(spec).operands and spec.head_dim_qk == spec.head_dim_v


register_forward(
    "triton_fp8",
    forward=late("triton.fp8_launch", "forward", site="ForwardSite", notes=True),
    dispatch_key="CompositeExplicitAutograd",
)
restoring.register("triton", differentiable=parts.differentiable)
