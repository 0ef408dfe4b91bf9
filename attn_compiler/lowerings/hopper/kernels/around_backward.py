"""Kernels before and after Hopper's backward kernel: row stats and zeros, ranks of blocks, dq in its own dtype, dk and dv summed over
groups."""

from __future__ import annotations

import triton
import triton.language as tl

from attn_compiler.lowerings.shared.kernels.optional import list_of
from attn_compiler.lowerings.shared.kernels.row_stats import make_row_stats
from attn_compiler.lowerings.shared.kernels.tile_parts import at_head, load_tile, store_tile
from attn_compiler.lowerings.shared.kernels.tuples import Positions


@triton.jit
def attention_before_backward(
    Out, GradOut, Lse, GradLse, RowStats, Sums, Flag, Turns, stride_o, stride_g, heads_q, seqlen_q, stats_rows,
    BLOCK_M: tl.constexpr, HEAD_DIM_QK: tl.constexpr, QK_ALL: tl.constexpr, HEAD_DIM_V: tl.constexpr, V_ALL: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """Write RowStats (row_stats.py) and zeros: to Flag (2,) int32, to Sums (B, Hq, Sq, HEAD_DIM_QK) float32 and to Turns (B, Hq, stats_rows
    / BLOCK_M) int32 where they are given.

    Grid: (stats_rows / BLOCK_M, Hq, B).
    """
    start, head, batch = tl.program_id(0) * BLOCK_M, tl.program_id(1), tl.program_id(2)
    make_row_stats(
        Out, GradOut, Lse, GradLse, RowStats, stride_o, stride_g, start, head, batch, heads_q, seqlen_q, stats_rows,
        BLOCK_M, HEAD_DIM_V, V_ALL, ALIGN,
    )  # fmt: skip
    row = batch.to(tl.int64) * heads_q + head
    if Sums is not None:
        sums = Positions(base=Sums + row * seqlen_q * HEAD_DIM_QK, stride=HEAD_DIM_QK, length=seqlen_q)
        store_tile(sums, start, tl.zeros([BLOCK_M, QK_ALL], tl.float32), BLOCK_M, 0, QK_ALL, HEAD_DIM_QK)
    tl.store(Flag + tl.arange(0, 2), tl.zeros([2], tl.int32))
    if Turns is not None:
        tl.store(Turns + row * (stats_rows // BLOCK_M) + tl.program_id(0), 0)


@triton.jit(do_not_specialize=["blocks", "tiles"])
def attention_ranks(
    Lists, Ranks, lists, blocks, tiles, ORDERED: tl.constexpr, TILES: tl.constexpr, LISTED: tl.constexpr
):
    """Write to Ranks, strided as Lists, how many blocks visit a tile of queries before each block of keys does.

    Lists: of `blocks` blocks of keys, each of at most `tiles` tiles. Blocks come by their numbers, or, ORDERED, the longest list first.
    Grid: (cdiv(tiles, TILES), heads and batch rows of the lists). LISTED: tiles that are read at once.
    """
    own = tl.program_id(0) * TILES + tl.arange(0, TILES)
    head, batch = tl.program_id(1), tl.program_id(2)
    before = tl.zeros([TILES], tl.int32)
    for n in range(blocks):
        block = tl.program_id(0) * 0 + n
        if ORDERED:
            block = tl.load(list_of(Lists, batch, head, blocks - 1 - block, lists) + lists.tiles_row - 1)
        List = list_of(Lists, batch, head, block, lists)
        partial, first, last = tl.load(List), tl.load(List + 1), tl.load(List + 2)
        visits = ((own >= first) & (own < last)).to(tl.int32)
        for start in range(0, partial, LISTED):
            at = start + tl.arange(0, LISTED)
            listed = tl.load(List + 3 + at, mask=at < partial, other=-1)
            visits += tl.sum((listed[None, :] == own[:, None]).to(tl.int32), 1)
        tl.store(list_of(Ranks, batch, head, block, lists) + own, before, mask=own < tiles)
        before += visits


@triton.jit
def attention_after_backward(
    Sums, GradQ, Flag, stride_dq, heads_q, seqlen_q, scale,
    BLOCK_M: tl.constexpr, HEAD_DIM_QK: tl.constexpr, QK_ALL: tl.constexpr, ALIGN: tl.constexpr, MARKS: tl.constexpr,
):  # fmt: skip
    """Write Sums times the scale to GradQ, logical BHSD. MARKS: Flag gets 1 if any is NaN. Grid: (cdiv(Sq, BLOCK_M), Hq, B)."""
    start, head, batch = tl.program_id(0) * BLOCK_M, tl.program_id(1), tl.program_id(2)
    row = batch.to(tl.int64) * heads_q + head
    sums = Positions(base=Sums + row * seqlen_q * HEAD_DIM_QK, stride=HEAD_DIM_QK, length=seqlen_q)
    found = load_tile(sums, start, None, BLOCK_M, 0, QK_ALL, HEAD_DIM_QK, True, 4) * scale
    of_q = Positions(
        base=at_head(GradQ, batch, head, stride_dq.b, stride_dq.h, ALIGN), stride=stride_dq.s, length=seqlen_q
    )
    store_tile(of_q, start, found, BLOCK_M, 0, QK_ALL, HEAD_DIM_QK)
    if MARKS:
        is_nan = tl.max(tl.max((found != found).to(tl.int32), 1), 0)
        if is_nan > 0:
            tl.store(Flag, 1)


@triton.jit
def attention_sum_groups(
    Each, Grad, stride_e, stride_d, seqlen, group,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, ALL: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Sum Each (B, heads · group, seqlen, HEAD_DIM) over each group's heads into Grad, logical BHSD. Grid: (cdiv(seqlen, BLOCK), heads,
    B)."""
    start, head, batch = tl.program_id(0) * BLOCK, tl.program_id(1), tl.program_id(2)
    total = tl.zeros([BLOCK, ALL], tl.float32)
    for i in range(group):
        base = at_head(Each, batch, head * group + i, stride_e.b, stride_e.h, ALIGN)
        of_one = Positions(base=base, stride=stride_e.s, length=seqlen)
        total += load_tile(of_one, start, None, BLOCK, 0, ALL, HEAD_DIM, True, ALIGN).to(tl.float32)
    base = at_head(Grad, batch, head, stride_d.b, stride_d.h, ALIGN)
    store_tile(Positions(base=base, stride=stride_d.s, length=seqlen), start, total, BLOCK, 0, ALL, HEAD_DIM)
