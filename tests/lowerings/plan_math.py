"""What the Triton kernels compute, spelled out: attention from a plan and its operands alone, and a stand-in for their leaf op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from attn_compiler.lowerings import triton_planning
from attn_compiler.lowerings.triton_plan import Call, Plan

SCHEMA = "triton(Tensor q, Tensor k, Tensor v, Tensor[] operands, str spec) -> (Tensor out, Tensor lse)"


def allowed(plan: Plan, named: Mapping[str, torch.Tensor], seqlen_q: int, seqlen_kv: int) -> torch.Tensor:
    """bool, broadcasts to (B, Hq, Sq, Skv)."""
    queries, keys = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_kv)
    found = torch.ones(1, 1, seqlen_q, seqlen_kv, dtype=torch.bool)
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


def added(plan: Plan, named: Mapping[str, torch.Tensor], seqlen_q: int, seqlen_kv: int) -> torch.Tensor:
    """float32, broadcasts to (B, Hq, Sq, Skv): what is added to the scores."""
    distance = torch.arange(seqlen_kv) - torch.arange(seqlen_q)[:, None]
    total = torch.zeros(1, 1, seqlen_q, seqlen_kv)
    if plan.bias:
        total = total + named["bias"].float()
    if plan.distances:
        total = total + named["distances"][:, distance + seqlen_q - 1][None]
    return total + named["slopes"][None, :, None, None] * distance if plan.slopes else total


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Sequence[torch.Tensor], text: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse, differentiable by what PyTorch knows of its own ops. Without dropout."""
    spec = Call.from_text(text).spec
    plan = triton_planning.of(spec)
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
