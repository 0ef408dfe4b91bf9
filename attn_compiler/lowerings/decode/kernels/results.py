"""Combination of the decode kernel's results: of half a tile's rows, of warps with keys of their own, and of splits."""

from __future__ import annotations

import triton
import triton.language as tl

from attn_compiler.lowerings.shared.kernels.tile_parts import LN2, LOG2E


@triton.jit
def first_half(x, SLICES: tl.constexpr, ROWS: tl.constexpr):
    """Return the first ROWS rows of a product's result, (…, 2 · ROWS) or (…, 2 · ROWS, N), in registers of their own."""
    if SLICES == 1:
        if len(x.shape) == 1:
            x = tl.trans(tl.reshape(x, 2, ROWS), 1, 0)
        else:
            x = tl.trans(tl.reshape(x, 2, ROWS, x.shape[1]), 1, 2, 0)
    elif len(x.shape) == 2:
        x = tl.trans(tl.reshape(x, SLICES, 2, ROWS), 0, 2, 1)
    else:
        x = tl.trans(tl.reshape(x, SLICES, 2, ROWS, x.shape[2]), 0, 2, 3, 1)
    first, _ = tl.split(x)
    return first


@triton.jit
def _halved(x):
    """Sum (M, N, S) in pairs to (M, N, S / 2)."""
    a, b = tl.split(tl.reshape(x, x.shape[0], x.shape[1], x.shape[2] // 2, 2))
    return a + b


@triton.jit
def _sum_of_slices(x, SLICES: tl.constexpr):
    """Sum (S, M, N) to (M, N). Moved once, so that a thread has all its terms: a reduction over warps leaves each warp the whole sum."""
    x = tl.trans(x, 1, 2, 0)
    if SLICES >= 8:
        x = _halved(x)
    if SLICES >= 4:
        x = _halved(x)
    a, b = tl.split(x)
    return a + b


@triton.jit
def _higher(peak_a, total_a, peak_b, total_b):
    """Merge two parts of a softmax: their peaks and totals."""
    top = tl.maximum(peak_a, peak_b)
    shift = tl.where(top == float("-inf"), 0.0, top)
    return top, total_a * tl.exp2(peak_a - shift) + total_b * tl.exp2(peak_b - shift)


@triton.jit
def joined(total, peak, out_0, out_1, SLICES: tl.constexpr, V_1: tl.constexpr):
    """Merge the slices' results, whose peaks are in units of log 2: (S, M) and (S, M, …) to (M,) and (M, …)."""
    top, total = tl.reduce((peak, total), 0, _higher)
    weights = tl.exp2(peak - tl.where(top == float("-inf"), 0.0, top)[None, :])
    out_0 = _sum_of_slices(out_0 * weights[:, :, None], SLICES)
    out_1 = _sum_of_slices(out_1 * weights[:, :, None], SLICES) if V_1 > 0 else out_0
    return total, top, out_0, out_1


@triton.jit
def _found(Partial, record, start, splits, how: tl.constexpr, FIRST: tl.constexpr, PART: tl.constexpr):
    """Load partial results of PARTS splits from `start` on, (KEPT_ALL, PART, PARTS). Splits are the last axis: threads divide the other
    two axes, and each adds up its own elements.

    Other programs wrote them, so this multiprocessor's cache is bypassed.
    """
    rows, dims = tl.arange(0, how.KEPT_ALL)[:, None, None], FIRST + tl.arange(0, PART)[None, :, None]
    parts = start + tl.arange(0, how.PARTS)[None, None, :]
    at = Partial + record * (how.KEPT * how.HEAD_DIM_V) + ((parts * how.KEPT + rows) * how.HEAD_DIM_V + dims)
    here = (parts < splits) & (rows < how.KEPT) & (dims < how.HEAD_DIM_V)
    return tl.load(at, mask=here, other=0.0, cache_modifier=".cg")


@triton.jit
def _weighted(total, peak, out_0, out_1, Partial, lse_at, record, start, splits, how: tl.constexpr):
    """Add PARTS more partial results, from `start` on, to the sums. total, peak: (KEPT_ALL,) so far; out_0, out_1: their sums."""
    # All loads are issued before the first is waited for.
    found_0 = _found(Partial, record, start, splits, how, 0, how.V_0)
    found_1 = found_0
    if how.V_1 > 0:
        found_1 = _found(Partial, record, start, splits, how, how.V_0, how.V_1)
    rows, parts = tl.arange(0, how.KEPT_ALL)[:, None], start + tl.arange(0, how.PARTS)[None, :]
    at = Partial + (lse_at + record * how.KEPT) + (parts * how.KEPT + rows)
    lse = tl.load(at, mask=(parts < splits) & (rows < how.KEPT), other=float("-inf"), cache_modifier=".cg")
    new_peak = tl.maximum(peak, tl.max(lse, 1))
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(lse - shift[:, None])
    decay = tl.exp2(peak - shift)
    total = total * decay + tl.sum(weights, 1)
    out_0 = out_0 * decay[:, None] + tl.sum(found_0 * weights[:, None, :], 2)
    if how.V_1 > 0:
        out_1 = out_1 * decay[:, None] + tl.sum(found_1 * weights[:, None, :], 2)
    return total, new_peak, out_0, out_1


@triton.jit
def store(Out, Lse, Sinks, batch, kv_head, rows, lse, out_0, out_1, how: tl.constexpr):
    """Store the results of all keys: out to (B, Sq, Hq, Dv) and lse, given in units of log 2, to (B, Hq, Sq), both contiguous."""
    head, query = kv_head * how.GROUP + rows // how.SEQLEN_Q, rows % how.SEQLEN_Q
    inside = rows < how.GROUP * how.SEQLEN_Q
    if Sinks is not None:
        sink = tl.load(Sinks + head, mask=inside, other=0.0).to(tl.float32) * LOG2E
        top = tl.maximum(lse, sink)
        # A sink of -inf in a row without keys: -inf - -inf would be NaN.
        shift = tl.where(top == float("-inf"), 0.0, top)
        joined = shift + tl.log2(tl.exp2(lse - shift) + tl.exp2(sink - shift))
        share = tl.exp2(lse - tl.where(joined == float("-inf"), 0.0, joined))
        out_0, out_1, lse = out_0 * share[:, None], out_1 * share[:, None], joined
    heads: tl.constexpr = how.HEADS_KV * how.GROUP
    batch = batch.to(tl.int64)
    tl.store(Lse + (batch * heads + head) * how.SEQLEN_Q + query, lse * LN2, mask=inside)
    at = Out + ((batch * how.SEQLEN_Q + query) * heads + head)[:, None] * how.HEAD_DIM_V
    dims = tl.arange(0, how.V_0)[None, :]
    tl.store(at + dims, out_0.to(Out.dtype.element_ty), mask=inside[:, None] & (dims < how.HEAD_DIM_V))
    if how.V_1 > 0:
        dims = how.V_0 + tl.arange(0, how.V_1)[None, :]
        tl.store(at + dims, out_1.to(Out.dtype.element_ty), mask=inside[:, None] & (dims < how.HEAD_DIM_V))


@triton.jit
def leave(Partial, lse_at, record, lse, out_0, out_1, how: tl.constexpr, ROWS: tl.constexpr):
    """Store the partial result of one split for the program that combines them."""
    kept = tl.arange(0, ROWS)
    row = record * how.KEPT + kept
    tl.store(Partial + lse_at + row, lse, mask=kept < how.KEPT)
    at, here = Partial + row[:, None] * how.HEAD_DIM_V, (kept < how.KEPT)[:, None]
    dims = tl.arange(0, how.V_0)[None, :]
    tl.store(at + dims, out_0, mask=here & (dims < how.HEAD_DIM_V))
    if how.V_1 > 0:
        dims = how.V_0 + tl.arange(0, how.V_1)[None, :]
        tl.store(at + dims, out_1, mask=here & (dims < how.HEAD_DIM_V))


@triton.jit
def combine(Out, Lse, Partial, Sinks, batch, kv_head, first_row, lse_at, record, splits, how: tl.constexpr):
    """Combine the partial results of all splits."""
    rows = tl.arange(0, how.KEPT_ALL)
    total = tl.zeros([how.KEPT_ALL], tl.float32)
    peak = tl.full([how.KEPT_ALL], float("-inf"), tl.float32)
    out_0 = tl.zeros([how.KEPT_ALL, how.V_0], tl.float32)
    out_1 = tl.zeros([how.KEPT_ALL, how.V_1 if how.V_1 > 0 else 16], tl.float32)
    at_once: tl.constexpr = (how.SPLITS > 0) and (how.SPLITS <= how.PARTS)
    for chunk in tl.range(0, 1 if at_once else tl.cdiv(splits, how.PARTS)):
        total, peak, out_0, out_1 = _weighted(
            total, peak, out_0, out_1, Partial, lse_at, record, chunk * how.PARTS, splits, how
        )
    divisor = tl.where(total == 0.0, 1.0, total)
    store(
        Out, Lse, Sinks, batch, kv_head, first_row + rows, peak + tl.log2(divisor),
        out_0 * (1.0 / divisor)[:, None], out_1 * (1.0 / divisor)[:, None], how,
    )  # fmt: skip
