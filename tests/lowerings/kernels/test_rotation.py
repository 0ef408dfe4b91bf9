"""Products with H of ±1, tile by tile."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from attn_compiler.lowerings import fp8_rounding
from attn_compiler.lowerings.kernels import rotation
from tests.lowerings.kernel_problems import DEVICE

ROWS = 32


@triton.jit
def _turn(X, Product, Signs, N: tl.constexpr, HEAD_DIM: tl.constexpr):
    dims = tl.arange(0, HEAD_DIM)
    places = tl.arange(0, N)[:, None] * HEAD_DIM + dims[None, :]
    x = tl.load(X + places)
    tl.store(Product + places, rotation.times_signs(x, rotation.signs(HEAD_DIM, x.dtype)))
    at = tl.arange(0, 16)
    tl.store(Signs + at[:, None] * HEAD_DIM + dims[None, :], rotation.signs_of(at[:, None], dims[None, :], tl.float32))


# The interpreter multiplies the bit patterns of bfloat16 (https://github.com/triton-lang/triton/issues/11584).
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_products_are_those_with_every_row_of_h(head_dim: int, dtype: torch.dtype) -> None:
    x = torch.randn(ROWS, head_dim, device=DEVICE).to(dtype)
    product, signs = torch.empty_like(x, dtype=torch.float32), torch.empty(16, head_dim, device=DEVICE)
    _turn[1,](x, product, signs, N=ROWS, HEAD_DIM=head_dim)
    right = fp8_rounding.signs(head_dim, x.double())
    assert torch.equal(signs.double(), right[:16])
    torch.testing.assert_close(product.double(), x.double() @ right, rtol=1e-4, atol=1e-4)
