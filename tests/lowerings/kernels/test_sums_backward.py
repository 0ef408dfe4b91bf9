"""The last sums of gradients against plain loops, on any device; in whole backwards they are part of test_triton_launch.py's cases."""

from __future__ import annotations

import pytest
import torch

from attn_compiler.lowerings.kernels.sums_backward import attention_grad_sinks, attention_sum_diagonals

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(1, 1), (16, 16), (5, 40), (37, 3), (33, 50)])
def test_every_pair_goes_to_its_distance_once(seqlen_q: int, seqlen_kv: int) -> None:
    size, phases, length = 16, 8, 112
    blocks_q, blocks_k = -(-seqlen_q // size), -(-seqlen_kv // size)
    generator = torch.Generator().manual_seed(seqlen_q)
    pairs = torch.zeros(2, blocks_q * size, blocks_k * size)
    pairs[:, :seqlen_q, :seqlen_kv] = torch.randn(2, seqlen_q, seqlen_kv, generator=generator)
    tiles = pairs.view(2, blocks_q, size, blocks_k, size).permute(0, 1, 3, 2, 4)
    sums = torch.zeros(2, blocks_q + blocks_k - 1, size, size)
    for block_q in range(blocks_q):
        for block_k in range(blocks_k):
            sums[:, block_k - block_q + blocks_q - 1] += tiles[:, block_q, block_k]
    expected = torch.zeros(2, length)
    for q in range(seqlen_q):
        for k in range(seqlen_kv):
            expected[:, k - q + seqlen_q - 1] += pairs[:, q, k]

    grad = torch.full((2, phases, length), float("nan"), device=DEVICE)
    attention_sum_diagonals[(2, 2, 1)](
        sums.to(DEVICE),
        grad,
        grad.stride(0),
        grad.stride(1),
        length,
        sums.shape[1],
        blocks_q * size - seqlen_q,
        seqlen_q + seqlen_kv - 1,
        SIZE=size,
        PHASES=phases,
        BLOCK=64,
    )
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
