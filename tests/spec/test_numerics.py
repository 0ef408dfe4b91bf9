"""The numeric rule: every dtype has a rounding, and differences of what is finite and of what is not."""

from __future__ import annotations

import math

import pytest
import torch

from attn_compiler.spec.dtypes import ALL
from attn_compiler.spec.numerics import FLOOR_ULPS, difference, exact_dtype, largest

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
