"""Exact runs with roundings."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.fuzz import roundings

EPS = 2.0**-8


def _written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 1e4).softmax(-1) @ v


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=1e4)


def _gradient(function: Callable[..., Tensor]) -> Tensor:
    """Of q, where one key has all the weight."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 4, dtype=torch.float64) for n in (5, 3, 3))
    q.requires_grad_()
    return torch.autograd.grad(function(q, k, v).sum(), q)[0]


@pytest.mark.parametrize("function", [_written_out, _sdpa])
def test_a_saturated_softmax_has_a_rounding_for_its_gradient(function: Callable[..., Tensor]) -> None:
    assert _gradient(function).abs().max() < 1e-6
    with roundings.rounded(EPS, 1):
        moved = _gradient(function)
    # The scores' gradient is off by at most EPS times one product with v, and is scaled by 1e4 and k.
    assert 1.0 < moved.abs().max() < EPS * 1e4 * 50


def test_inputs_move_by_their_part_alone() -> None:
    numbers, whole = torch.full((100,), 8.0), torch.arange(3)
    roundings.disturb([numbers, whole], EPS, 1)
    assert 0.5 * 8 * EPS < (numbers - 8).abs().max() <= 8 * EPS
    assert whole.tolist() == [0, 1, 2]


def test_scores_of_a_million_have_no_digits() -> None:
    """Nothing else moves them: a row of small scores is what it was, but for float32."""
    torch.manual_seed(0)
    scores = torch.randn(1, 1, 5, 4, dtype=torch.float64)
    with roundings.rounded(EPS, 1):
        small, large = scores.softmax(-1), (scores + 1e6).softmax(-1)
    assert (small - scores.softmax(-1)).abs().max() < 1e-6
    assert 1e-3 < (large - scores.softmax(-1)).abs().max() < 0.2


def test_masked_scores_stay_masked() -> None:
    scores = torch.tensor([0.0, -torch.inf, torch.finfo(torch.float32).min], dtype=torch.float64)
    with roundings.rounded(EPS, 1):
        assert scores.softmax(-1).tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("number", [torch.finfo(torch.float64).min, -1e9, 3e5])
def test_a_row_of_one_number_weighs_all_keys_alike(number: float) -> None:
    scores = torch.full((1, 1, 50, 4), number, dtype=torch.float64)
    with roundings.rounded(EPS, 1):
        assert torch.equal(scores.softmax(-1), torch.full_like(scores, 0.25))
