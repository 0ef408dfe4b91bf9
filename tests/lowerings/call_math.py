"""What a cuDNN call computes, spelled out from its text and operands alone, and random problems for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attn_compiler.lowerings.cudnn.plan import CudnnCall
from tests import numerics


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Tensors for one call. named: its operands."""

    call: CudnnCall
    q: Tensor
    k: Tensor
    v: Tensor
    named: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def labels(self) -> tuple[str, ...]:
        """What `results` holds."""
        return ("out", *(("dq", "dk", "dv") if self.call.needs_grad else ()), *self.call.differentiable)


def allowed(
    call: CudnnCall, named: Mapping[str, Tensor], seqlen_q: int, seqlen_kv: int, device: torch.device
) -> Tensor:
    """bool, broadcasts to (B, Hq, Sq, Skv)."""
    keys = torch.arange(seqlen_kv, device=device)
    at = torch.arange(seqlen_q, device=device)[:, None] + (seqlen_kv - seqlen_q if call.from_end else 0)
    found = torch.ones(1, 1, seqlen_q, seqlen_kv, dtype=torch.bool, device=device)
    found = found if call.left is None else found & (keys >= at - call.left)
    found = found if call.right is None else found & (keys <= at + call.right)
    return found & (keys < named["lengths"][:, None, None, None]) if call.lengths else found


def attention(q: Tensor, k: Tensor, v: Tensor, named: Mapping[str, Tensor], call: CudnnCall) -> Tensor:
    """Every step in q's dtype. A row without any allowed key gives 0. Without dropout."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * call.scale
    if call.bias:
        scores = scores + named["bias"].to(scores.dtype)
    usable = allowed(call, named, q.shape[2], k.shape[2], q.device)
    scores = torch.where(usable, scores, torch.finfo(scores.dtype).min)
    if call.sinks:
        column = named["sinks"].to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return torch.where(usable, weights, 0.0) @ v


def operands(
    call: CudnnCall,
    *,
    batch: int,
    heads: int,
    seqlen_q: int,
    bias: tuple[int, ...] | None,
    lengths: list[int] | None,
    dtype: torch.dtype,
    device: str,
) -> dict[str, Tensor]:
    """Random ones, by name, but for the lengths that are given."""
    found: dict[str, Tensor] = {}
    if bias is not None:
        found["bias"] = torch.randn(bias, device=device).to(dtype)
    if call.sinks:
        found["sinks"] = torch.randn(heads, device=device)
    if lengths is not None:
        found["lengths_q"] = torch.full((batch,), seqlen_q, dtype=torch.int32, device=device)
        found["lengths"] = torch.tensor(lengths, dtype=torch.int32, device=device)
    return found


def results(problem: Problem, function: Any, dtype: torch.dtype | None, upstream: Tensor) -> list[Tensor]:
    """What `labels` names, of function(q, k, v, named). dtype: what everything is cast to first; None: as it is."""
    wanted = problem.call.needs_grad

    def leaf(x: Tensor, is_wanted: bool = wanted) -> Tensor:
        cast = x.detach() if dtype is None or not x.is_floating_point() else x.detach().to(dtype)
        return cast.requires_grad_(is_wanted)

    q, k, v = (leaf(x) for x in (problem.q, problem.k, problem.v))
    named = {name: leaf(x, name in problem.call.differentiable) for name, x in problem.named.items()}
    out = function(q, k, v, named)
    if not wanted:
        return [out]
    leaves = [q, k, v, *(named[name] for name in problem.call.differentiable)]
    return [out, *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]


def assert_within_rule(problem: Problem, fused: Any) -> None:
    """Hold fused(q, k, v, named), and its gradients, against the numeric rule (tests/numerics.py)."""
    shape = (*problem.q.shape[:3], problem.v.shape[3])
    upstream = torch.randn(shape, device=problem.q.device).to(problem.q.dtype)

    def plain(q: Tensor, k: Tensor, v: Tensor, named: Mapping[str, Tensor]) -> Tensor:
        return attention(q, k, v, named, problem.call)

    mine = results(problem, fused, None, upstream)
    exact = results(problem, plain, torch.float32, upstream)
    usual = results(problem, plain, problem.q.dtype, upstream)
    for label, got, right, of_dtype in zip(problem.labels, mine, exact, usual, strict=True):
        bound = numerics.FACTOR * numerics.worst(of_dtype, right) + numerics.floor(right, problem.q.dtype)
        found = numerics.worst(got, right)
        assert found <= bound, f"{label}: off by {found:.3g}, allowed {bound:.3g}"
