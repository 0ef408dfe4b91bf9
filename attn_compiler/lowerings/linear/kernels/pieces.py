"""States between the pieces of a sequence, from each piece's own results.

The recurrence is linear in the state: a piece maps the state S before it to M S + L. L is its last state where it begins at 0. M is its
map of the identity, which is exp(sum of g) without the delta rule. Backwards, M transposed maps D after a piece to D before it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_compiler.lowerings.linear.kernels.tiles import of_state, product, store_state
from attn_compiler.lowerings.shared.kernels.releases_assembler_sm90 import assembled_jit


@assembled_jit(do_not_specialize=["chunks", "pieces", "of_piece"])
def join_pieces(
    Locals, Wholes, Sums, Edge, Between,
    heads, chunks, pieces, of_piece, edge_b, edge_h, edge_k, edge_v,
    C: tl.constexpr, DK: tl.constexpr, WK: tl.constexpr, DV: tl.constexpr, WV: tl.constexpr, BV: tl.constexpr, LOCAL: tl.constexpr,
    WIDE: tl.constexpr, DELTA: tl.constexpr, REVERSED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Grid: (WV / BV B H,). Locals: L, (B, H, pieces, WK, LOCAL), or backwards its gradient. Wholes: M, in columns from WV on of (B, H,
    pieces, WK, WIDE); only of DELTA. Sums: as in forward.py. Edge: the first state, or REVERSED the last one's gradient; None: 0. Between:
    the state before each piece, or REVERSED the gradient of that after it, (B, H, pieces, DK, DV). All but Edge in float32."""
    columns: tl.constexpr = WV // BV
    row = (tl.program_id(0) // columns).to(tl.int64)
    d, e = tl.arange(0, WK), tl.program_id(0) % columns * BV + tl.arange(0, BV)
    if Edge is not None:
        at_edge = Edge + row // heads * edge_b + row % heads * edge_h
        state = of_state(at_edge, d, e, edge_k, edge_v, DK, WK, DV, WV)
    else:
        state = tl.zeros([WK, BV], tl.float32)
    for step in range(pieces):
        piece = pieces - 1 - step if REVERSED else step
        at = row * pieces + piece
        store_state(Between + at * DK * DV, state, d, e, DV, 1, DK, WK, DV, WV)
        local = tl.load(Locals + at * WK * LOCAL + d[:, None] * LOCAL + e[None, :])
        if DELTA:
            whole = tl.load(Wholes + at * WK * WIDE + d[:, None] * WIDE + WV + d[None, :])
            state = product(tl.trans(whole) if REVERSED else whole, state, PARTS, local)
        else:
            state = state * tl.exp(_decay(Sums + row * chunks * 2 * C, piece * of_piece, of_piece, chunks, C)) + local


@triton.jit
def _decay(Sums, first, of_piece, chunks, C: tl.constexpr):
    """Return the sum of g over the chunks of a piece."""
    total = 0.0
    for at in range(first, tl.minimum(first + of_piece, chunks)):
        total += tl.load(Sums + at * 2 * C + C - 1)
    return total
