"""What all kernels do with one tile: which tiles a band has, and what dropout draws."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_compiler.lowerings.shared.kernels import tile_parts
from tests.lowerings import kernel_problems
from tests.lowerings.kernel_cases import Case
from tests.lowerings.kernel_problems import DEVICE, Problem, build

# ---- the tiles of a band ------------------------------------------------------------------------------------------


# ---- softcap ------------------------------------------------------------------------------------------------------


@triton.jit
def _tanh(X, Y, FAST: tl.constexpr):
    at = tl.arange(0, 1024)
    tl.store(Y + at, tile_parts.tanh(tl.load(X + at), FAST))


@pytest.mark.parametrize(
    ("fast", "allowed"), [(False, 4 * 2.0**-24), pytest.param(True, 2.0**-10.9, marks=pytest.mark.gpu)]
)
@pytest.mark.filterwarnings("ignore:overflow")
def test_tanh(fast: bool, allowed: float) -> None:
    x = torch.cat([torch.linspace(-12, 12, 1020), torch.tensor([torch.inf, -torch.inf, 1e30, -1e30])]).to(DEVICE)
    y = torch.empty_like(x)
    _tanh[(1,)](x, y, fast)
    assert (y.double() - x.double().tanh()).abs().max() <= allowed


# ---- dropout ------------------------------------------------------------------------------------------------------


def _dropped(seed: int, p: float = 0.25) -> tuple[Tensor, Tensor, Problem]:
    """The weights that were used, which is out where v is the identity; and those that would be without dropout."""
    case = Case(name="dropout_identity", heads_kv=2, seqlen_q=64, seqlen_kv=64, head_dim_v=64, dropout_p=p)
    problem = build(case)
    identity = torch.eye(64, device=problem.v.device).expand_as(problem.v).contiguous().requires_grad_()
    problem = dataclasses.replace(problem, v=identity)
    problem.named["seed"].fill_(seed)
    kept = dataclasses.replace(case, dropout_p=0.0)
    undropped = build(kept)
    used, _ = kernel_problems.outputs(problem)
    whole, _ = kernel_problems.outputs(dataclasses.replace(undropped, q=problem.q, k=problem.k, v=identity))
    return used.detach(), whole.detach(), problem


def test_dropout_drops_as_many_as_it_is_told_and_scales_the_rest() -> None:
    used, whole, problem = _dropped(1)
    kept = used != 0
    assert torch.equal(kept, kernel_problems.drawn(problem))
    # 16384 draws: four standard deviations of their mean.
    assert abs(kept.float().mean().item() - 0.75) < 4 * (0.75 * 0.25 / kept.numel()) ** 0.5
    assert torch.allclose(used, whole / 0.75 * kept, atol=1e-6)
    # Every query, key and head has draws of its own.
    for axis in (0, 1, 2, 3):
        first, second = kept.select(axis, 0), kept.select(axis, 1)
        assert not torch.equal(first, second)


def test_dropout_follows_the_seed_all_64_bits_of_it() -> None:
    first, again, low, high = (_dropped(seed)[0] for seed in (1, 1, 2, 1 + 2**32))
    assert torch.equal(first, again)
    assert not torch.equal(first != 0, low != 0)
    assert not torch.equal(first != 0, high != 0)
