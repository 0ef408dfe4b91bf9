"""FP8 attention on Hopper in its own layout (kernels/forward_fp8_sm90.py): a band, softcap and sinks, head dims up to 128. The backward
is another family's, in the model's dtype, from q, k and v as they were rounded (fp8/restoring.py)."""

from __future__ import annotations

from torch import fx

from attn_compiler.lowerings.base import Emitter, LayoutDemand, Operands, check_fp8_inputs
from attn_compiler.lowerings.fp8 import limits, quantise, restoring, visible_keys
from attn_compiler.lowerings.hopper.takes import FP8
from attn_compiler.lowerings.shared.calls import cudnn_backward
from attn_compiler.lowerings.shared.limits import common as shared_limits, kernel_limits, takes
from attn_compiler.lowerings.shared.ops.leaf_ops import late, register_forward
from attn_compiler.lowerings.shared.parts import part_tensors, site_parts, tile_table
from attn_compiler.lowerings.shared.parts.by_parts import ByParts
from attn_compiler.lowerings.shared.parts.kernel_plan import Call
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason, refuse
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.target import Target

_REMEDY = "leave the choice free: another kernel serves the site then"
#: the kernel reads `rows` alone: tiles follow from the number of keys
_OF_LENGTHS = ("rows", "tiles", "tiles_by_key")


class HopperFp8(ByParts):
    """`attn_compiler::hopper_fp8`, with the operands of fp8/quantise.py, then those of the plan. fp8/restoring.py attaches a backward."""

    name = "hopper_fp8"

    def unavailable(self, target: Target) -> list[Reason]:
        return kernel_limits.check_gluon(target, FP8, self.name)

    def why_not(self, spec: AttentionSpec, target: Target) -> list[Reason]:
        recipe = limits.check_recipe(spec)
        machine = self.unavailable(target) or shared_limits.check_device(spec, target.device)
        if machine or spec.fp8 is None:
            return [*recipe, *machine]
        inputs = check_fp8_inputs(spec)
        further = [*limits.check_shapes(spec), *kernel_limits.check_site(spec, target)]
        return [*recipe, *inputs, *(further or _check_kernel(spec))]

    def demand(self, spec: AttentionSpec) -> LayoutDemand:
        return kernel_limits.DEMAND

    def emit(self, emitter: Emitter, spec: AttentionSpec, operands: Operands) -> fx.Node:
        tiles = tile_table.tiles(spec, emitter.target)
        rounded = quantise.emit(emitter, spec, operands, seen=visible_keys.emit(emitter, spec, operands))
        family = backward_of(spec, emitter.target)
        emitter.note(f"FP8 forward: {quantise.recipe_of(spec).words}; backward in {spec.dtype} ({family})")
        further = part_tensors.emit(emitter, spec, operands, tiles)
        text = Call(spec=spec, tiles=tiles).to_text()
        return restoring.call_leaf(emitter, spec, operands, rounded, further, leaf=self.name, family=family, text=text)


def backward_of(spec: AttentionSpec, target: Target) -> str:
    """Return the family of the backward: cuDNN's where it takes the site, as it is faster, else our Triton kernels'."""
    return "triton" if cudnn_backward.why_not(spec, target) else cudnn_backward.FAMILY


def _check_kernel(spec: AttentionSpec) -> list[Reason]:
    reasons = []
    plan = site_parts.make_plan(spec)
    if FP8.beyond(spec) or spec.score.dropout_p:
        own = ("sinks", *(_OF_LENGTHS if "lengths" in site_parts.parts(spec).kinds else ()))
        beyond = ", ".join(name for name in plan.operands if name not in own)
        rule = "its kernel knows a band, numbers of keys of batch rows, a softcap and sinks"
        reasons += refuse(Code.MASK_KIND, rule, beyond, _REMEDY)
    if spec.score.scale <= 0:
        observed = f"{spec.score.scale:g}"
        reasons += refuse(Code.SCALE, "its kernel takes scales above 0", observed, _REMEDY)
    return [*reasons, *takes.check_head_dims(FP8, spec)]


register_forward(
    "hopper_fp8", forward=late("hopper.fp8_launch", "forward", site="ForwardSite", notes=True), dispatch_key="CUDA"
)
restoring.register("triton", differentiable=site_parts.differentiable)
restoring.register(
    cudnn_backward.FAMILY,
    differentiable=cudnn_backward.differentiable,
    prepare_grad_out=cudnn_backward.grad_out_as_read,
)
