"""The leaf op `attn_compiler::cudnn` on the device: it finds the plan for the tensors, and executes it.

A plan's key holds the tensors' real shapes and strides. Plans of a compiled graph were built with it; for other strides one is built at
the first call, and counted as late. Calls with the same layouts share all that follows from them, and only fill in addresses.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attn_compiler.lowerings.cudnn import frontend, graphs
from attn_compiler.lowerings.cudnn.graphs import BuiltPlan, Laid
from attn_compiler.lowerings.cudnn.ops import gradient_in_fp8, gradient_like
from attn_compiler.lowerings.cudnn.plan import ALIGNMENT, CudnnCall
from attn_compiler.lowerings.shared.calls import by_definition, leaf_calls
from attn_compiler.lowerings.shared.calls.by_definition import Attention
from attn_compiler.lowerings.shared.calls.failures import FAILURES
from attn_compiler.lowerings.shared.calls.leaf_calls import (
    BackwardArguments,
    BackwardBody,
    ForwardArguments,
    ForwardBody,
    Gradients,
    Outputs,
    Tensors,
)
from attn_compiler.lowerings.shared.launching.on_device import Empty, on
from attn_compiler.lowerings.shared.launching.replaying import CallCache, Start, replay_of
from attn_compiler.lowerings.shared.ops.leaf_ops import empty_outputs, like_output
from attn_compiler.lowerings.shared.parts.kernel_plan import Band
from attn_compiler.reasons.errors import CudnnRefused
from attn_compiler.spec.target import cudnn_version

#: names of inputs, before those of the operands
_FORWARD = ("q", "k", "v")
_BACKWARD = ("grad_out", "grad_lse", "q", "k", "v", "out", "lse")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyPlan:
    """A plan with its own order of addresses."""

    plan: BuiltPlan
    device: torch.device

    def bound(self, index: Mapping[str, int], device: int) -> Start:
        """See `replaying.Ready`."""
        pick = operator.itemgetter(*[index[name] for name in self.plan.order])
        launch: Start = frontend.launcher(self.plan, self.device, pick)
        return launch


def _definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Tensors, text: str) -> Attention:
    """Return the attention of a call. q, k and v in FP8 are multiplied by their descales."""
    call = CudnnCall.from_text(text)
    named = dict(zip(call.operands, operands, strict=True))
    if call.fp8:
        q, k, v = (x.float() * named[f"descale_{name}"] for name, x in (("q", q), ("k", k), ("v", v)))
    tensors = {name: x for name, x in named.items() if name in ("bias", "sinks", "seed")}
    if call.lengths:
        ends = named["lengths"][:, None].expand(-1, q.shape[2])
        tensors["rows"] = torch.stack((torch.zeros_like(ends), ends))
    return Attention(
        q=q,
        k=k,
        v=v,
        tensors=tensors,
        scale=call.scale,
        band=Band(left=call.left, right=call.right, from_end=call.from_end),
        dropout_p=call.dropout_p,
    )


class PlanForward(ForwardBody):
    """The forward, replayed in every call. lse is only written if the call needs gradients, and for batch rows with keys."""

    __slots__ = ()

    def first(self, given: ForwardArguments, same: CallCache) -> Outputs:
        """Find the plan. Raises CudnnRefused where cuDNN has none, which compilation has ruled out for its own strides."""
        q, k, v, operands, text = given
        if not _all_aligned((q, k, v)):
            return self(_aligned(q), _aligned(k), _aligned(v), operands, text)
        call = CudnnCall.from_text(text)
        with on(q.device):
            plan = frontend.PLANS.get(graphs.forward_key(call, **_shared(call, q, k, v, operands)))
        made = dict(zip(("out", "lse"), empty_outputs(q, v), strict=True))
        returned = ("out", "lse" if "lse" in plan.order else None)
        # cuDNN writes nothing for a batch row without keys, whose output is 0.
        allocate = Empty.zeros_like if call.may_be_empty else Empty.like
        empties = {name: allocate(made[name]) for name in returned if name is not None}
        ready = ReadyPlan(plan=plan, device=q.device)
        same.replay = replay_of(q.device, [ready], empties, inputs=(*_FORWARD, *call.operands), returned=returned)
        return self(*given)

    def definition(self, given: ForwardArguments) -> Attention:
        return _definition(*given)

    def instead(self, given: ForwardArguments) -> Outputs:
        call = CudnnCall.from_text(given.text)
        if not call.fp8:
            return ForwardBody.instead(self, given)
        exact_out, exact_lse = by_definition.forward(self.definition(given))
        out, lse = empty_outputs(given.q, given.v)
        scale = dict(zip(call.operands, given.operands, strict=True))["scale_out"]
        return out.copy_((exact_out * scale).to(out.dtype)), lse.copy_(exact_lse)


class PlanBackward(BackwardBody):
    """The backward. grad_lse is not read: nothing that is lowered differentiates lse."""

    __slots__ = ()

    def first(self, given: BackwardArguments, same: CallCache) -> Gradients:
        """Find the plan, as `PlanForward.first`."""
        readable = given._replace(
            q=_aligned(given.q),
            k=_aligned(given.k),
            v=_aligned(given.v),
            out=_aligned(_as_output(given.out)),
            lse=_aligned(given.lse),
            grad_out=_aligned(_as_output(given.grad_out)),
        )
        if any(x is not y for x, y in zip(readable, given, strict=True)):
            return self(*readable)
        q, k, v = given.q, given.k, given.v
        call = CudnnCall.from_text(given.text)
        named = dict(zip(call.operands, given.operands, strict=True))
        unfilled = gradient_in_fp8 if call.fp8 else gradient_like
        grads = {f"grad_{name}": unfilled(tensor) for name, tensor in (("q", q), ("k", k), ("v", v))}
        laid = {name: _laid(grad) for name, grad in grads.items()}
        with on(q.device):
            key = graphs.backward_key(call, gradients=laid, **_shared(call, q, k, v, given.operands))
            plan = frontend.PLANS.get(key)
        # Gradients that are reduced over batch and queries are added up in place.
        further = {f"grad_{name}": Empty.zeros_like(torch.empty_like(named[name])) for name in call.by_kernel}
        allocate = Empty.zeros_like if call.may_be_empty else Empty.like
        empties = {name: allocate(grad) for name, grad in grads.items()} | further
        ready = ReadyPlan(plan=plan, device=q.device)
        inputs, returned = (*_BACKWARD, *call.operands), ("grad_q", "grad_k", "grad_v", list(further))
        same.replay = replay_of(q.device, [ready], empties, inputs=inputs, returned=returned)
        return self(*given)

    def definition(self, given: BackwardArguments) -> Attention:
        return _definition(given.q, given.k, given.v, given.operands, given.text)

    def differentiable(self, given: BackwardArguments) -> tuple[str, ...]:
        return CudnnCall.from_text(given.text).by_kernel

    def unfilled(self, tensor: torch.Tensor) -> torch.Tensor:
        return gradient_like(tensor)

    def instead(self, given: BackwardArguments) -> Gradients:
        """Compute gradients by the definition. Raises CudnnRefused where cuDNN's forward dropped weights: nothing else draws the same."""
        call = CudnnCall.from_text(given.text)
        if call.dropout_p and given.text not in FAILURES.causes:
            raise CudnnRefused(said="it drew what its forward dropped")
        if not call.fp8:
            return BackwardBody.instead(self, given)
        named = dict(zip(call.operands, given.operands, strict=True))
        grad_out, out = (
            x.float() * named[f"descale_{name}"] for name, x in (("grad_out", given.grad_out), ("out", given.out))
        )
        grads = by_definition.backward(self.definition(given), grad_out, given.grad_lse, out, given.lse)
        q, k, v = (
            (grad * named[f"scale_grad_{name}"]).to(torch.float8_e5m2)
            for name, grad in (("q", grads.q), ("k", grads.k), ("v", grads.v))
        )
        return (
            gradient_in_fp8(given.q).copy_(q),
            gradient_in_fp8(given.k).copy_(k),
            gradient_in_fp8(given.v).copy_(v),
            [],
        )


forward = PlanForward(op="cudnn")
gradients = PlanBackward(op="cudnn_backward")

#: `forward` for one place in compiled code
ForwardSite = functools.partial(leaf_calls.ForwardSite, forward)

#: `gradients` for one place in compiled code
BackwardSite = functools.partial(leaf_calls.BackwardSite, gradients)


def _shared(call: CudnnCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Tensors) -> dict[str, Any]:
    named: Mapping[str, torch.Tensor] = dict(zip(call.operands, operands, strict=True))
    tensors = {"q": q, "k": k, "v": v} | ({"bias": named["bias"]} if call.bias else {})
    return {
        "dtype": str(q.dtype).removeprefix("torch."),
        "inputs": {name: _laid(tensor) for name, tensor in tensors.items()},
        "device": q.device.index,
        "cudnn": cudnn_version(),
    }


def _laid(tensor: torch.Tensor) -> Laid:
    return Laid.of(tuple(tensor.shape), tensor.stride())


# ---- tensors ------------------------------------------------------------------------------------------------------


def _as_output(tensor: torch.Tensor) -> torch.Tensor:
    """Return the output or its gradient in the plan's strides: unchanged, in every graph that was compiled."""
    # is_contiguous ignores the strides of axes of one element, and `like_output` would keep them.
    return tensor if tensor.transpose(1, 2).is_contiguous() else like_output(tensor)


def _all_aligned(tensors: Iterable[torch.Tensor]) -> bool:
    return all(x.data_ptr() % ALIGNMENT == 0 for x in tensors)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy if it begins between two vectors. The layout pass ensures strides, but knows no addresses."""
    return tensor if _all_aligned([tensor]) else torch.empty_like(tensor).copy_(tensor)
