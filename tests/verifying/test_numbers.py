"""Roundings, differences and noise: what is finite, what is not, what shares memory, and that noise is as large as a rounding."""

from __future__ import annotations

import math

import pytest
import torch

from attn_compiler.spec.dtypes import ALL
from attn_compiler.verifying.numbers import FLOOR_ULPS, Noise, difference, exact_dtype, largest, shares_memory

INF, NAN = math.inf, math.nan


def test_every_dtype_of_attention_has_a_rounding_and_a_wider_dtype() -> None:
    assert {str(dtype).removeprefix("torch.") for dtype in FLOOR_ULPS} == set(ALL)
    for dtype in FLOOR_ULPS:
        wider = exact_dtype(dtype)
        assert torch.finfo(wider).eps < torch.finfo(dtype).eps or wider is dtype is torch.float64


@pytest.mark.parametrize(
    ("x", "exact", "apart"),
    [
        (1.0, 3.5, 2.5),
        (-2.0, -2.0, 0.0),
        (INF, INF, 0.0),
        (NAN, NAN, 0.0),
        (INF, -INF, INF),
        (NAN, 0.0, INF),
        (1.0, NAN, INF),
    ],
)
def test_differences_of_what_is_not_finite(x: float, exact: float, apart: float) -> None:
    found = difference(torch.tensor([x], dtype=torch.float16), torch.tensor([exact], dtype=torch.float32))
    assert (found.item(), found.dtype) == (apart, torch.float32)


def test_the_largest_of_what_counts() -> None:
    x = torch.tensor([1.0, -7.0, 9.0, NAN])
    assert largest(x, torch.tensor([True, True, False, True])) == 7.0
    assert largest(x, torch.zeros(4).bool()) == 0.0
    assert largest(torch.empty(0, 3), torch.empty(0, 3).bool()) == 0.0


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
