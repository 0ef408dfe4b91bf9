"""Attention of few queries over the latent that k and v are made of: one head of keys, [latent, rope], whose first part is the values too.

As decode.py, but with one wide head for all queries. The rows of a program are heads, 16 to 64 of which tensor cores take at once. A tile
of the latent is loaded once for both products. The partial results of splits, 512 floats a row, are too many for one program, so a second
kernel adds them up (`combine_latent`), by rows and columns. Results stay float32: rounding them to half precision would be most of the
total error.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_compiler.lowerings.decode.kernels.decode import _bounds, _is_added, _load, _of_some_row, _with_means
from attn_compiler.lowerings.decode.kernels.results import leave, store
from attn_compiler.lowerings.shared.kernels.releases import members
from attn_compiler.lowerings.shared.kernels.tile_parts import LN2, LOG2E, change, load_pairs

#: as in decode.py
ANY_VALUE = (
    "stride_qb", "stride_qh", "stride_qs", "stride_cb", "stride_cs", "stride_rb", "stride_rs",
    "bounds_side", "bounds_b", "keys_b", "pairs_b", "pairs_h", "pairs_q", "pairs_k",
    "lse_at", "seqlen_kv", "scale", "changed_by",
)  # fmt: skip
ANY_OPERAND = ("Lse", "Bounds", "Keys", "Pairs", "Sinks")


@triton.jit(do_not_specialize=ANY_VALUE, do_not_specialize_on_alignment=ANY_OPERAND)
def attention_decode_latent(
    Q, C, R, Out, Lse, Partial, Bounds, Keys, Pairs, Sinks,
    stride_qb: tl.int64, stride_qh: tl.int64, stride_qs: tl.int64,
    stride_cb: tl.int64, stride_cs: tl.int64, stride_rb: tl.int64, stride_rs: tl.int64,
    bounds_side: tl.int32, bounds_b: tl.int32, keys_b: tl.int32,
    pairs_b: tl.int64, pairs_h: tl.int64, pairs_q: tl.int64, pairs_k: tl.int64,
    lse_at: tl.int64, seqlen_kv: tl.int32, scale: tl.float32, changed_by: tl.float32, HOW: tl.constexpr,
):  # fmt: skip
    """Grid: (splits, blocks of rows, B). See latent_launch.py for the arguments, tuples.py for HOW (`LatentSwitches`).

    Row r is query r % SEQLEN_Q of head r // SEQLEN_Q. Q: (B, H, Sq, rank + rope dims); C, R: the latent and the part of keys that heads
    share, or None. Partial: float32, (B, blocks, splits, KEPT, rank) and, from lse_at on, (…, KEPT) logarithms, -inf of splits that have
    no keys; None for one split, which stores its results.
    """
    how: tl.constexpr = members(HOW)
    split, block, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    local = block * how.BLOCK_M + tl.arange(0, how.BLOCK_M)
    # Rows beyond the last one repeat it, and are not stored.
    used = tl.minimum(local, how.GROUP * how.SEQLEN_Q - 1)
    heads, queries = used // how.SEQLEN_Q, used % how.SEQLEN_Q
    if how.EARLY:
        # The kernel before this one may still run: nothing that it writes is read before its end.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    lower, upper, first, end, none, some_none = _bounds(
        Bounds, batch, heads, queries, bounds_side, bounds_b, seqlen_kv, how
    )
    far_heads, far_queries = heads.to(tl.int64), queries.to(tl.int64)
    row = (batch.to(tl.int64) * stride_qb + far_heads * stride_qh + far_queries * stride_qs)[:, None]
    row = tl.multiple_of(row, [how.ALIGN, how.ALIGN])
    dims = tl.arange(0, how.V_0)[None, :]
    q_0 = tl.load(Q + row + dims, mask=dims < how.HEAD_DIM_V, other=0.0)
    q_1 = q_0
    if how.ROPE > 0:
        dims = tl.arange(0, how.ROPE)[None, :]
        q_1 = tl.load(Q + row + how.HEAD_DIM_V + dims, mask=dims < how.HEAD_DIM_ROPE, other=0.0)
    splits = tl.num_programs(0)
    tiles = tl.cdiv(tl.maximum(end - first, 0), how.BLOCK_N)
    C += tl.multiple_of(batch.to(tl.int64) * stride_cb, how.ALIGN)
    if R is not None:
        R += tl.multiple_of(batch.to(tl.int64) * stride_rb, how.ALIGN)
    if Keys is not None:
        Keys += batch.to(tl.int64) * keys_b
    if Pairs is not None:
        Pairs = Pairs + batch.to(tl.int64) * pairs_b + far_heads[:, None] * pairs_h
    of_row, lower, upper = queries[:, None], lower[:, None], upper[:, None]
    by_rows: tl.constexpr = Pairs is not None or how.BOUNDS != "batch"
    if how.MEANS is not None and how.BOUNDS != "batch":
        none = none[:, None]
    # With many rows, evaluating the pairs' mask twice is too slow.
    afterwards: tl.constexpr = by_rows and Pairs is not None and how.BLOCK_M > 32
    total = tl.zeros([how.BLOCK_M], tl.float32)
    peak = tl.full([how.BLOCK_M], float("-inf"), tl.float32)
    out = tl.zeros([how.BLOCK_M, how.V_0], tl.float32)
    for tile in tl.range(split, tiles, splits):
        start = first + tile * how.BLOCK_N
        keys, rows = start + tl.arange(0, how.BLOCK_N)[None, :], start + tl.arange(0, how.BLOCK_N)[:, None]
        allowed = keys < end
        is_used, bias = None, None
        if how.BOUNDS != "batch":
            allowed = allowed & (keys >= lower) & (keys < upper)
        if Keys is not None:
            allowed = allowed & (tl.load(Keys + keys, mask=keys < end, other=0) != 0)
            if not by_rows:
                is_used = tl.load(Keys + rows, mask=rows < end, other=0) != 0
        truth = allowed
        if Pairs is not None:
            pairs = load_pairs(Pairs, of_row, keys, pairs_q, pairs_k, how.SEQLEN_Q, end, True)
            if how.PAIRS_MASK:
                allowed = allowed & (pairs != 0)
            else:
                bias = pairs
                allowed = allowed & _is_added(bias)
        if by_rows and not afterwards:
            is_used = _of_some_row(rows, of_row, lower, upper, end, Keys, Pairs, pairs_q, pairs_k, 1, how)
        if how.MEANS is not None and is_used is not None:
            is_used = is_used | some_none
        # Keys that no row uses may be NaN, and are not read.
        c = _load(C, rows, stride_cs, end, is_used, 0, how.V_0, how.HEAD_DIM_V, how.ALIGN, 1)
        qk = tl.dot(q_0, tl.trans(c), input_precision=how.PRECISION)
        if how.ROPE > 0:
            r = _load(R, rows, stride_rs, end, is_used, 0, how.ROPE, how.HEAD_DIM_ROPE, how.ALIGN, 1)
            qk = tl.dot(q_1, tl.trans(r), qk, input_precision=how.PRECISION)
        logits, _ = change(qk, of_row, keys, bias, None, None, scale, changed_by, how.CHANGE, how.FAST_TANH, how.PLAIN)
        logits = tl.where(allowed, logits, float("-inf"))
        if how.MEANS is not None:
            logits = _with_means(logits, none & (keys < end), truth, bias, how)
        if afterwards:
            some = tl.expand_dims(tl.max((logits != float("-inf")).to(tl.int32), 0) > 0, -1)
            c = tl.where(some, c, 0.0)
        new_peak = tl.maximum(peak, tl.max(logits, 1))
        # Nothing allowed so far: exp2(-inf - 0) is 0, where -inf - -inf would be NaN.
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        if how.PLAIN:
            weights = tl.exp2(logits * (scale * LOG2E) - (shift * (scale * LOG2E))[:, None])
            decay = tl.exp2((peak - shift) * (scale * LOG2E))
        else:
            weights = tl.exp2(logits - shift[:, None])
            decay = tl.exp2(peak - shift)
        total = total * decay + tl.sum(weights, 1)
        peak = new_peak
        out = tl.dot(weights.to(c.dtype), c, out * decay[:, None], input_precision=how.PRECISION)

    if how.PLAIN:
        peak = peak * (scale * LOG2E)
    # A row without any allowed key has a total of 0 and a peak of -inf: so is its lse, and its results stay 0.
    divisor = tl.where(total == 0.0, 1.0, total)
    lse = peak + tl.log2(divisor)
    out = out * (1.0 / divisor)[:, None]
    if Partial is None:
        store(Out, Lse, Sinks, batch, 0, local, lse, out, out, how)
    else:
        record = (batch * tl.num_programs(1) + block).to(tl.int64) * splits
        leave(Partial, lse_at, record + split, lse, out, out, how, how.BLOCK_M)


@triton.jit(do_not_specialize=("lse_at", "splits"), do_not_specialize_on_alignment=("Lse", "Partial", "Sinks", "Out"))
def combine_latent(Out, Lse, Partial, Sinks, lse_at: tl.int64, splits: tl.int32, HOW: tl.constexpr):
    """Combine the partial results of splits. Grid: (rows, parts of COLUMNS dims, B)."""
    how: tl.constexpr = members(HOW)
    row, part, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if how.EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    blocks: tl.constexpr = (how.GROUP * how.SEQLEN_Q + how.BLOCK_M - 1) // how.BLOCK_M
    block, kept = row // how.BLOCK_M, row % how.BLOCK_M
    record = (batch * blocks + block).to(tl.int64) * splits
    parts, dims = tl.arange(0, how.PARTS), part * how.COLUMNS + tl.arange(0, how.COLUMNS)
    logarithms = Partial + lse_at + record * how.KEPT + kept
    highest = tl.full([how.PARTS], float("-inf"), tl.float32)
    for start in tl.range(0, splits, how.PARTS):
        at = start + parts
        highest = tl.maximum(highest, tl.load(logarithms + at * how.KEPT, mask=at < splits, other=float("-inf")))
    peak = tl.max(highest, 0)
    if Sinks is not None:
        sink = tl.load(Sinks + row // how.SEQLEN_Q).to(tl.float32) * LOG2E
        peak = tl.maximum(peak, sink)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.zeros([how.PARTS], tl.float32)
    out = tl.zeros([how.PARTS, how.COLUMNS], tl.float32)
    for start in tl.range(0, splits, how.PARTS):
        at = start + parts
        lse = tl.load(logarithms + at * how.KEPT, mask=at < splits, other=float("-inf"))
        weights = tl.exp2(lse - shift)
        total += weights
        found = tl.load(
            Partial + ((record + at[:, None]) * how.KEPT + kept) * how.HEAD_DIM_V + dims[None, :],
            mask=(lse != float("-inf"))[:, None] & (dims < how.HEAD_DIM_V)[None, :],
            other=0.0,
        )
        out += found * weights[:, None]
    sum_of_all = tl.sum(total, 0)
    if Sinks is not None:
        sum_of_all += tl.exp2(sink - shift)
    divisor = tl.where(sum_of_all == 0.0, 1.0, sum_of_all)
    head, query = row // how.SEQLEN_Q, row % how.SEQLEN_Q
    far = batch.to(tl.int64)
    at = ((far * how.SEQLEN_Q + query) * how.GROUP + head) * how.HEAD_DIM_V
    tl.store(Out + at + dims, tl.sum(out, 0) / divisor, mask=dims < how.HEAD_DIM_V)
    if part == 0:
        tl.store(Lse + (far * how.GROUP + head) * how.SEQLEN_Q + query, (peak + tl.log2(divisor)) * LN2)
