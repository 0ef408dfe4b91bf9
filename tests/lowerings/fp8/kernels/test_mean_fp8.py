"""Sums of parts, and the sum of those; whole tensors: ../test_fp8_rounding_launch.py."""

from __future__ import annotations

import torch
import triton

from attn_compiler.lowerings.fp8 import rounding
from attn_compiler.lowerings.fp8.kernels import mean_fp8
from tests.lowerings.kernel_problems import DEVICE

B, H, S, D = 2, 3, 100, 48
PART, PARTS = 16, 2


def test_each_part_sums_what_is_finite_of_its_own() -> None:
    x = torch.randn(B, S, H, D, device=DEVICE).half().transpose(1, 2)
    x[1, 2, 40, 3], x[0, 0, 0, 0], x[1, :, 50] = torch.nan, -torch.inf, 3e4
    seen = torch.ones(B, S, dtype=torch.uint8, device=DEVICE)
    seen[1, 50] = 0
    parts = triton.cdiv(S, PART * PARTS)
    sums = torch.full((B, H, parts, D), torch.nan, device=DEVICE)
    mean_fp8.sums_fp8[parts * H * B,](
        x, seen, sums, *x.stride()[:3], S, H, S, parts, PARTS=PARTS, PART=PART, HEAD_DIM=D, WIDTH=64
    )
    finite = torch.where(x.isfinite() & (seen != 0)[:, None, :, None], x, 0.0).float()
    right = torch.stack([each.sum(2) for each in finite.split(PART * PARTS, 2)], 2)
    torch.testing.assert_close(sums, right, rtol=1e-4, atol=1e-4)


def test_the_mean_has_its_rotation_beside_it() -> None:
    sums = torch.randn(B, H, 5, 64, device=DEVICE)
    sums[1, 1, 2, 7] = torch.inf
    mean = torch.full((B, H, 2, 64), torch.nan, device=DEVICE)
    mean_fp8.mean_fp8[B * H,](sums, mean, S, 5, AT_ONCE=4, HEAD_DIM=64, WIDTH=64, ROTATED=True)
    right = sums.sum(2) / S
    right[1, 1, 7] = 0.0
    torch.testing.assert_close(mean[:, :, 0], right)
    torch.testing.assert_close(mean[:, :, 1], rounding.rotated(right))
