from __future__ import annotations

import torch
import torch.nn.functional as F

from attn_compiler.verifying.fused_noise import fused_noise
from attn_compiler.verifying.numbers import FLOOR_ULPS, Noise

Tensor = torch.Tensor


def _gradient_of_scores(scores: Tensor, v: Tensor, noise: Noise | None, dtype: torch.dtype | None) -> Tensor:
    leaf = scores.clone().requires_grad_()
    out = leaf.softmax(-1) @ v
    with fused_noise(noise, dtype):
        (found,) = torch.autograd.grad(out.sum(), leaf)
    return found


def test_one_key_alone_has_a_gradient_of_roundings() -> None:
    scores, v = torch.randn(2, 3, 1, dtype=torch.float64), torch.randn(2, 1, 8, dtype=torch.float64)
    assert not _gradient_of_scores(scores, v, None, torch.float32).any()
    found = _gradient_of_scores(scores, v, Noise(seed=0), torch.float32)
    largest = v.sum(-1).abs().max() * FLOOR_ULPS[torch.float32] * torch.finfo(torch.float32).eps
    assert 0 < found.abs().max() <= largest


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
