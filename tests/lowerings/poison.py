"""Keys and values that nobody may see, filled with what must not get anywhere: NaN, infinities, numbers that no scale fits."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from tests.lowerings import plan_math
from tests.lowerings.kernel_problems import Problem

NOT_FINITE = (torch.nan, torch.inf, -torch.inf)


def unseen_of(allowed: Tensor, heads_kv: int) -> Tensor:
    """bool (B|1, Hkv|1, Skv): keys that no query of the heads that share them may see. allowed: (B|1, Hq|1, Sq, Skv)."""
    seen = allowed.any(2)
    if seen.shape[1] > 1:
        seen = seen.unflatten(1, (heads_kv, -1)).any(2)
    return ~seen


def unseen(problem: Problem) -> Tensor:
    """As `unseen_of`, of a problem's mask."""
    q, k = problem.q, problem.k
    sizes = (q.shape[2], k.shape[2])
    allowed = plan_math.allowed(problem.plan, problem.named, *sizes, device=q.device)
    return unseen_of(allowed.expand(*allowed.shape[:2], *sizes), k.shape[1])


def filled(x: Tensor, where: Tensor, values: tuple[float, ...]) -> Tensor:
    """x (B, H, S, D) in its strides with the values in turn where (B|1, H|1, S) holds."""
    cycle = torch.tensor(values, dtype=x.dtype, device=x.device).repeat(-(-x.shape[2] // len(values)))[: x.shape[2]]
    other = torch.where(where[..., None], cycle[:, None], x.detach())
    return torch.empty_like(x).copy_(other) if 0 not in x.stride() else other


def with_unseen(problem: Problem, *values: float) -> Problem:
    """The same problem with the values in turn in all keys and values that nobody may see."""
    where, wants = unseen(problem), problem.k.requires_grad
    k, v = (filled(x, where, values).requires_grad_(wants) for x in (problem.k, problem.v))
    return dataclasses.replace(problem, k=k, v=v)
