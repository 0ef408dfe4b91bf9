"""Roundings, differences and noise: what is finite, what is not, what shares memory, and that noise is as large as a rounding."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from attn_compiler.spec.numerics import FLOOR_ULPS
from attn_compiler.verifying.numbers import Noise, fused_noise, shares_memory

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("dtype", FLOOR_ULPS, ids=str)
def test_noise_is_as_large_as_a_rounding_and_the_same_for_a_seed(dtype: torch.dtype) -> None:
    wide = torch.full((500,), 3.0, dtype=torch.float64)
    one, again, other = (Noise(seed=seed).on(wide, dtype) for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    step = 3 * FLOOR_ULPS[dtype] * torch.finfo(dtype).eps
    assert 0.9 * step < float((one - wide).abs().max()) <= step * 1.001


def test_noise_goes_on_from_draw_to_draw() -> None:
    noise = Noise(seed=0)
    assert not torch.equal(noise.like(torch.ones(9)), noise.like(torch.ones(9)))


def test_what_is_no_rounded_number_is_left_as_it_is() -> None:
    noise, x = Noise(seed=0), torch.randn(4, dtype=torch.float64)
    own = x.float()
    assert not torch.equal(noise.on_step(x, own, []), x)
    assert noise.on_step(x, own, [x.view(2, 2)]) is x
    assert noise.on_step(x, own.int(), []) is x
    assert noise.on_step(x, None, []) is x
    assert noise.on_step(7, own, []) == 7
    whole = torch.arange(4)
    assert noise.on_step(whole, whole, []) is whole


def test_memory_that_is_shared() -> None:
    x = torch.randn(6)
    assert shares_memory(x[:2], x[4:])
    assert shares_memory(x[:1], x)
    assert not shares_memory(x, x.clone())
    assert not shares_memory(x[:0], x)
    # Nobody says where a sparse tensor's numbers are.
    assert shares_memory(x.to_sparse(), torch.zeros(1))
    assert shares_memory(torch.zeros(1), x.to_sparse())


# ---- noise where a fused kernel rounds ---------------------------------------------------------------------------


def _gradient_of_scores(
    scores: torch.Tensor, v: torch.Tensor, noise: Noise | None, dtype: torch.dtype | None
) -> torch.Tensor:
    leaf = scores.clone().requires_grad_()
    out = leaf.softmax(-1) @ v
    with fused_noise(noise, dtype):
        (found,) = torch.autograd.grad(out.sum(), leaf)
    return found


def test_one_key_alone_has_a_gradient_of_roundings() -> None:
    scores, v = torch.randn(2, 3, 1, dtype=torch.float64), torch.randn(2, 1, 8, dtype=torch.float64)
    assert not _gradient_of_scores(scores, v, None, torch.float32).any()
    found = _gradient_of_scores(scores, v, Noise(seed=0), torch.float32)
    most = v.sum(-1).abs().max() * FLOOR_ULPS[torch.float32] * torch.finfo(torch.float32).eps
    assert 0 < found.abs().max() <= most


def test_a_narrower_output_rounds_more() -> None:
    scores, v = torch.randn(2, 3, 5, dtype=torch.float64), torch.randn(2, 5, 8, dtype=torch.float64)
    exact = _gradient_of_scores(scores, v, None, None)
    off = [
        float((_gradient_of_scores(scores, v, Noise(seed=0), dtype) - exact).abs().max())
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert 0 < off[0] < off[1] / 100


def test_sdpa_is_disturbed_as_its_products_are() -> None:
    q = torch.randn(1, 1, 4, 8, dtype=torch.float64, requires_grad=True)
    with fused_noise(Noise(seed=0), torch.float32):
        out = F.scaled_dot_product_attention(q, q.detach(), q.detach())
        (found,) = torch.autograd.grad(out.sum(), q)
    (exact,) = torch.autograd.grad(F.scaled_dot_product_attention(q, q.detach(), q.detach()).sum(), q)
    assert 0 < (found - exact).abs().max() < 1e-3


def test_without_noise_nothing_changes() -> None:
    scores, v = torch.randn(2, 3, 5), torch.randn(2, 5, 8)
    exact = _gradient_of_scores(scores, v, None, torch.float32)
    assert torch.equal(_gradient_of_scores(scores, v, Noise(seed=0), None), exact)


def test_a_softmax_of_nothing() -> None:
    found = _gradient_of_scores(torch.randn(2, 0, 5), torch.randn(2, 5, 8), Noise(seed=0), torch.float32)
    assert found.shape == (2, 0, 5)
