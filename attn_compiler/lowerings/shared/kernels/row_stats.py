"""What a backward needs of each row besides its operands: -lse in units of log 2, and delta = sum(out · grad_out) - grad_lse.

They lie as (B, Hq, 2, stats_rows) float32. stats_rows is a multiple of every pass' block of queries.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_compiler.lowerings.shared.kernels.tile_parts import LOG2E


@triton.jit
def minus_lse(Lse, offsets, seqlen_q):
    lse = tl.load(Lse + offsets, mask=offsets < seqlen_q, other=float("-inf"))
    return tl.where(lse == float("-inf"), lse, -lse * LOG2E)


@triton.jit
def products(out, grad_out):
    """(M,) sums of out · grad_out. A row without any key has out = 0, and its grad_out may be anything: nothing of it counts."""
    out = out.to(tl.float32)
    return tl.sum(tl.where(out == 0.0, 0.0, out * grad_out.to(tl.float32)), 1)


@triton.jit
def delta_of(delta, base):
    """0 where a row has no key (-lse in units of log 2 is -inf), whatever is put on it."""
    return tl.where(base == float("-inf"), 0.0, delta)


@triton.jit
def store_row_stats(stats, offsets, stats_rows, base, delta):
    inside = offsets < stats_rows
    tl.store(stats + offsets, base, mask=inside)
    tl.store(stats + stats_rows + offsets, delta, mask=inside)


@triton.jit
def row_stats(stats, offsets, stats_rows):
    """-lse in units of log 2, and delta, of rows of one head; stats_rows is a multiple of every pass' block."""
    return tl.load(stats + offsets), tl.load(stats + stats_rows + offsets)
