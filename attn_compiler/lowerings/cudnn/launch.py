"""What the leaf op `attn_compiler::cudnn` does on the device: find the plan for the tensors, and execute it.

A plan goes by the tensors' real shapes and strides. Those of a compiled graph were built with it; another one is built at first
sight, and counted as late. Calls whose tensors lie alike share what follows from that, and only fill in addresses.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attn_compiler.lowerings.cudnn import frontend, graphs
from attn_compiler.lowerings.cudnn.graphs import Laid, Plan
from attn_compiler.lowerings.cudnn.ops import gradient_in_fp8, gradient_like
from attn_compiler.lowerings.cudnn.plan import ALIGNMENT, Call
from attn_compiler.lowerings.shared.on_device import Empty, Known
from attn_compiler.lowerings.shared.ops import empty_outputs, like_output
from attn_compiler.target import cudnn_version
from attn_compiler.torch_compat import current_cuda_device

Tensors = Sequence[torch.Tensor]
Key = tuple[Any, ...]

_BETWEEN = ALIGNMENT - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """What calls that lie alike share. device: its index. launch(addresses): the plan's, in its own order. made: outputs to allocate.
    pick: of the addresses of inputs, outputs and operands those that the plan takes. clears: cuDNN does not write all of the outputs."""

    device: int
    launch: Callable[[Sequence[int]], None]
    made: tuple[Callable[[], torch.Tensor], ...]
    pick: Callable[[Sequence[int]], Sequence[int]]
    clears: bool
    writes_lse: bool


_READY: Known[Ready] = Known()


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Tensors, text: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse, as `ops.LEAF_SCHEMA` says. lse is only written if the call needs gradients, and for batch rows with keys."""
    addresses = [q.data_ptr(), k.data_ptr(), v.data_ptr()]
    if (addresses[0] | addresses[1] | addresses[2]) & _BETWEEN:
        return forward(_aligned(q), _aligned(k), _aligned(v), operands, text)
    device = q.get_device()
    if current_cuda_device() != device:
        with torch.cuda.device(device):
            return forward(q, k, v, operands, text)
    ready = _of_forward(q, k, v, operands, text)
    lse = ready.made[1]()
    return _run_forward(ready, addresses, lse, operands), lse


class ForwardSite:
    """`forward` for one place in compiled code. The first call finds out what follows from how tensors lie. lse is None where the call
    needs no gradients."""

    __slots__ = ("_ready",)

    def __init__(self) -> None:
        self._ready: Ready | None = None

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Tensors, text: str
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ready = self._ready
        addresses = [q.data_ptr(), k.data_ptr(), v.data_ptr()]
        if (
            ready is None
            or (addresses[0] | addresses[1] | addresses[2]) & _BETWEEN
            or current_cuda_device() != ready.device
        ):
            found = forward(q, k, v, operands, text)
            self._ready = _READY.get(_forward_key(q, k, v, operands, text))
            return found
        lse = ready.made[1]() if ready.writes_lse else None
        return _run_forward(ready, addresses, lse, operands), lse


def gradients(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    operands: Tensors,
    out: torch.Tensor,
    lse: torch.Tensor,
    text: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """As `ops.BACKWARD_SCHEMA` says; grad_lse is not read: nothing that is lowered differentiates lse."""
    device = q.get_device()
    if current_cuda_device() != device:
        with torch.cuda.device(device):
            return gradients(grad_out, grad_lse, q, k, v, operands, out, lse, text)
    tensors = [_aligned(t) for t in (q, k, v, _as_output(out), lse, _as_output(grad_out))]
    q, k, v = tensors[:3]
    return _run_backward(_of_backward(q, k, v, operands, text), [t.data_ptr() for t in tensors], operands)


class BackwardSite:
    """`gradients` for one place in compiled code, as `ForwardSite`."""

    __slots__ = ("_ready",)

    def __init__(self) -> None:
        self._ready: Ready | None = None

    def __call__(
        self,
        grad_out: torch.Tensor,
        grad_lse: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        operands: Tensors,
        out: torch.Tensor,
        lse: torch.Tensor,
        text: str,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        ready = self._ready
        addresses = [q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(), grad_out.data_ptr()]
        begins = addresses[0] | addresses[1] | addresses[2] | addresses[3] | addresses[4] | addresses[5]
        if ready is None or begins & _BETWEEN or current_cuda_device() != ready.device:
            found = gradients(grad_out, grad_lse, q, k, v, operands, out, lse, text)
            if _lies_as_output(out) and _lies_as_output(grad_out):
                self._ready = _READY.get(_backward_key(q, k, v, operands, text))
            return found
        return _run_backward(ready, addresses, operands)


def _run_forward(ready: Ready, addresses: list[int], lse: torch.Tensor | None, operands: Tensors) -> torch.Tensor:
    """out. addresses: of q, k and v."""
    out = ready.made[0]()
    if ready.clears:
        _zero(out, *(() if lse is None else (lse,)))
    addresses += (out.data_ptr(), 0 if lse is None else lse.data_ptr())
    if operands:
        addresses += [t.data_ptr() for t in operands]
    ready.launch(ready.pick(addresses))
    return out


def _run_backward(
    ready: Ready, addresses: list[int], operands: Tensors
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """The gradients. addresses: of q, k, v, out, lse and grad_out."""
    made = [make() for make in ready.made]
    further = made[3:]
    if ready.clears:
        _zero(*made)
    elif further:
        # What is reduced over batch and queries is added up in place.
        _zero(*further)
    addresses += [t.data_ptr() for t in made]
    if operands:
        addresses += [t.data_ptr() for t in operands]
    ready.launch(ready.pick(addresses))
    return made[0], made[1], made[2], further


# ---- what calls that lie alike share ------------------------------------------------------------------------------


def _of_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Tensors, text: str) -> Ready:
    key = _forward_key(q, k, v, operands, text)
    ready = _READY.get(key)
    return _READY.keep(key, _forward_ready(q, k, v, operands, text)) if ready is None else ready


def _of_backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Tensors, text: str) -> Ready:
    key = _backward_key(q, k, v, operands, text)
    ready = _READY.get(key)
    return _READY.keep(key, _backward_ready(q, k, v, operands, text)) if ready is None else ready


def _forward_key(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Tensors, text: str) -> Key:
    key: Key = (text, q.get_device(), q.dtype, q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride())
    return (*key, *[(t.shape, t.stride()) for t in operands]) if operands else key


def _backward_key(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Tensors, text: str) -> Key:
    return ("backward", *_forward_key(q, k, v, operands, text))


def _forward_ready(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Tensors, text: str) -> Ready:
    """Raises CudnnRefused where cuDNN has no plan, which compilation has ruled out for its own strides."""
    call = Call.from_text(text)
    plan = frontend.PLANS.get(graphs.forward_key(call, **_shared(call, q, k, v, operands)))
    names = ("q", "k", "v", "out", "lse", *call.operands)
    return _ready(plan, q.device, names, empty_outputs(q, v), clears=call.may_be_empty)


def _backward_ready(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Tensors, text: str) -> Ready:
    """As `_forward_ready`."""
    call = Call.from_text(text)
    named = dict(zip(call.operands, operands, strict=True))
    unfilled = gradient_in_fp8 if call.fp8 else gradient_like
    grads = {f"grad_{name}": unfilled(tensor) for name, tensor in (("q", q), ("k", k), ("v", v))}
    laid = {name: _laid(grad) for name, grad in grads.items()}
    plan = frontend.PLANS.get(graphs.backward_key(call, gradients=laid, **_shared(call, q, k, v, operands)))
    made = grads | {f"grad_{name}": torch.empty_like(named[name]) for name in call.by_kernel}
    names = ("q", "k", "v", "out", "lse", "grad_out", *made, *call.operands)
    return _ready(plan, q.device, names, made.values(), clears=call.may_be_empty)


def _ready(
    plan: Plan, device: torch.device, names: Sequence[str], made: Iterable[torch.Tensor], *, clears: bool
) -> Ready:
    """names: of the tensors whose addresses a call has, in its order."""
    return Ready(
        device=-1 if device.index is None else device.index,
        writes_lse="lse" in plan.order,
        launch=frontend.launcher(plan, device),
        made=tuple(Empty.like(tensor).make for tensor in made),
        pick=operator.itemgetter(*[names.index(name) for name in plan.order]),
        clears=clears,
    )


def _shared(call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Tensors) -> dict[str, Any]:
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


def _zero(*tensors: torch.Tensor) -> None:
    """cuDNN writes nothing for a batch row without keys, whose output and gradients are 0."""
    for tensor in tensors:
        tensor.zero_()


def _as_output(tensor: torch.Tensor) -> torch.Tensor:
    """The output or its gradient as the plan reads it: as it is, in every graph that was compiled."""
    return tensor if _lies_as_output(tensor) else like_output(tensor)


def _lies_as_output(tensor: torch.Tensor) -> bool:
    _, heads, seqlen, head_dim = tensor.shape
    row = heads * head_dim
    return tensor.stride() == (seqlen * row, head_dim, row, 1)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it if it begins between two vectors. The layout pass sees to strides; where a tensor begins in its
    memory none of them says."""
    if tensor.data_ptr() & _BETWEEN == 0:
        return tensor
    return torch.empty_like(tensor).copy_(tensor)
