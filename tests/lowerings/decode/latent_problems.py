"""What the kernel over a latent is run on: a problem of the decode kernel's with one head of keys, whose values are their first dims."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from attn_compiler.lowerings.decode import latent_launch, plan as decode_plan
from attn_compiler.lowerings.decode.plan import DecodeCall, Schedule
from attn_compiler.spec.attention import LatentSpec, TensorSpec
from tests.lowerings.decode import problems
from tests.lowerings.decode.problems import DEVICE, Case, Problem

SMALL = Schedule(keys=32, warps=4, stages=1, programs=64, least_keys=32, splits=3, rows=16)


def of_latent(
    case: Case,
    *,
    rank: int = 32,
    rope: int = 8,
    dtype: torch.dtype = torch.float32,
    device: str = DEVICE,
    schedule: Schedule | None = None,
    unaligned: bool = False,
) -> Problem:
    """k of the problem is [latent, rope], each a tensor of its own, and v the latent. unaligned: they begin between two vectors."""
    wide = dataclasses.replace(case, heads_kv=1, head_dim=rank + rope, head_dim_v=rank, scale=case.scale or 0.2)
    problem = problems.build(wide, dtype=dtype, device=device, one_kv=True)
    latent, shared = (_of_its_own(x, unaligned) for x in (problem.k[..., :rank], problem.k[..., rank:]))
    described = [
        TensorSpec(shape=tuple(x.shape), strides=tuple(x.stride()), dtype=str(x.dtype).removeprefix("torch."))
        for x in (latent, shared)
    ]
    found = LatentSpec(latent=described[0], rope=described[1] if rope else None, nope=16)
    spec = dataclasses.replace(problem.spec, latent=found)
    chosen = dataclasses.replace(schedule or SMALL, splits=case.splits)
    return dataclasses.replace(
        problem,
        v=latent,
        named={**problem.named, **({"rope": shared} if rope else {})},
        spec=spec,
        text=DecodeCall(spec=spec, schedule=chosen, of_latent=True).to_text(),
        plan=dataclasses.replace(wide.plan, count=False, rope=rope > 0),
    )


def _of_its_own(x: Tensor, unaligned: bool) -> Tensor:
    if not unaligned:
        return x.contiguous()
    room = torch.empty((*x.shape[:-1], x.shape[-1] + 3), dtype=x.dtype, device=x.device)
    return room[..., 1 : x.shape[-1] + 1].copy_(x)


@contextmanager
def planned(problem: Problem) -> Iterator[None]:
    """Every call has the problem's plan."""
    latent_launch.prepare.cache_clear()
    try:
        with mock.patch.object(decode_plan, "plan_of", return_value=problem.plan):
            yield
    finally:
        latent_launch.prepare.cache_clear()


def results(problem: Problem) -> tuple[Tensor, Tensor]:
    """out and lse of the kernel."""
    with planned(problem):
        return run(problem)


def run(problem: Problem) -> tuple[Tensor, Tensor]:
    """The same where the plan is known already."""
    given = (problem.q, problem.v, problem.v, problem.operands, problem.text)
    found: tuple[Tensor, Tensor] = torch.ops.attn_compiler.decode_latent(*given)
    return found
