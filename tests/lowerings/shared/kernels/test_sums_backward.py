"""The last sums of gradients against plain loops, on any device; in whole backwards they are part of test_triton_launch.py's cases."""

from __future__ import annotations

import itertools

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_compiler.lowerings.shared.kernels.sums_backward import (
    attention_grad_sinks,
    attention_sum_diagonals,
    store_diagonals,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def _store(Tile, Sums, SIZE: tl.constexpr):
    tile = tl.load(Tile + tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :])
    store_diagonals(Sums, tile, SIZE)


def along_diagonals(tile: Tensor) -> Tensor:
    """(2 · size,): sums of a tile at each distance k - q from -size on."""
    size = tile.shape[0]
    return torch.stack([tile.diagonal(d).sum() for d in range(-size, size)])


@pytest.mark.parametrize("size", [16, 64])
def test_a_tile_along_its_diagonals(size: int) -> None:
    tile = torch.randn(size, size, generator=torch.Generator().manual_seed(size))
    sums = torch.full((2 * size,), float("nan"), device=DEVICE)
    _store[(1,)](tile.to(DEVICE), sums, SIZE=size)
    torch.testing.assert_close(sums.cpu(), along_diagonals(tile))


@pytest.mark.parametrize("span_blocks", [1, 2, None], ids=str)
@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(1, 1), (16, 16), (5, 40), (37, 3), (33, 50)])
def test_every_pair_goes_to_its_distance_once(seqlen_q: int, seqlen_kv: int, span_blocks: int | None) -> None:
    size, phases, length = 16, 8, 112
    blocks_q, blocks_k = -(-seqlen_q // size), -(-seqlen_kv // size)
    of_a_span = span_blocks or blocks_q
    generator = torch.Generator().manual_seed(seqlen_q)
    pairs = torch.zeros(2, blocks_q * size, blocks_k * size)
    pairs[:, :seqlen_q, :seqlen_kv] = torch.randn(2, seqlen_q, seqlen_kv, generator=generator)
    tiles = pairs.view(2, blocks_q, size, blocks_k, size).permute(0, 1, 3, 2, 4)
    sums = torch.zeros(2, -(-blocks_q // of_a_span), blocks_k + of_a_span - 1, 2 * size)
    for head, block_q, block_k in itertools.product(range(2), range(blocks_q), range(blocks_k)):
        span, within = block_q // of_a_span, block_q % of_a_span
        sums[head, span, block_k - within + of_a_span - 1] += along_diagonals(tiles[head, block_q, block_k])
    expected = torch.zeros(2, length)
    for q, k in itertools.product(range(seqlen_q), range(seqlen_kv)):
        expected[:, k - q + seqlen_q - 1] += pairs[:, q, k]

    grad = torch.full((2, phases, length), float("nan"), device=DEVICE)
    strides = (grad.stride(0), grad.stride(1), length)
    given = (*strides, sums.shape[1], sums.shape[2], of_a_span, seqlen_q, seqlen_q + seqlen_kv - 1)
    attention_sum_diagonals[(2, 2, 1)](sums.to(DEVICE), grad, *given, SIZE=size, PHASES=phases, BLOCK=64)
    torch.testing.assert_close(grad[:, 0].cpu(), expected)
    assert not grad[:, 1:].any()


def test_sinks_sum_over_all_rows_but_those_without_a_weight() -> None:
    batch, heads, rows = 3, 2, 128
    generator = torch.Generator().manual_seed(0)
    lse, delta = (
        torch.randn(batch, heads, rows, generator=generator),
        torch.randn(batch, heads, rows, generator=generator),
    )
    lse[:, :, 100:] = float("inf")
    sinks = torch.randn(heads, generator=generator)
    stats = torch.stack((-lse * 1.4426950408889634, delta), dim=2)
    grad = torch.empty(heads, device=DEVICE)
    attention_grad_sinks[(heads, 1, 1)](stats.to(DEVICE), sinks.to(DEVICE), grad, batch, heads, rows, BLOCK=64)
    expected = -(torch.exp(sinks[None, :, None] - lse) * delta).sum((0, 2))
    torch.testing.assert_close(grad.cpu(), expected)
