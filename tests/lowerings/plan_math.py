"""What the Triton kernels compute, spelled out: attention from a plan and its operands alone, and a stand-in for their leaf op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attn_compiler.lowerings.shared.ops.leaf_ops import empty_outputs
from attn_compiler.lowerings.shared.parts import site_parts as parts
from attn_compiler.lowerings.shared.parts.kernel_plan import Call, Plan

_SCHEMA = "triton(Tensor q, Tensor k, Tensor v, Tensor[] operands, str spec) -> (Tensor out, Tensor lse)"
_BACKWARD = "triton_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor[] operands, str spec) -> Tensor[]"


def allowed(
    plan: Plan, named: Mapping[str, Tensor], seqlen_q: int, seqlen_kv: int, *, device: torch.device | None = None
) -> Tensor:
    """bool, broadcasts to (B, Hq, Sq, Skv)."""
    queries, keys = torch.arange(seqlen_q, device=device)[:, None], torch.arange(seqlen_kv, device=device)
    found = torch.ones(1, 1, seqlen_q, seqlen_kv, dtype=torch.bool, device=device)
    if plan.band is not None:
        at = queries + (seqlen_kv - seqlen_q if plan.band.from_end else 0)
        found = found if plan.band.left is None else found & (keys >= at - plan.band.left)
        found = found if plan.band.right is None else found & (keys <= at + plan.band.right)
    if plan.rows:
        first, end = named["rows"][:, :, None, :, None]
        found = found & (keys >= first) & (keys < end)
    if plan.keys:
        found = found & named["keys"][:, None, None, :]
    if plan.documents:
        found = found & (named["documents_q"][:, None, :, None] == named["documents_k"][:, None, None, :])
    return found & named["mask"] if plan.mask else found


def added(
    plan: Plan,
    named: Mapping[str, Tensor],
    seqlen_q: int,
    seqlen_kv: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Tensor:
    """In `dtype`, broadcasts to (B, Hq, Sq, Skv): what is added to the scores."""
    distance = torch.arange(seqlen_kv, device=device) - torch.arange(seqlen_q, device=device)[:, None]
    total = torch.zeros(1, 1, seqlen_q, seqlen_kv, dtype=dtype, device=device)
    if plan.bias:
        total = total + named["bias"].to(dtype)
    if plan.distances:
        total = total + named["distances"][:, 0, distance + seqlen_q - 1][None].to(dtype)
    return total + named["slopes"].to(dtype)[None, :, None, None] * distance if plan.slopes else total


def attention(q: Tensor, k: Tensor, v: Tensor, operands: Sequence[Tensor], text: str) -> tuple[Tensor, Tensor]:
    """out and lse, differentiable by what PyTorch knows of its own ops. Without dropout."""
    spec = Call.from_text(text).spec
    plan = parts.make_plan(spec)
    named = dict(zip(plan.operands, operands, strict=True))
    named |= {name: named[name].detach() for name in named if name not in plan.differentiable}
    group, sizes = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    keys, values = (x.float().repeat_interleave(group, 1) for x in (k, v))
    logits = q.float() @ keys.transpose(-1, -2) * spec.score.scale
    if spec.score.softcap is not None:
        logits = torch.tanh(logits / spec.score.softcap) * spec.score.softcap
    logits = logits + added(plan, named, *sizes)
    logits = torch.where(allowed(plan, named, *sizes), logits, -torch.inf)
    if plan.sinks:
        column = named["sinks"].float()[None, :, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, column], -1)
    lse = torch.logsumexp(logits, -1)
    weights = torch.where((lse == -torch.inf)[..., None], 0.0, torch.exp(logits - lse[..., None]))
    out = weights[..., : sizes[1]] @ values
    return out.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2), lse


def define(namespace: str) -> Any:
    """`namespace::triton`, opaque to tracing and differentiable as the leaf op is. It ends with the library that is returned."""
    library: Any = torch.library.Library(namespace, "DEF")  # type: ignore[no-untyped-call]
    for op, schema, function in (("triton", _SCHEMA, _forward), ("triton_backward", _BACKWARD, _gradients)):
        library.define(schema)
        library.impl(op, function, "CPU")
    torch.library.register_fake(
        f"{namespace}::triton", lambda q, k, v, operands, spec: empty_outputs(q, v), lib=library
    )
    torch.library.register_fake(f"{namespace}::triton_backward", _fake_gradients, lib=library)

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        q, k, v, operands, ctx.spec = inputs
        ctx.save_for_backward(q, k, v, *operands)

    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
        q, k, v, *operands = ctx.saved_tensors
        leaf = getattr(torch.ops, namespace).triton_backward.default
        grad_q, grad_k, grad_v, *others = leaf(grad_out, q, k, v, operands, ctx.spec)
        found = iter(others)
        wanted = _wanted(ctx.spec)
        return grad_q, grad_k, grad_v, [next(found) if is_wanted else None for is_wanted in wanted], None

    torch.library.register_autograd(f"{namespace}::triton", backward, setup_context=setup_context, lib=library)
    return library


def _forward(q: Tensor, k: Tensor, v: Tensor, operands: Sequence[Tensor], spec: str) -> tuple[Tensor, Tensor]:
    out, lse = empty_outputs(q, v)
    exact_out, exact_lse = attention(q, k, v, operands, spec)
    return out.copy_(exact_out), lse.copy_(exact_lse)


def _wanted(text: str) -> list[bool]:
    plan = parts.make_plan(Call.from_text(text).spec)
    return [name in plan.differentiable for name in plan.operands]


def _gradients(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, operands: Sequence[Tensor], spec: str
) -> list[Tensor]:
    wanted = _wanted(spec)
    given = [x.detach().requires_grad_() for x in (q, k, v)]
    further = [x.detach().requires_grad_(is_wanted) for x, is_wanted in zip(operands, wanted, strict=True)]
    with torch.enable_grad():
        out, _ = attention(*given, further, spec)
    leaves = [*given, *(x for x in further if x.requires_grad)]
    return [grad.contiguous() for grad in torch.autograd.grad(out, leaves, grad_out)]


def _fake_gradients(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, operands: Sequence[Tensor], spec: str
) -> list[Tensor]:
    further = [x for x, is_wanted in zip(operands, _wanted(spec), strict=True) if is_wanted]
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v, *further)]
