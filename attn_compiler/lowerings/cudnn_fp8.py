"""cuDNN's attention with a forward in FP8, for sites that a recipe with scales per tensor was given for. Hopper (sm90) alone.

q, k and v are rounded by nodes of the graph (fp8_quantise.py); v lies as it did. On sm90 cuDNN writes the output in FP8 too, so nodes
of the graph cast it. Its scale has to be known before: an output is a mean of rows of v, so none is larger than the largest of those.

The backward is that of `cudnn`, from q, k and v as they were rounded, and the output and lse that the forward gave. As the
output passes through nodes, its gradient is attached by `cudnn_given` (ops.register_given).
"""

from __future__ import annotations

import dataclasses
import operator

import torch
from torch import fx

from attn_compiler.lowerings import cudnn, cudnn_operands, cudnn_plans, fp8_limits, fp8_quantise, known_bad, sdpa_limits
from attn_compiler.lowerings.base import Emitter, LayoutDemand, Operands
from attn_compiler.lowerings.cudnn import CudnnAttention
from attn_compiler.lowerings.cudnn_call import Call
from attn_compiler.report import Reason
from attn_compiler.spec import AttentionSpec, Dim, TensorSpec
from attn_compiler.target import Target

_SM = 90
#: what weights are rounded at, of 448: the softmax's are at most 1
_WEIGHT_SCALE = 256.0
#: of the largest number of the format: rounded weights may add up to a little more than 1
_OUT_MARGIN = 0.5


class CudnnFp8:
    """`attn_compiler::cudnn_fp8`, and in training `attn_compiler::cudnn_given` (cudnn_ops.py)."""

    name = "cudnn_fp8"

    def unavailable(self, target: Target) -> list[Reason]:
        other = (
            [] if target.sm == _SM else [Reason(rule=f"sm{_SM}: it was tried on no other", observed=f"sm{target.sm}")]
        )
        return other or CudnnAttention().unavailable(target)

    def why_not(self, spec: AttentionSpec, target: Target) -> list[Reason]:
        recipe = fp8_limits.check_recipe(spec)
        machine = self.unavailable(target) or sdpa_limits.check_device(spec, "cuda")
        if machine or spec.fp8 is None:
            return [*recipe, *machine]
        inputs = [*fp8_limits.check_inputs(spec), *fp8_limits.check_shapes(spec), *_check_scaling(spec)]
        reasons = [*recipe, *inputs, *cudnn.rules(spec, target)]
        if reasons:
            return reasons
        call = cudnn.call_of(spec, target)
        return _check_call(call, spec, target) or _check_plans(call, _as_rounded(spec), self.demand(spec), target)

    def demand(self, spec: AttentionSpec) -> LayoutDemand:
        """Rounded tensors are new ones, and lie as q, k and v do."""
        return LayoutDemand()

    def emit(self, emitter: Emitter, spec: AttentionSpec, operands: Operands) -> fx.Node:
        return _Emission(emitter, spec, cudnn.call_of(spec, emitter.target)).all_of(operands)


def _forward(call: Call) -> Call:
    return dataclasses.replace(call, fp8="forward", deterministic=False)


def _check_scaling(spec: AttentionSpec) -> list[Reason]:
    recipe, reasons = fp8_quantise.recipe_of(spec), []
    granularity = getattr(recipe.scaling, "granularity", "tensor")
    if granularity != "tensor":
        name = type(recipe.scaling).__name__
        remedy = f"give {name}(granularity='tensor')"
        reasons.append(Reason(rule="one scale for each tensor", observed=f"per {granularity}", remedy=remedy))
    if recipe.qk_format != "fp8":
        remedy = "give Fp8Recipe(qk_format='fp8')"
        reasons.append(Reason(rule="q and k are in FP8", observed=recipe.qk_format, remedy=remedy))
    if recipe.forward_format != "e4m3":
        remedy = "give Fp8Recipe(forward_format='e4m3')"
        reasons.append(Reason(rule="the forward is in e4m3", observed=recipe.forward_format, remedy=remedy))
    return reasons


def _check_call(call: Call, spec: AttentionSpec, target: Target) -> list[Reason]:
    """What cuDNN's forward in FP8 can't say, or would not come back from."""
    has = {
        "a bias": call.bias,
        "sinks": call.sinks,
        "dropout": call.dropout_p > 0,
        "a diagonal from the bottom right": call.from_end,
        "keys after the query's own position": call.right not in (None, 0),
        "a window that no diagonal bounds": call.left is not None and call.right is None,
    }
    reasons = [
        Reason(rule="no mask, lengths, causal from the top left, or a window of that", observed=n)
        for n, here in has.items()
        if here
    ]
    if call.left is not None and call.lengths:
        observed = f"{spec.mask.words}: a window may lie beyond a row's length"
        reasons += known_bad.refusal("fp8_hang", target, observed)
    return reasons


def _check_plans(call: Call, rounded: AttentionSpec, demand: LayoutDemand, target: Target) -> list[Reason]:
    forward = cudnn_plans.refusals(_forward(call), rounded, demand, target, kinds=("forward",))
    return forward or cudnn_plans.refusals(call, rounded, demand, target, kinds=("backward",))


def _as_rounded(spec: AttentionSpec) -> AttentionSpec:
    """The spec of what the kernels read: q, k and v lie without gaps, and otherwise as they did."""

    def packed(tensor: TensorSpec) -> TensorSpec:
        there = torch.empty_strided(_numbers(tensor.shape), _numbers(tensor.strides), device="meta")
        return dataclasses.replace(tensor, strides=torch.empty_like(there).stride())

    return dataclasses.replace(spec, q=packed(spec.q), k=packed(spec.k), v=packed(spec.v))


def _numbers(dims: tuple[Dim, ...]) -> tuple[int, ...]:
    return tuple(int(dim) for dim in dims)


@dataclasses.dataclass(frozen=True)
class _Emission:
    emitter: Emitter
    spec: AttentionSpec
    call: Call

    def all_of(self, operands: Operands) -> fx.Node:
        """The node of the output."""
        emitter, spec, call = self.emitter, self.spec, self.call
        rounded = fp8_quantise.emit(emitter, spec, operands, positions_last=False)
        read = dict(zip(fp8_quantise.names(spec), rounded.operands, strict=True))
        lengths = cudnn_operands.emit(emitter, call, spec, operands)
        given = read | dict(zip(call.operands, lengths, strict=True)) | self._scales(read["descale_v"])
        self._note({name: read[f"{name}8"] for name in "qkv"}, {"q": rounded.q, "k": rounded.k, "v": rounded.v})
        if call.may_be_empty:
            given["lengths"] = self._at_least_one(given["lengths"])
        forward = _forward(call)
        inputs = (read["q8"], read["k8"], read["v8"])
        leaf = torch.ops.attn_compiler.cudnn_fp8.default
        outputs = emitter.call(leaf, *inputs, [given[name] for name in forward.operands], forward.to_text())
        out = self._cast(emitter.call(operator.getitem, outputs, 0), given["descale_v"])
        if call.may_be_empty:
            out = self._without_empty_rows(out, lengths[call.operands.index("lengths")])
        if not call.needs_grad:
            return out
        lse = emitter.call(operator.getitem, outputs, 1)
        if "shift" in read:
            lse = emitter.call(torch.add, lse, emitter.call(torch.mul, read["shift"], call.scale))
        attach = torch.ops.attn_compiler.cudnn_given.default
        attached = emitter.call(attach, rounded.q, rounded.k, rounded.v, [out, lse, *lengths], call.to_text())
        return emitter.call(operator.getitem, attached, 0)

    def _scales(self, descale_v: fx.Node) -> dict[str, fx.Node]:
        """Of what is not read: the weights, and the output."""
        largest_fits = self.emitter.call(torch.reciprocal, descale_v)
        return {
            "scale_s": self._constant(_WEIGHT_SCALE, descale_v),
            "descale_s": self._constant(1 / _WEIGHT_SCALE, descale_v),
            "scale_out": self.emitter.call(torch.mul, largest_fits, _OUT_MARGIN),
        }

    def _constant(self, value: float, like: fx.Node) -> fx.Node:
        device = self.emitter.value(like).device
        return self.emitter.once(
            ("cudnn fp8", value, device), lambda: self.emitter.call(torch.full, (1,), value, device=device)
        )

    def _cast(self, out: fx.Node, descale_v: fx.Node) -> fx.Node:
        """The output in the model's dtype."""
        wide = self.emitter.call(torch.Tensor.to, out, torch.float32)
        descale = self.emitter.call(torch.mul, descale_v, 1 / _OUT_MARGIN)
        exact = self.emitter.call(torch.mul, wide, self.emitter.call(torch.unsqueeze, descale, 3))
        return self.emitter.call(torch.Tensor.to, exact, getattr(torch, self.spec.dtype))

    def _at_least_one(self, lengths: fx.Node) -> fx.Node:
        """cuDNN's forward in FP8 does not come back from a row without keys (known_bad, "fp8_hang")."""
        return self.emitter.once(("cudnn fp8 lengths", lengths), lambda: self.emitter.call(torch.clamp, lengths, min=1))

    def _without_empty_rows(self, out: fx.Node, lengths: fx.Node) -> fx.Node:
        """The output with 0 where a batch row has no keys."""
        used = self.emitter.call(torch.gt, lengths, 0)
        used = self.emitter.call(torch.reshape, used, (-1, 1, 1, 1))
        return self.emitter.call(torch.where, used, out, 0.0)

    def _note(self, read: dict[str, fx.Node], restored: dict[str, fx.Node]) -> None:
        emitter, spec, target = self.emitter, self.spec, self.emitter.target
        recipe = fp8_quantise.recipe_of(spec)
        emitter.note(f"FP8 forward: {recipe.words}; backward in {spec.dtype}")
        emitter.note(f"cuDNN writes the output in FP8 on sm{_SM}; nodes of the graph cast it to {spec.dtype}")
        first, then = ({name: emitter.value(x) for name, x in tensors.items()} for tensors in (read, restored))
        plans = cudnn_plans.built(_forward(self.call), first, target, kinds=("forward",))
        plans += cudnn_plans.built(self.call, then, target, kinds=("backward",))
        if plans:
            emitter.note(cudnn_plans.words(plans))
