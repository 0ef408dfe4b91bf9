"""cuDNN's attention with a forward in FP8, for sites with a recipe of scales per tensor. Hopper (sm90) alone.

q, k and v are rounded as in fp8/quantise.py; v keeps its strides. On sm90 cuDNN writes the output in FP8 too, and graph nodes cast it. The
output's scale has to be known before: an output is a mean of rows of v, so it is at most v's largest element.

The backward is that of `cudnn`, from the rounded q, k and v and the forward's output and lse. If the recipe asks for it, it is in FP8 too
(fp8_gradients.py), for heads of 128. As the output passes through nodes, its gradient is attached by an op that compiled code does not
contain (shared/ops/given_ops.py): `cudnn_rounded_given` or `cudnn_fp8_given`.
"""

from __future__ import annotations

import dataclasses
import operator

import torch
from torch import fx

from attn_compiler.lowerings.base import Emitter, LayoutDemand, Operands, check_fp8_inputs
from attn_compiler.lowerings.cudnn import (
    fp8_gradients,
    limits as graph_limits,
    lowering as cudnn,
    operands as cudnn_operands,
    ops,
    plans as cudnn_plans,
)
from attn_compiler.lowerings.cudnn.plan import CudnnCall
from attn_compiler.lowerings.fp8 import limits, quantise, restoring, visible_keys
from attn_compiler.lowerings.shared.limits import common as shared_limits, known_bad
from attn_compiler.lowerings.shared.ops.leaf_ops import like_output
from attn_compiler.lowerings.shared.parts.by_parts import ByParts
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason, refuse
from attn_compiler.spec import dims
from attn_compiler.spec.attention import AttentionSpec, Dim, TensorSpec
from attn_compiler.spec.target import Target

_SM = 90
#: factor of the rounded weights, up to 448: the softmax's are at most 1
_WEIGHT_SCALE = 448.0
#: share of the format's largest number: rounded weights may add up to a little more than 1
_OUT_MARGIN = 0.5
_BACKWARD_HEAD_DIM = 128
#: lengths are a multiple of this for a backward in FP8
_LENGTH_MULTIPLE = 16
#: Above this, the bound that gives dK's scale is so loose that small numbers become 0 (fp8_gradients.py).
_MOST_QUERIES_OF_A_KEY = 32 * 1024


class CudnnFp8(ByParts):
    """`attn_compiler::cudnn_fp8`, with the gradient attached by cudnn/ops.py or fp8_gradients.py."""

    name = "cudnn_fp8"

    def unavailable(self, target: Target) -> list[Reason]:
        gpu = shared_limits.check_gpu(target, first_sm=_SM)
        if gpu or target.sm == _SM:
            return gpu or graph_limits.check_machine(target)
        return refuse(Code.ARCHITECTURE, f"sm{_SM}: it was tried on no other", f"sm{target.sm}")

    def why_not(self, spec: AttentionSpec, target: Target) -> list[Reason]:
        recipe = limits.check_recipe(spec, has_backward=True)
        machine = self.unavailable(target) or shared_limits.check_device(spec, "cuda")
        if machine or spec.fp8 is None:
            return [*recipe, *machine]
        inputs = [
            *check_fp8_inputs(spec),
            *limits.check_shapes(spec),
            *_check_scaling(spec),
            *_check_backward(spec),
        ]
        reasons = [*recipe, *inputs, *cudnn.rules(spec, target)]
        return reasons or _check_call(cudnn.call_of(spec, target), spec, target)

    def cannot_build(self, spec: AttentionSpec, target: Target) -> list[Reason]:
        call, rounded, demand = cudnn.call_of(spec, target), _as_rounded(spec), self.demand(spec)
        forward = cudnn_plans.refusals(_forward(call), rounded, demand, target, kinds=("forward",))
        return forward or cudnn_plans.refusals(_backward(call, rounded), rounded, demand, target, kinds=("backward",))

    def demand(self, spec: AttentionSpec) -> LayoutDemand:
        """Demand nothing: rounding makes new tensors with the strides of q, k and v."""
        return LayoutDemand()

    def emit(self, emitter: Emitter, spec: AttentionSpec, operands: Operands) -> fx.Node:
        return _Emission(emitter, spec, cudnn.call_of(spec, emitter.target)).all_of(operands)


def _forward(call: CudnnCall) -> CudnnCall:
    return dataclasses.replace(call, fp8="forward", deterministic=False)


def _check_scaling(spec: AttentionSpec) -> list[Reason]:
    recipe, reasons = quantise.recipe_of(spec), []
    granularity = getattr(recipe.scaling, "granularity", "tensor")
    if granularity != "tensor":
        name = type(recipe.scaling).__name__
        remedy = f"give {name}(granularity='tensor')"
        reasons += refuse(Code.FP8_RECIPE, "one scale for each tensor", f"per {granularity}", remedy)
    if recipe.qk_format != "fp8":
        remedy = "give Fp8Recipe(qk_format='fp8')"
        reasons += refuse(Code.FP8_RECIPE, "q and k are in FP8", recipe.qk_format, remedy)
    if recipe.forward_format != "e4m3":
        remedy = "give Fp8Recipe(forward_format='e4m3')"
        reasons += refuse(Code.FP8_RECIPE, "the forward is in e4m3", recipe.forward_format, remedy)
    return reasons


def _check_backward(spec: AttentionSpec) -> list[Reason]:
    """Refuse sites that its backward in FP8 can't take."""
    recipe, reasons = quantise.recipe_of(spec), []
    if not (recipe.backward and spec.needs_grad):
        return []
    remedy = "give Fp8Recipe(backward=False)"
    head_dims = (spec.head_dim_qk, spec.head_dim_v)
    if head_dims != (_BACKWARD_HEAD_DIM, _BACKWARD_HEAD_DIM):
        rule = f"with a backward in FP8, head dims are {_BACKWARD_HEAD_DIM}"
        reasons += refuse(Code.FP8_RECIPE, rule, f"{head_dims[0]} and {head_dims[1]}", remedy)
    if recipe.gradient_format != "e5m2":
        rule = "with a backward in FP8, gradients are in e5m2"
        remedy_format = "give Fp8Recipe(gradient_format='e5m2')"
        reasons += refuse(Code.FP8_RECIPE, rule, recipe.gradient_format, remedy_format)
    if not all(dims.is_multiple(length, _LENGTH_MULTIPLE) for length in (spec.seqlen_q, spec.seqlen_kv)):
        # On an H200 with cuDNN 9.19, dQ of the last tile of 200, 201, 500 or 1000 positions was off by 0.16 to 0.26 of its norm, where 0.11
        # is usual, also at 192, 256 and 2000.
        rule = f"with a backward in FP8, lengths are multiples of {_LENGTH_MULTIPLE}"
        reasons += refuse(Code.FP8_RECIPE, rule, f"{spec.seqlen_q} x {spec.seqlen_kv}", remedy)
    sizes = (spec.seqlen_q, spec.num_heads_q, spec.num_heads_kv)
    seqlen_q, heads, heads_kv = (size if isinstance(size, int) else 1 for size in sizes)
    if seqlen_q * (heads // heads_kv) > _MOST_QUERIES_OF_A_KEY:
        rule = (
            f"with a backward in FP8, at most {_MOST_QUERIES_OF_A_KEY} queries for each key, those of a group together"
        )
        reasons += refuse(Code.FP8_RECIPE, rule, f"{seqlen_q} x {heads // heads_kv}", remedy)
    return reasons


def _check_call(call: CudnnCall, spec: AttentionSpec, target: Target) -> list[Reason]:
    """Refuse calls that cuDNN's forward in FP8 can't express, or hangs on."""
    has = {
        "a bias": call.bias,
        "sinks": call.sinks,
        "dropout": call.dropout_p > 0,
        "a diagonal from the bottom right": call.from_end,
        "keys after the query's own position": call.right not in (None, 0),
        "a window that no diagonal bounds": call.left is not None and call.right is None,
    }
    reasons = [
        Reason(code=Code.MASK_KIND, rule="no mask, lengths, causal from the top left, or a window of that", observed=n)
        for n, here in has.items()
        if here
    ]
    if call.left is not None and call.may_be_empty:
        observed = f"{spec.mask.words}: a window may lie beyond a row's length"
        reasons += known_bad.refusal("fp8_hang", target, observed)
    return reasons


def _backward(call: CudnnCall, spec: AttentionSpec) -> CudnnCall:
    """Return the call of the backward, if there is one: in FP8 if the recipe asks for it."""
    in_fp8 = quantise.recipe_of(spec).backward and call.needs_grad
    return dataclasses.replace(call, fp8="backward") if in_fp8 else call


def _as_rounded(spec: AttentionSpec) -> AttentionSpec:
    """Return the spec of the rounded tensors: q, k and v without gaps, in their own order of axes."""

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
    call: CudnnCall

    def all_of(self, operands: Operands) -> fx.Node:
        """Return the node of the output."""
        emitter, spec, call = self.emitter, self.spec, self.call
        rounded = quantise.emit(
            emitter, spec, operands, positions_last=False, seen=visible_keys.emit(emitter, spec, operands)
        )
        read = dict(zip(quantise.names(spec), rounded.operands, strict=True))
        lengths = cudnn_operands.emit(emitter, call, spec, operands)
        given = read | dict(zip(call.operands, lengths, strict=True)) | self._scales(read["descale_v"])
        self._note({name: emitter.value(read[f"{name}8"]) for name in "qkv"})
        if call.may_be_empty:
            # cuDNN's forward in FP8 hangs on a row without keys (known_bad, "fp8_hang").
            keys = given["lengths"]
            given["lengths"] = emitter.once(("cudnn fp8 lengths", keys), lambda: emitter.call(torch.clamp, keys, min=1))
        forward = _forward(call)
        inputs = (read["q8"], read["k8"], read["v8"])
        leaf = torch.ops.attn_compiler.cudnn_fp8.default
        outputs = emitter.call(leaf, *inputs, [given[name] for name in forward.operands], forward.to_text())
        out = self._cast(emitter.call(operator.getitem, outputs, 0), given["descale_v"])
        if call.may_be_empty:
            has_keys = emitter.call(torch.gt, lengths[call.operands.index("lengths")], 0)
            given["used"] = emitter.call(torch.reshape, has_keys, (-1, 1, 1, 1))
            out = emitter.call(torch.where, given["used"], out, 0.0)
        if not call.needs_grad:
            return out
        lse = emitter.call(operator.getitem, outputs, 1)
        if _backward(call, spec).fp8:
            given |= {"lse": lse, "out": emitter.call(operator.getitem, outputs, 0), "q": read["q8"]}
            return self._attached_in_fp8(operands, out, given | {"k": read["k8"], "v": read["v8"]})
        if "shift" in read:
            lse = emitter.call(torch.add, lse, emitter.call(torch.mul, read["shift"], call.scale))
        return restoring.attach(
            emitter,
            spec,
            operands,
            rounded,
            [out, lse],
            lengths,
            family="cudnn",
            text=call.to_text(),
            positions_last=False,
        )

    def _attached_in_fp8(self, of: Operands, out: fx.Node, given: dict[str, fx.Node]) -> fx.Node:
        """Return the output with a gradient that is computed in FP8."""
        backward = _backward(self.call, self.spec)
        given["descale_out"] = self.emitter.call(torch.reciprocal, given["scale_out"])
        names = fp8_gradients.names(backward, may_be_empty=self.call.may_be_empty)
        attach = torch.ops.attn_compiler.cudnn_fp8_given.default
        operands = [out, given["lse"], *(given[name] for name in names)]
        q, k = of.q, of.k
        if quantise.recipe_of(self.spec).hadamard:
            # The gradients are those of rotated q and k.
            stand_in = torch.ops.attn_compiler.stand_in_fp8.default
            q, k = self.emitter.call(stand_in, q), self.emitter.call(stand_in, k)
        attached = self.emitter.call(attach, q, k, of.v, operands, backward.to_text())
        return self.emitter.call(operator.getitem, attached, 0)

    def _scales(self, descale_v: fx.Node) -> dict[str, fx.Node]:
        """Return the scales of the weights and of the output, which are known before the kernel runs."""
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
        """Cast the output to the model's dtype."""
        wide = self.emitter.call(torch.Tensor.to, out, torch.float32)
        descale = self.emitter.call(torch.mul, descale_v, 1 / _OUT_MARGIN)
        exact = self.emitter.call(torch.mul, wide, self.emitter.call(torch.unsqueeze, descale, 3))
        return self.emitter.call(torch.Tensor.to, exact, getattr(torch, self.spec.dtype))

    def _note(self, read: dict[str, torch.Tensor]) -> None:
        """Note the recipe and the plans. read: fake q8, k8 and v8, by the first letter."""
        emitter, spec, target = self.emitter, self.spec, self.emitter.target
        recipe = quantise.recipe_of(spec)
        backward = _backward(self.call, spec)
        emitter.note(f"FP8 forward: {recipe.words}; backward in {'FP8, e5m2' if backward.fp8 else spec.dtype}")
        written = "the output and the gradients" if backward.fp8 else "the output"
        emitter.note(f"cuDNN writes {written} in FP8 on sm{_SM}; nodes of the graph cast to {spec.dtype}")
        restored = {name: torch.empty_like(x, dtype=getattr(torch, spec.dtype)) for name, x in read.items()}
        plans = cudnn_plans.built(_forward(self.call), read, target, kinds=("forward",))
        plans += cudnn_plans.built(backward, read if backward.fp8 else restored, target, kinds=("backward",))
        if plans:
            emitter.note(cudnn_plans.words(plans))


restoring.register("cudnn", differentiable=ops.differentiable, prepare_grad_out=like_output)
