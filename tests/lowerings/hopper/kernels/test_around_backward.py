"""The kernels around Hopper's backward, in Triton's interpreter: row stats and zeros, dq of its sums, sums over groups of heads."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

from attn_compiler.lowerings.hopper.kernels import around_backward
from attn_compiler.lowerings.shared.calls.arguments import strides
from attn_compiler.lowerings.shared.kernels.tuples import ListStrides

BATCH, HEADS, LENGTH, HEAD_DIM, ROWS = 2, 3, 70, 72, 128
BLOCK = 64


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def test_row_stats_and_zeros() -> None:
    out, grad_out = _random(BATCH, HEADS, LENGTH, HEAD_DIM), 2 * _random(BATCH, HEADS, LENGTH, HEAD_DIM)
    lse, grad_lse = _random(BATCH, HEADS, LENGTH), 3 * _random(BATCH, HEADS, LENGTH)
    out[0, 0, 5], lse[0, 0, 5], grad_out[0, 0, 5] = 0.0, -torch.inf, torch.nan
    stats = torch.full((BATCH, HEADS, 2, ROWS), torch.nan)
    sums = torch.full((BATCH, HEADS, LENGTH, HEAD_DIM), torch.nan)
    flag = torch.tensor([7, 9], dtype=torch.int32)
    turns = torch.full((BATCH, HEADS, ROWS // BLOCK), 5, dtype=torch.int32)
    around_backward.attention_before_backward[ROWS // BLOCK, HEADS, BATCH](
        out, grad_out, lse, grad_lse, stats, sums, flag, turns, strides("o", out)["stride_o"], strides("g", grad_out)["stride_g"],
        HEADS, LENGTH, ROWS, BLOCK, HEAD_DIM, 128, HEAD_DIM, 128, 1,
    )  # fmt: skip
    wanted = (out * grad_out.nan_to_num()).sum(-1) - grad_lse
    wanted[0, 0, 5] = 0.0
    torch.testing.assert_close(stats[:, :, 0, :LENGTH], torch.where(lse == -torch.inf, lse, -lse / math.log(2)))
    torch.testing.assert_close(stats[:, :, 1, :LENGTH], wanted)
    assert (stats[:, :, 0, LENGTH:] == -torch.inf).all()
    assert not sums.any()
    assert not flag.any()
    assert not turns.any()


@pytest.mark.parametrize("is_ordered", [False, True])
def test_ranks_count_the_blocks_that_come_before(is_ordered: bool) -> None:
    """Of 5 blocks and 21 tiles, which is no multiple of what a program takes."""
    heads, blocks, tiles = 2, 5, 21
    generator = torch.Generator().manual_seed(0)
    kind = torch.randint(0, 3, (1, heads, blocks, tiles), generator=generator)
    first = torch.randint(0, tiles, (1, heads, blocks, 1), generator=generator)
    at = torch.arange(tiles)
    # 0: not visited, 1: listed, 2: in a run
    kind = torch.where((at >= first) & (at < first + 4), 2, kind % 2)
    lists = torch.full((1, heads, blocks + 1, tiles + 4), -7, dtype=torch.int32)
    for head in range(heads):
        for block in range(blocks):
            listed, run = ((kind[0, head, block] == each).nonzero().flatten() for each in (1, 2))
            header = torch.tensor([len(listed), int(run[0]), int(run[-1]) + 1])
            lists[0, head, block, : 3 + len(listed)] = torch.cat([header, listed])
        order = torch.randperm(blocks, generator=generator)
        lists[0, head, :blocks, -1] = order
    ranks = torch.full_like(lists, -9)
    around_backward.attention_ranks[2, heads, 1](
        lists, ranks, ListStrides(*lists.stride()[:3]), blocks, tiles, is_ordered, 16, 8
    )
    for head in range(heads):
        order = lists[0, head, :blocks, -1].flip(0).tolist() if is_ordered else list(range(blocks))
        seen = torch.zeros(tiles, dtype=torch.int32)
        for block in order:
            assert torch.equal(ranks[0, head, block, :tiles], seen)
            seen += (kind[0, head, block] > 0).int()


@pytest.mark.parametrize("marks", [False, True])
@pytest.mark.parametrize("is_right", [False, True])
def test_dq_is_its_sums_times_the_scale(marks: bool, is_right: bool) -> None:
    sums = _random(BATCH, HEADS, LENGTH, HEAD_DIM)
    if not is_right:
        sums[1, 2, 69, 71] = torch.nan
    grad = torch.empty(BATCH, LENGTH, HEADS, HEAD_DIM).transpose(1, 2)
    flag = torch.zeros(2, dtype=torch.int32)
    around_backward.attention_after_backward[2, HEADS, BATCH](
        sums, grad, flag, strides("dq", grad)["stride_dq"], HEADS, LENGTH, 0.25, BLOCK, HEAD_DIM, 128, 1, marks
    )
    torch.testing.assert_close(grad, sums * 0.25, equal_nan=True)
    assert flag.tolist() == [int(marks and not is_right), 0]


def test_sums_over_groups_of_heads() -> None:
    each = _random(BATCH, HEADS * 2, LENGTH, HEAD_DIM)
    grad = torch.empty(BATCH, HEADS, LENGTH, HEAD_DIM)
    around_backward.attention_sum_groups[2, HEADS, BATCH](
        each, grad, strides("e", each)["stride_e"], strides("d", grad)["stride_d"], LENGTH, 2, BLOCK, HEAD_DIM, 128, 1
    )
    torch.testing.assert_close(grad, each.unflatten(1, (HEADS, 2)).sum(2))
