"""The last sums of some gradients: tiles along their diagonals, and sinks over all rows. Each number has one writer, in a fixed order."""

from __future__ import annotations

import triton
import triton.language as tl

from attn_compiler.lowerings.kernels.backward import row_stats
from attn_compiler.lowerings.kernels.tile_parts import LOG2E


@triton.jit
def attention_sum_diagonals(
    Sums, Grad, grad_h, grad_phase, grad_size, diagonals, first, count,
    SIZE: tl.constexpr, PHASES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grad: float (Hq|1, PHASES, grad_size), the gradient of each distance in the first phase, zeros else. Sums: float32 (Hq|1,
    diagonals, SIZE, SIZE), contiguous, as `attention_grad_distances` leaves it. Grid: (blocks of Grad's last axis, heads, 1).

    Distances are counted from the first of all tiles; first: where Grad begins. Column j of row i is distance j - i of its tile,
    which is that of two diagonals of tiles: in one of them for rows from some i on, in the one before for those above.
    """
    distances = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1)
    inside = distances < count
    tile, offset = (distances + first) // SIZE, (distances + first) % SIZE
    Sums += head.to(tl.int64) * diagonals * (SIZE * SIZE)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(SIZE):
        column = offset + i + 1
        own = column >= SIZE
        of = tl.where(own, tile, tile - 1)
        column = tl.where(own, column - SIZE, column)
        there = inside & (of >= 0) & (of < diagonals)
        total += tl.load(Sums + of.to(tl.int64) * (SIZE * SIZE) + i * SIZE + column, mask=there, other=0.0)
    Grad += head.to(tl.int64) * grad_h + distances
    for phase in tl.static_range(PHASES):
        value = total if phase == 0 else tl.zeros([BLOCK], tl.float32)
        tl.store(Grad + phase * grad_phase, value.to(Grad.dtype.element_ty), mask=distances < grad_size)


@triton.jit
def attention_grad_sinks(RowStats, Sinks, Grad, batch_size, heads_q, stats_rows, BLOCK: tl.constexpr):
    """Grad, Sinks: (Hq,). Grid: (Hq, 1, 1).

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
