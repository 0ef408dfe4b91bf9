"""Rows times H / √D with H of ±1, and which of them are finite."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from attn_compiler.lowerings.fp8 import rounding
from attn_compiler.lowerings.fp8.kernels import rotation
from tests.lowerings.kernel_problems import DEVICE

ROWS, LENGTH = 32, 30


@triton.jit
def _turn(X, Mean, Seen, Product, Largest, Signs, length, N: tl.constexpr, HEAD_DIM: tl.constexpr):
    dims = tl.arange(0, HEAD_DIM)[None, :]
    turning = rotation.signs(HEAD_DIM, X.dtype.element_ty)
    mean = None if Mean is None else tl.load(Mean + dims)
    product = rotation.load_rotated(X, mean, Seen, turning, 0, length, HEAD_DIM, N, HEAD_DIM)
    product, largest = rotation.finite_rows(product, 0, length, -1.0)
    tl.store(Product + tl.arange(0, N)[:, None] * HEAD_DIM + dims, product)
    tl.store(Largest, largest)
    at = tl.arange(0, 16)[:, None]
    tl.store(Signs + at * HEAD_DIM + dims, rotation.signs_of(at, dims, tl.float32))


# The interpreter multiplies the bit patterns of bfloat16 (https://github.com/triton-lang/triton/issues/11584).
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("has_mean", [False, True])
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_rows_are_those_times_h(head_dim: int, has_mean: bool, dtype: torch.dtype) -> None:
    x = torch.randn(ROWS, head_dim, device=DEVICE).to(dtype)
    x[3, 1], x[4, 2], x[5, 3], x[5, 4] = torch.nan, -torch.inf, torch.inf, torch.inf
    x[LENGTH:], x[7], x[8] = 100.0, torch.nan, 1e4
    mean = torch.randn(head_dim, device=DEVICE) if has_mean else None
    product, largest = torch.empty(ROWS, head_dim, device=DEVICE), torch.empty(1, device=DEVICE)
    signs, seen = torch.empty(16, head_dim, device=DEVICE), torch.ones(LENGTH, dtype=torch.uint8, device=DEVICE)
    seen[7:9] = 0
    _turn[1,](x, mean, seen, product, largest, signs, LENGTH, N=ROWS, HEAD_DIM=head_dim)
    h = rounding.signs(head_dim, x.double())
    assert torch.equal(signs.double(), h[:16])
    right = x.double() @ h / head_dim**0.5 - (0.0 if mean is None else mean.double())
    right[3:6], right[7:9] = -1.0, 0.0
    torch.testing.assert_close(product[:LENGTH].double(), right[:LENGTH], rtol=1e-4, atol=1e-4)
    finite = torch.cat((right[:3], right[6:LENGTH])).abs().max()
    torch.testing.assert_close(largest[0].double(), finite, rtol=1e-4, atol=1e-4)
