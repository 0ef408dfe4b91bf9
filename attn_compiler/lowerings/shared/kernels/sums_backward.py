"""The last sums of some gradients: tiles along their diagonals, and sinks over all rows. Each number has one writer, in a fixed order."""

from __future__ import annotations

import triton
import triton.language as tl

from attn_compiler.lowerings.shared.kernels.row_stats import row_stats
from attn_compiler.lowerings.shared.kernels.tile_parts import LOG2E


@triton.jit
def store_diagonals(Sums, tile, SIZE: tl.constexpr):
    """Sum a tile of SIZE queries and keys along its diagonals, to 2 · SIZE numbers: those of distances k - q of -SIZE (there is none, so
    0) up to -1, then from 0 on."""
    query = tl.arange(0, SIZE)[:, None]
    column = tl.arange(0, SIZE)[None, :]
    # Each row is rotated by its own index. Then a column has one distance, or that distance less SIZE.
    turned = tl.gather(tile, (query + column) % SIZE, 1)
    ahead = query + column < SIZE
    tl.store(Sums + tl.arange(0, SIZE), tl.sum(tl.where(ahead, 0.0, turned), 0))
    tl.store(Sums + SIZE + tl.arange(0, SIZE), tl.sum(tl.where(ahead, turned, 0.0), 0))


@triton.jit
def attention_sum_diagonals(
    Sums, Grad, grad_h, grad_phase, grad_size, spans, diagonals, span_blocks, seqlen_q, count,
    SIZE: tl.constexpr, PHASES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute Grad: float (Hq|1, PHASES, grad_size), the gradient of each distance k - q + Sq - 1 in the first phase, zeros in the others.
    Grid: (blocks of Grad's last axis, heads, 1).

    Sums: float32 (Hq|1, spans, diagonals, 2, SIZE), contiguous, as `store_diagonals` writes them. A span of blocks of queries has one for
        each diagonal of tiles, beginning with that of its last block of queries and the first block of keys.
    """
    distances = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1)
    blocks_q = tl.cdiv(seqlen_q, SIZE)
    # One tile is added, so that it is not negative.
    ahead = distances - (seqlen_q - 1) + blocks_q * SIZE
    total = tl.zeros([BLOCK], tl.float32)
    for span in range(spans):
        diagonal = ahead // SIZE - blocks_q + span * span_blocks + span_blocks - 1
        row = Sums + ((head.to(tl.int64) * spans + span) * diagonals + diagonal) * (2 * SIZE) + ahead % SIZE
        inside = distances < count
        later = tl.load(row + SIZE, mask=inside & (diagonal >= 0) & (diagonal < diagonals), other=0.0)
        earlier = tl.load(row + 2 * SIZE, mask=inside & (diagonal >= -1) & (diagonal < diagonals - 1), other=0.0)
        total += later + earlier
    Grad += head.to(tl.int64) * grad_h + distances
    for phase in tl.static_range(PHASES):
        value = total if phase == 0 else tl.zeros([BLOCK], tl.float32)
        tl.store(Grad, value.to(Grad.dtype.element_ty), mask=distances < grad_size)
        Grad += grad_phase


@triton.jit
def attention_grad_sinks(RowStats, Sinks, Grad, batch_size, heads_q, stats_rows, BLOCK: tl.constexpr):
    """Compute the gradient of sinks. Grad, Sinks: (Hq,). Grid: (Hq, 1, 1).

    A sink's weight takes from its row and adds to the lse: weight · (grad_lse - sum(out · grad_out)) = -weight · delta.
    """
    head = tl.program_id(0)
    sink = tl.load(Sinks + head).to(tl.float32) * LOG2E
    total = tl.zeros([BLOCK], tl.float32)
    for batch in range(batch_size):
        stats = RowStats + (head.to(tl.int64) + batch * heads_q) * 2 * stats_rows
        for start in range(0, stats_rows, BLOCK):
            base, delta = row_stats(stats, start + tl.arange(0, BLOCK), stats_rows)
            total += tl.exp2(sink + base) * delta
    tl.store(Grad + head, (-tl.sum(total, 0)).to(Grad.dtype.element_ty))
