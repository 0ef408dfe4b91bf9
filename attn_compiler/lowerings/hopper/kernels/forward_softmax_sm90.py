"""The online softmax of Hopper's forwards, tile by tile, in Gluon, and its final division."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attn_compiler.lowerings.hopper.kernels.forward_masks_sm90 import masked
from attn_compiler.lowerings.shared.kernels.tile_parts import LN2, LOG2E, LOW
from attn_compiler.lowerings.shared.kernels.tiles_sm90 import SHARES, distances_to, shares, tanh


@gluon.jit
def softmax(
    qk, bias, tile, peak, total, own, masks, seqlen_kv, MASKED: gl.constexpr, QK_LAYOUT: gl.constexpr, how: gl.constexpr
):  # fmt: skip
    """Return the weights of a tile, each row's maximum, its sum as `shares` of it, and the factor of all sums so far."""
    factor = own.factor
    if how.SOFTCAP:
        qk = tanh(qk * factor)
        factor = own.cap
    if bias is not None:
        # Added to q kᵀ in its units, so that the row's maximum and exponentials need no further multiplication.
        qk = qk + bias.to(gl.float32) * own.of_added
    start = tile * how.BLOCK_N
    if own.slope is not None:
        # Slope times a difference: two large products would leave their rounding in the lse, which the backward reads.
        from_start = own.slope * (start - own.rows).to(gl.float32)
        qk = distances_to(qk * factor, from_start, own.slope, QK_LAYOUT, how.BLOCK_N)
        factor = 1.0
    if MASKED:
        qk = masked(qk, tile, own, masks, seqlen_kv, QK_LAYOUT, how)
    new_peak = gl.maximum(peak, gl.max(qk, 1) * factor)
    weights = gl.exp2(qk * factor - new_peak[:, None])
    decay = gl.exp2(peak - new_peak)
    shared_decay = gl.convert_layout(decay, gl.SliceLayout(1, SHARES), assert_trivial=True)
    total = total * shared_decay[:, None] + shares(weights, how.BLOCK_N)
    return weights, new_peak, total, decay


@gluon.jit
def divided(peak, total, Sinks, head, QK_LAYOUT: gl.constexpr, how: gl.constexpr):
    """Return the factor of each row's output, its lse, and whether it has no keys. peak, total: of all its tiles.

    lse: natural logarithm, -inf without keys, NaN for a row to be recomputed.
    """
    ROW: gl.constexpr = gl.SliceLayout(1, QK_LAYOUT)
    total = gl.convert_layout(gl.sum(total, 1), ROW, assert_trivial=True)
    is_empty = total == 0.0
    scale = gl.where(is_empty, 1.0, 1.0 / total)
    if Sinks is not None:
        sink = gl.load(Sinks + head).to(gl.float32) * LOG2E
        with_sink = gl.maximum(peak, sink)
        decay = gl.exp2(peak - with_sink)
        total = total * decay + gl.exp2(sink - with_sink)
        scale = gl.where(total == 0.0, 1.0, decay / total)
        peak = with_sink
    lse = gl.where(total == 0.0, float("-inf"), peak * LN2 + gl.log(gl.where(total == 0.0, 1.0, total)))
    if how.LOW_AGAIN:
        lse = gl.where(peak < LOW, float("nan"), lse)
    return scale, lse, is_empty
