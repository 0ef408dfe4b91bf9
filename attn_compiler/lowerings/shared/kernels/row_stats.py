"""Row stats of a backward: -lse in units of log 2, and delta = sum(out · grad_out) - grad_lse.

Their shape is (B, Hq, 2, stats_rows), float32. stats_rows is a multiple of every pass' block of queries.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_compiler.lowerings.shared.kernels.tile_parts import LOG2E, LOW, at_head, load_tile
from attn_compiler.lowerings.shared.kernels.tuples import Positions


@triton.jit
def minus_lse(Lse, offsets, seqlen_q):
    """Return -lse; -inf for a row without keys, and for one of low numbers alone, marked (inf) or not: its lse can't hold how many keys
    share it."""
    lse = tl.load(Lse + offsets, mask=offsets < seqlen_q, other=float("-inf"))
    return tl.where((lse < LOW) | (lse == float("inf")), float("-inf"), -lse * LOG2E)


@triton.jit
def products(out, grad_out):
    """Return (M,) sums of out · grad_out. In a row without any key out is 0, and grad_out, which may be anything, is ignored."""
    out = out.to(tl.float32)
    return tl.sum(tl.where(out == 0.0, 0.0, out * grad_out.to(tl.float32)), 1)


@triton.jit
def delta_of(delta, base):
    """Return delta; 0 where a row has no key (-lse in units of log 2 is -inf), whatever its gradient."""
    return tl.where(base == float("-inf"), 0.0, delta)


@triton.jit
def store_row_stats(stats, offsets, stats_rows, base, delta):
    inside = offsets < stats_rows
    tl.store(stats + offsets, base, mask=inside)
    tl.store(stats + stats_rows + offsets, delta, mask=inside)


@triton.jit
def row_stats(stats, offsets, stats_rows):
    """Load -lse in units of log 2, and delta, of rows of one head; stats_rows is a multiple of every pass' block."""
    return tl.load(stats + offsets), tl.load(stats + stats_rows + offsets)


@triton.jit
def make_row_stats(
    Out, GradOut, Lse, GradLse, RowStats, stride_o, stride_g, start, head, batch, heads_q, seqlen_q, stats_rows,
    BLOCK_M: tl.constexpr, HEAD_DIM_V: tl.constexpr, V_ALL: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Compute the stats of BLOCK_M rows of a head, from `start` on.

    -lse of rows without an allowed key, and of those beyond the last, is -inf: their weights are 0.
    """
    offsets = start + tl.arange(0, BLOCK_M)
    row = batch.to(tl.int64) * heads_q + head
    Out = at_head(Out, batch, head, stride_o.b, stride_o.h, ALIGN)
    GradOut = at_head(GradOut, batch, head, stride_g.b, stride_g.h, ALIGN)
    of_out = Positions(base=Out, stride=stride_o.s, length=seqlen_q)
    of_grad = Positions(base=GradOut, stride=stride_g.s, length=seqlen_q)
    out = load_tile(of_out, start, None, BLOCK_M, 0, V_ALL, HEAD_DIM_V, True, ALIGN)
    grad_out = load_tile(of_grad, start, None, BLOCK_M, 0, V_ALL, HEAD_DIM_V, True, ALIGN)
    grad_lse = tl.load(GradLse + row * seqlen_q + offsets, mask=offsets < seqlen_q, other=0.0)
    base = minus_lse(Lse + row * seqlen_q, offsets, seqlen_q)
    delta = delta_of(products(out, grad_out) - grad_lse, base)
    store_row_stats(RowStats + row * 2 * stats_rows, offsets, stats_rows, base, delta)
