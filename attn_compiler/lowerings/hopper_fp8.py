"""FP8 attention on Hopper as its hardware wants it (kernels/forward_fp8_sm90.py): a band, softcap and sinks, head dims up to 128.

What it does not take, `triton_fp8` does. The backward is another family's, in the model's dtype, from q, k and v as they were
rounded (fp8_restoring.py).
"""

from __future__ import annotations

from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.lowerings import (
    fp8_limits,
    fp8_quantise,
    fp8_restoring,
    fp8_rounding,
    fp8_seen,
    sdpa_cudnn_backward,
    sdpa_limits,
    triton_operands,
    triton_ops,
    triton_planning,
    triton_tiles_table,
)
from attn_compiler.lowerings.base import Emitter, LayoutDemand, Operands
from attn_compiler.lowerings.ops import late, register_forward
from attn_compiler.lowerings.triton import TritonAttention
from attn_compiler.lowerings.triton_plan import Call, Plan
from attn_compiler.report import Reason
from attn_compiler.spec import AttentionSpec
from attn_compiler.target import Target

_SM = 90
#: Gluon may change from one release to the next: those that the kernel was compiled with
_TRITON = ((3, 6), (3, 7))
#: beyond, registers hold no sum of one tile beside the sum of all
_HEAD_DIM_LIMIT = 128
_REMEDY = "leave the choice to the recipe, or give lowering='triton_fp8', which takes that"
#: of which the kernel reads the first: tiles follow from the number of keys
_OF_LENGTHS = ("rows", "tiles", "tiles_by_key")


class HopperFp8:
    """`attn_compiler::hopper_fp8`: operands as those of `triton_fp8`. What attaches a backward: fp8_restoring.py."""

    name = "hopper_fp8"

    def unavailable(self, target: Target) -> list[Reason]:
        reasons = TritonAttention().unavailable(target)
        if reasons:
            return reasons
        if target.sm != _SM or target.triton_interpreted:
            observed = "Triton's interpreter" if target.triton_interpreted else f"sm{target.sm}"
            return [Reason(rule=f"its kernel is made of the instructions of sm{_SM}", observed=observed)]
        if sdpa_limits.release(target.triton) in _TRITON:
            return []
        checked = " or ".join(f"{major}.{minor}" for major, minor in _TRITON)
        return [Reason(rule=f"its kernel was compiled with Triton {checked}", observed=target.triton)]

    def why_not(self, spec: AttentionSpec, target: Target) -> list[Reason]:
        recipe = fp8_limits.check_recipe(spec)
        machine = self.unavailable(target) or sdpa_limits.check_device(spec, target.device)
        if machine or spec.fp8 is None:
            return [*recipe, *machine]
        inputs = fp8_limits.check_inputs(spec)
        further = [*fp8_limits.check_shapes(spec), *TritonAttention().why_not(spec, target)]
        return [*recipe, *inputs, *(further or _check_kernel(spec))]

    def demand(self, spec: AttentionSpec) -> LayoutDemand:
        return TritonAttention().demand(spec)

    def emit(self, emitter: Emitter, spec: AttentionSpec, operands: Operands) -> fx.Node:
        tiles = triton_tiles_table.tiles(spec, emitter.target)
        rounded = fp8_quantise.emit(emitter, spec, operands, seen=fp8_seen.emit(emitter, spec, operands))
        family = backward_of(spec, emitter.target)
        emitter.note(f"FP8 forward: {fp8_quantise.recipe_of(spec).words}; backward in {spec.dtype} ({family})")
        further = triton_operands.emit(emitter, spec, operands, tiles)
        text = Call(spec=spec, tiles=tiles).to_text()
        return fp8_restoring.call_leaf(
            emitter, spec, operands, rounded, further, leaf=self.name, family=family, text=text
        )


def backward_of(spec: AttentionSpec, target: Target) -> str:
    """Whose backward it gets: cuDNN's where that takes it, which is the faster one, or that of our kernels."""
    return "triton" if sdpa_cudnn_backward.why_not(spec, target) else sdpa_cudnn_backward.FAMILY


def _check_kernel(spec: AttentionSpec) -> list[Reason]:
    reasons = []
    plan = triton_planning.of(spec)
    parts = _parts_beyond(plan, has_lengths=_has_lengths(spec))
    if parts:
        rule = "its kernel knows a band, numbers of keys of batch rows, a softcap and sinks"
        reasons.append(Reason(rule=rule, observed=", ".join(parts), remedy=_REMEDY))
    if spec.score.scale <= 0:
        observed = f"{spec.score.scale:g}"
        reasons.append(Reason(rule="its kernel takes scales above 0", observed=observed, remedy=_REMEDY))
    return [*reasons, *sdpa_limits.check_head_dims(spec, multiple=fp8_rounding.VECTOR, limit=_HEAD_DIM_LIMIT)]


def _parts_beyond(plan: Plan, *, has_lengths: bool) -> list[str]:
    own = ("sinks", *(_OF_LENGTHS if has_lengths else ()))
    return [name for name in plan.operands if name not in own]


def _has_lengths(spec: AttentionSpec) -> bool:
    """Whether the interval of keys that each query may use ends at one and the same for all of a batch row, and begins with the first."""
    interval = triton_planning.parts(spec).rows
    if interval is None or interval.lower is not None or interval.upper is None:
        return False
    return not ix.mentions(interval.upper, triton_planning.Q)


register_forward("hopper_fp8", forward=late("hopper_fp8_launch", "forward"), dispatch_key="CUDA")
fp8_restoring.register("triton", differentiable=triton_ops.differentiable)
fp8_restoring.register(
    sdpa_cudnn_backward.FAMILY,
    differentiable=sdpa_cudnn_backward.differentiable,
    prepare_grad_out=sdpa_cudnn_backward.grad_out_as_read,
)
