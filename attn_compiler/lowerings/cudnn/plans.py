"""Plans of a site, built while its graph is compiled, so that cuDNN refuses then and not in a step.

Built only on the machine that the target describes; a made-up target is decided by the rules alone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

import torch

from attn_compiler.lowerings.base import LayoutDemand
from attn_compiler.lowerings.cudnn import graphs, ops
from attn_compiler.lowerings.cudnn.graphs import BuiltPlan, Laid
from attn_compiler.lowerings.cudnn.plan import FP8_DTYPE, CudnnCall
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason, refuse
from attn_compiler.reasons.errors import CudnnRefused
from attn_compiler.spec.attention import AttentionSpec, TensorSpec
from attn_compiler.spec.target import Target, cudnn_version

log = logging.getLogger(__name__)

Kind = Literal["forward", "backward"]
BOTH: tuple[Kind, ...] = ("forward", "backward")


def refusals(
    call: CudnnCall, spec: AttentionSpec, demand: LayoutDemand, target: Target, *, kinds: tuple[Kind, ...] = BOTH
) -> list[Reason]:
    """Return cuDNN's own refusal of the forward or, if the site needs gradients, of the backward."""
    if not _is_here(target):
        return []
    tensors = {name: _demanded(tensor, demand) for name, tensor in (("q", spec.q), ("k", spec.k), ("v", spec.v))}
    added = spec.added_tensor
    if call.bias and added is not None:
        shape = (*(1,) * (4 - len(added.shape)), *added.shape[:-1], spec.seqlen_kv)
        tensors["bias"] = Laid.contiguous(_numbers(shape))
    try:
        _plans(call, tensors, FP8_DTYPE if call.fp8 else spec.dtype, torch.cuda.current_device(), kinds)
    except CudnnRefused as refused:
        return refuse(Code.NO_PLAN, "cuDNN builds a plan", refused.said)
    return []


def built(
    call: CudnnCall, values: Mapping[str, torch.Tensor], target: Target, *, kinds: tuple[Kind, ...] = BOTH
) -> tuple[BuiltPlan, ...]:
    """Return the plans for a site's tensors as they are in its graph: forward, and backward if it needs gradients. Empty for a made-up
    machine. Raises CudnnRefused if the tensors' GPU is not the target and has no plan: nothing is rewritten then.

    values: fake ones, by name: q, k, v and the call's operands.
    """
    q = values["q"]
    if not _is_here(target) or not q.is_cuda:
        return ()
    tensors = {
        n: Laid.of(_numbers(values[n].shape), _numbers(values[n].stride()))
        for n in ("q", "k", "v", "bias")
        if n in values
    }
    device = torch.cuda.current_device() if q.device.index is None else q.device.index
    return _plans(call, tensors, str(q.dtype).removeprefix("torch."), device, kinds)


def words(plans: tuple[BuiltPlan, ...]) -> str:
    """Describe the plans for the report: cuDNN's engines, and the memory that they take while they run."""
    told = [
        f"{kind} {plan.engine}, {_bytes(plan.workspace)} of workspace"
        for kind, plan in zip(("forward", "backward"), plans, strict=False)
    ]
    return f"cuDNN's plans: {'; '.join(told)}"


def _bytes(count: int) -> str:
    return f"{count} bytes" if count < 2**10 else f"{count / 2**20:.1f} MiB"


def _plans(
    call: CudnnCall, tensors: Mapping[str, Laid], dtype: str, device: int, kinds: tuple[Kind, ...]
) -> tuple[BuiltPlan, ...]:
    # Imported late: by way of torch_observe it imports Inductor, which reasons don't need.
    from attn_compiler.lowerings.cudnn import frontend

    shared: dict[str, Any] = {"dtype": dtype, "inputs": tensors, "device": device, "cudnn": cudnn_version()}
    keys = []
    if "forward" in kinds:
        keys.append(graphs.forward_key(call, **shared))
    if "backward" in kinds and call.needs_grad:
        grads = {f"grad_{name}": _gradient(tensors[name]) for name in ("q", "k", "v")}
        keys.append(graphs.backward_key(call, gradients=grads, **shared))
    with frontend.PLANS.at_compile_time():
        return tuple(frontend.PLANS.get(key) for key in keys)


def _gradient(laid: Laid) -> Laid:
    like = ops.gradient_like(torch.empty_strided(laid.shape, laid.strides, device="meta"))
    return Laid.of(laid.shape, like.stride())


def _demanded(tensor: TensorSpec, demand: LayoutDemand) -> Laid:
    """Return the layout that the kernel gets: the tensor's own, or that of the layout pass's copy."""
    shape = _numbers(tensor.shape)
    if demand.broken_by(tensor) is not None:
        return Laid.contiguous(shape)
    return Laid.of(shape, _numbers(tensor.strides))


def _numbers(dims: Any) -> tuple[int, ...]:
    return tuple(int(dim) for dim in dims)


def _is_here(target: Target) -> bool:
    return torch.cuda.is_available() and Target.current(target.device) == target
