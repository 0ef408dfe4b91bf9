"""What becomes of the results of a tile's rows and of warps that went on alone."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from attn_compiler.lowerings.decode.kernels.results import first_half, joined

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, WIDTH = 16, 32


@triton.jit
def _of_slices(Total, Peak, X, Out, Lse, SLICES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    rows = tl.arange(0, SLICES)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    x = tl.load(X + rows[:, :, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :])
    total, peak = (
        first_half(tl.load(Total + rows), SLICES, ROWS // 2),
        first_half(tl.load(Peak + rows), SLICES, ROWS // 2),
    )
    total, peak, out, _ = joined(total, peak, first_half(x, SLICES, ROWS // 2), x, SLICES, 0)
    kept = tl.arange(0, ROWS // 2)
    tl.store(Lse + kept, peak + tl.log2(total))
    tl.store(Out + kept[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], out / total[:, None])


@pytest.mark.parametrize("slices", [2, 4, 8])
def test_slices_are_joined_by_their_weights(slices: int) -> None:
    torch.manual_seed(slices)
    x = torch.randn(slices, ROWS, WIDTH, device=DEVICE)
    total, peak = torch.rand(slices, ROWS, device=DEVICE) + 0.5, torch.randn(slices, ROWS, device=DEVICE) * 9
    # A slice whose keys are all masked.
    total[1, 3], peak[1, 3], x[1, 3] = 0.0, -torch.inf, 0.0
    out, lse = torch.empty(ROWS // 2, WIDTH, device=DEVICE), torch.empty(ROWS // 2, device=DEVICE)
    _of_slices[(1,)](total, peak, x, out, lse, SLICES=slices, ROWS=ROWS, WIDTH=WIDTH, num_warps=slices)
    scale = 2.0 ** (peak - peak.amax(0))
    weight = (total * scale).sum(0)
    torch.testing.assert_close(out, ((x * scale[..., None]).sum(0) / weight[:, None])[: ROWS // 2])
    torch.testing.assert_close(lse, (peak.amax(0) + weight.log2())[: ROWS // 2])


@triton.jit
def _of_rows(X, Out, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    kept = tl.arange(0, ROWS // 2)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(Out + kept, first_half(tl.load(X + at), 1, ROWS // 2))


def test_the_first_half_of_rows_that_all_warps_share() -> None:
    x = torch.randn(ROWS, WIDTH, device=DEVICE)
    out = torch.empty(ROWS // 2, WIDTH, device=DEVICE)
    _of_rows[(1,)](x, out, ROWS=ROWS, WIDTH=WIDTH)
    assert torch.equal(out, x[: ROWS // 2])
