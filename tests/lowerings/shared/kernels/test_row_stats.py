"""What a backward needs of each row: nothing of a row without a key counts, whatever is put on it."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

from attn_compiler.lowerings.shared.kernels.row_stats import make_row_stats, minus_lse, row_stats, store_row_stats
from attn_compiler.lowerings.shared.kernels.tuples import Strides

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, HEADS, LENGTH, BLOCK, DIM, ROWS = 2, 3, 21, 16, 16, 32


@triton.jit
def _made(
    Out, GradOut, Lse, GradLse, Stats, o_b, o_h, o_s, g_b, g_h, g_s, heads, length, rows,
    BLOCK_M: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    stride_o, stride_g = Strides(b=o_b, h=o_h, s=o_s), Strides(b=g_b, h=g_h, s=g_s)
    make_row_stats(
        Out, GradOut, Lse, GradLse, Stats, stride_o, stride_g, tl.program_id(0) * BLOCK_M, tl.program_id(1),
        tl.program_id(2), heads, length, rows, BLOCK_M, DIM, DIM, 1,
    )  # fmt: skip


def _stats(out: torch.Tensor, grad_out: torch.Tensor, lse: torch.Tensor, grad_lse: torch.Tensor) -> torch.Tensor:
    stats = torch.full((BATCH, HEADS, 2, ROWS), torch.nan, device=DEVICE)
    given = (x.to(DEVICE) for x in (out, grad_out, lse, grad_lse))
    strides = (*out.stride()[:3], *grad_out.stride()[:3])
    _made[(ROWS // BLOCK, HEADS, BATCH)](*given, stats, *strides, HEADS, LENGTH, ROWS, BLOCK_M=BLOCK, DIM=DIM)
    return stats.cpu()


def _inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    out, grad_out = (torch.randn(BATCH, HEADS, LENGTH, DIM, generator=generator) for _ in range(2))
    lse, grad_lse = (torch.randn(BATCH, HEADS, LENGTH, generator=generator) for _ in range(2))
    return out, grad_out, lse, grad_lse


def test_they_are_what_they_are_said_to_be() -> None:
    out, grad_out, lse, grad_lse = _inputs()
    # Of BSHD: heads are not the slowest axis but one.
    grad_out = grad_out.transpose(1, 2).contiguous().transpose(1, 2)
    stats = _stats(out, grad_out, lse, grad_lse)
    torch.testing.assert_close(stats[:, :, 0, :LENGTH], -lse / math.log(2))
    torch.testing.assert_close(stats[:, :, 1, :LENGTH], (out * grad_out).sum(-1) - grad_lse, atol=1e-5, rtol=1e-5)


def test_rows_beyond_the_last_weigh_nothing() -> None:
    stats = _stats(*_inputs())
    assert (stats[:, :, 0, LENGTH:] == -math.inf).all()
    assert (stats[:, :, 1, LENGTH:] == 0).all()


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_put_on_a_row_without_keys_does_not_count(value: float) -> None:
    out, grad_out, lse, grad_lse = _inputs()
    clean = _stats(out, grad_out, lse, grad_lse)
    out[0, 1, 4], lse[0, 1, 4] = 0.0, -math.inf
    grad_out[0, 1, 4], grad_lse[0, 1, 4] = value, value
    stats = _stats(out, grad_out, lse, grad_lse)
    assert (stats[0, 1, 0, 4], stats[0, 1, 1, 4]) == (-math.inf, 0.0)
    stats[0, 1, :, 4] = clean[0, 1, :, 4]
    assert torch.equal(stats, clean)


@triton.jit
def _again(Lse, Stats, Out, length, rows, ROWS: tl.constexpr):
    offsets = tl.arange(0, ROWS)
    base = minus_lse(Lse, offsets, length)
    store_row_stats(Stats, offsets, rows, base, offsets.to(tl.float32))
    base, delta = row_stats(Stats, offsets, rows)
    tl.store(Out + offsets, tl.where(base == float("-inf"), -1.0, base + delta))


def test_what_is_stored_is_what_is_read() -> None:
    lse = torch.zeros(LENGTH, device=DEVICE)
    stats, found = torch.zeros(2 * ROWS, device=DEVICE), torch.zeros(ROWS, device=DEVICE)
    _again[(1,)](lse, stats, found, LENGTH, ROWS, ROWS=ROWS)
    assert found.tolist() == [*map(float, range(LENGTH)), *[-1.0] * (ROWS - LENGTH)]
