"""Attention of few queries over a long cache: split-KV, in one launch (https://pytorch.org/blog/flash-decoding).

The rows of a program's tile are all queries of a group of heads, so keys and values are read once, in place. They are read from the first
to the last key that a row may use. The work depends on the cache's length on the device. Splits get tiles of keys in turn; a split without
tiles ends at once, and is not waited for. Each other split stores a partial result, and the last one to arrive, by the counters, combines
them.

With few rows, each warp has a part of every tile of keys and a softmax of its own (SLICES), and warps are combined after the last tile.
The rows' maxima and sums would otherwise cross warps three times a tile, through shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_compiler.lowerings.decode.kernels.decode_fp8 import WEIGHT, halves, near_the_top
from attn_compiler.lowerings.decode.kernels.results import combine, first_half, joined, leave, store
from attn_compiler.lowerings.decode.kernels.tuples import Cache, KeyTile, Queries
from attn_compiler.lowerings.shared.kernels.releases import members
from attn_compiler.lowerings.shared.kernels.tile_parts import LOG2E, at_head, change, load_pairs

#: Not specialised: one kernel serves every length, stride and address.
ANY_VALUE = (
    "stride_qb", "stride_qh", "stride_qs", "stride_kb", "stride_kh", "stride_ks", "stride_vb", "stride_vh", "stride_vs",
    "bounds_side", "bounds_b", "keys_b", "pairs_b", "pairs_h", "pairs_q", "pairs_k", "distances_h",
    "lse_at", "seqlen_kv", "scale", "changed_by",
)  # fmt: skip
ANY_ADDRESS = ("Lse", "Count", "Bounds", "Keys", "Pairs", "Distances", "Slopes", "Sinks", "KScale", "VScale")


@triton.jit
def _bounds(Bounds, batch, heads, queries, bounds_side, bounds_b, seqlen_kv, how: tl.constexpr):
    """Return for each row the first key that it may use and the one after the last, and both for all rows. Also which rows have no key,
    and whether some have none, where such a row is a mean over all keys."""
    none, some_none = False, False
    if Bounds is None:
        lower = tl.zeros([how.BLOCK_M], tl.int32)
        upper = lower + seqlen_kv
        first, end = 0, seqlen_kv
    else:
        Bounds += batch.to(tl.int64) * bounds_b
        if how.BOUNDS == "batch":
            first = tl.maximum(tl.load(Bounds), 0)
            end = tl.minimum(tl.load(Bounds + bounds_side), seqlen_kv)
            if how.MEANS is not None:
                none = first >= end
                some_none = none
                first, end = tl.where(none, 0, first), tl.where(none, seqlen_kv, end)
            lower = tl.zeros([how.BLOCK_M], tl.int32) + first
            upper = tl.zeros([how.BLOCK_M], tl.int32) + end
        else:
            at = Bounds + (queries if how.BOUNDS == "query" else heads * how.SEQLEN_Q + queries)
            lower = tl.maximum(tl.load(at), 0)
            upper = tl.minimum(tl.load(at + bounds_side), seqlen_kv)
            if how.MEANS is not None:
                none = lower >= upper
                some_none = tl.max(none.to(tl.int32), 0) > 0
                lower, upper = tl.where(none, 0, lower), tl.where(none, seqlen_kv, upper)
            first = tl.min(tl.where(lower < upper, lower, seqlen_kv), 0)
            end = tl.max(tl.where(lower < upper, upper, 0), 0)
    return lower, upper, first, end, none, some_none


@triton.jit
def _keys(start, BLOCK_N: tl.constexpr, SLICES: tl.constexpr, OF_SCORES: tl.constexpr):
    """Return positions of a tile of keys. OF_SCORES: (1, N) or, in slices, (S, 1, N), as columns of scores; else (N, 1) or (S, N, 1)."""
    if SLICES == 1:
        at = tl.arange(0, BLOCK_N)
        at = at[None, :] if OF_SCORES else at[:, None]
    else:
        size: tl.constexpr = BLOCK_N // SLICES
        at = tl.arange(0, SLICES)[:, None] * size + tl.arange(0, size)[None, :]
        at = at[:, None, :] if OF_SCORES else at[:, :, None]
    return start + at


@triton.jit
def _rows(x, SLICES: tl.constexpr):
    """Return (M, …) as rows of scores: unchanged, or (1, M, …)."""
    if SLICES > 1:
        x = tl.expand_dims(x, 0)
    return x


@triton.jit
def _load(
    base, keys, stride, end, allowed,
    FIRST: tl.constexpr, PART: tl.constexpr, HEAD_DIM: tl.constexpr, ALIGN: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """Load a part of the head dim of keys or values: (N, PART), or (S, N, PART) for S slices. Masked keys and keys from `end` on are 0."""
    dims = _rows(FIRST + tl.arange(0, PART)[None, :], SLICES)
    inside = keys < end
    if allowed is not None:
        inside = inside & allowed
    if FIRST + PART > HEAD_DIM:
        inside = inside & (dims < HEAD_DIM)
    rows = keys.to(tl.int64) * stride
    rows = tl.multiple_of(rows, [ALIGN, ALIGN]) if SLICES == 1 else tl.multiple_of(rows, [ALIGN, ALIGN, ALIGN])
    return tl.load(base + rows + dims, mask=inside, other=0.0)


@triton.jit
def _is_added(bias):
    """Return where the bias, in units of log 2, is not -inf. A bias of -inf masks its key: its values must not enter the sum."""
    return bias.to(tl.float32) * LOG2E != float("-inf")


@triton.jit
def _of_some_row(
    keys, queries, lower, upper, end, Keys, Pairs, pairs_q, pairs_k, SLICES: tl.constexpr, how: tl.constexpr
):
    """Return the keys that some row uses, (N, 1) or (S, N, 1).

    The pairs' mask is evaluated a second time, transposed. Moving the result from the layout of the scores to that of the values would
    take up to 100 registers more (see tile_parts.keys_in_use).
    """
    queries = _transposed(queries, SLICES)
    found = (keys < end) & (queries < how.SEQLEN_Q)
    if how.BOUNDS != "batch":
        found = found & (keys >= _transposed(lower, SLICES)) & (keys < _transposed(upper, SLICES))
    if Keys is not None:
        found = found & (tl.load(Keys + keys, mask=keys < end, other=0) != 0)
    if Pairs is not None:
        pairs = load_pairs(_transposed(Pairs, SLICES), queries, keys, pairs_q, pairs_k, how.SEQLEN_Q, end, True)
        found = found & ((pairs != 0) if how.PAIRS_MASK else _is_added(pairs))
    return tl.expand_dims(tl.max(found.to(tl.int32), 1 if SLICES == 1 else 2) > 0, -1)


@triton.jit
def _with_means(logits, none, truth, bias, how: tl.constexpr):
    """Set the logits of a row without keys to one value. truth: the mask without keys that numbers leave out."""
    alike = 0.0
    if how.MEANS == "finite":
        alike = tl.where(truth & (bias.to(tl.float32) != float("-inf")), 0.0, float("-inf"))
    return tl.where(none, alike, logits)


@triton.jit
def _transposed(x, SLICES: tl.constexpr):
    if SLICES == 1:
        x = tl.trans(x)
    else:
        x = tl.trans(x, 0, 2, 1)
    return x


@triton.jit
def _step(
    total, peak, out_0, out_1, start, end, own, of, scale, changed_by, tile: tl.constexpr, how: tl.constexpr
):  # fmt: skip
    """Process a tile of keys in the online softmax. total, peak: (M,) or (S, M) so far; out_0, out_1: (…, M, V_0), (…, M, V_1). own:
    `Queries`; of: `Cache`; tile: `KeyTile`."""
    queries, lower, upper = own.positions, own.lower, own.upper
    q_0, q_1, q_scale, Keys = own.q_0, own.q_1, own.scale, of.Keys
    keys = _keys(start, how.BLOCK_N, how.SLICES, True)
    rows = _keys(start, how.BLOCK_N, how.SLICES, False)
    allowed = keys < end
    values_used = None
    if how.BOUNDS != "batch":
        allowed = allowed & (keys >= lower) & (keys < upper)
    if Keys is not None:
        allowed = allowed & (tl.load(Keys + keys, mask=keys < end, other=0) != 0)
        if not how.BY_ROWS:
            values_used = tl.load(Keys + rows, mask=rows < end, other=0) != 0
    bias, distances, truth = None, None, allowed
    if of.Pairs is not None:
        pairs = load_pairs(of.Pairs, queries, keys, of.pairs_q, of.pairs_k, how.SEQLEN_Q, end, True)
        if how.PAIRS_MASK:
            allowed = allowed & (pairs != 0)
        else:
            bias = pairs
            allowed = allowed & _is_added(bias)
    if of.Distances is not None:
        distances = tl.load(of.Distances + (how.SEQLEN_Q - 1 - queries) + keys, mask=keys < end, other=0)
    # With many rows, evaluating the pairs' mask twice is too slow.
    AFTERWARDS: tl.constexpr = how.BY_ROWS and of.Pairs is not None and q_0.shape[-2] > 32
    if how.BY_ROWS and not AFTERWARDS:
        values_used = _of_some_row(
            rows, queries, lower, upper, end, Keys, of.Pairs, of.pairs_q, of.pairs_k, how.SLICES, how
        )
    if how.MEANS is not None and values_used is not None:
        values_used = values_used | own.some_none
    keys_used = values_used if how.ONE_KV else None
    k_0 = _load(of.K, rows, of.stride_k, end, keys_used, 0, tile.QK_0, tile.HEAD_DIM_QK, tile.ALIGN, how.SLICES)
    k_1 = k_0
    if tile.TWOS is not None:
        k_0, k_1 = halves(k_0, tile.TWOS, how.COMPILED)
    elif tile.QK_1 > 0:
        k_1 = _load(
            of.K, rows, of.stride_k, end, keys_used, tile.QK_0, tile.QK_1, tile.HEAD_DIM_QK, tile.ALIGN, how.SLICES
        ).to(q_0.dtype)
    qk = tl.dot(q_0, _transposed(k_0.to(q_0.dtype), how.SLICES), input_precision=how.PRECISION)
    if tile.TWOS is not None or tile.QK_1 > 0:
        qk = tl.dot(q_1, _transposed(k_1, how.SLICES), qk, input_precision=how.PRECISION)
    if q_scale is not None:
        qk *= q_scale
    logits, _ = change(
        qk, queries, keys, bias, distances, own.slope, scale, changed_by, how.CHANGE, how.FAST_TANH, how.PLAIN
    )
    logits = tl.where(allowed, logits, float("-inf"))
    if how.MEANS is not None:
        logits = _with_means(logits, own.none & (keys < end), truth, bias, how)
    if AFTERWARDS:
        some = tl.expand_dims(tl.max((logits != float("-inf")).to(tl.int32), 0 if how.SLICES == 1 else 1) > 0, -1)
    new_peak = tl.maximum(peak, tl.max(logits, 1 if how.SLICES == 1 else 2))
    # Nothing allowed so far: exp2(-inf - 0) is 0, where -inf - -inf would be NaN.
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    if how.PLAIN:
        weights = tl.exp2(logits * (scale * LOG2E) - tl.expand_dims(shift * (scale * LOG2E) - tile.LIFT, -1))
        decay = tl.exp2((peak - shift) * (scale * LOG2E))
    else:
        weights = tl.exp2(logits - tl.expand_dims(shift - tile.LIFT, -1))
        decay = tl.exp2(peak - shift)
    total = total * decay + tl.sum(weights, 1 if how.SLICES == 1 else 2)
    decay = tl.expand_dims(decay, -1)
    v_0, v_1 = k_0, k_1
    if not how.ONE_KV:
        v_0 = _load(of.V, rows, of.stride_v, end, values_used, 0, tile.V_0, tile.HEAD_DIM_V, tile.ALIGN, how.SLICES)
        v_1 = v_0
        if tile.TWOS is not None:
            v_0, v_1 = halves(v_0, tile.TWOS, how.COMPILED)
        elif tile.V_1 > 0:
            v_1 = _load(
                of.V, rows, of.stride_v, end, values_used, tile.V_0, tile.V_1, tile.HEAD_DIM_V, tile.ALIGN, how.SLICES
            ).to(q_0.dtype)
    if AFTERWARDS:
        v_0, v_1 = tl.where(some, v_0.to(q_0.dtype), 0.0), tl.where(some, v_1.to(q_0.dtype), 0.0)
    weights = weights.to(q_0.dtype)
    out_0 = tl.dot(weights, v_0.to(q_0.dtype), out_0 * decay, input_precision=how.PRECISION)
    if tile.TWOS is not None or tile.V_1 > 0:
        out_1 = tl.dot(weights, v_1, out_1 * decay, input_precision=how.PRECISION)
    return total, new_peak, out_0, out_1


@triton.jit
def _finished(
    total, peak, out_0, out_1, VScale,
    SLICES: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr, V_1: tl.constexpr, TWOS: tl.constexpr,
    LIFT: tl.constexpr,
):  # fmt: skip
    """Combine slices of the first ROWS rows, whose peaks are in units of log 2: return lse, in those units, and the results. LIFT: log2 of
    the weights' factor. With TWOS, even and odd dims are merged: all are in the first result."""
    if ROWS < BLOCK_M:
        total, peak = first_half(total, SLICES, ROWS), first_half(peak, SLICES, ROWS)
        out_0 = first_half(out_0, SLICES, ROWS)
        out_1 = first_half(out_1, SLICES, ROWS) if V_1 > 0 else out_0
    if SLICES > 1:
        total, peak, out_0, out_1 = joined(total, peak, out_0, out_1, SLICES, V_1)
    # A row without any allowed key has a total of 0 and a peak of -inf: so is its lse, and its results stay 0.
    divisor = tl.where(total == 0.0, 1.0, total)
    lse = peak + (tl.log2(divisor) - LIFT)
    share = (1.0 / divisor)[:, None]
    if VScale is not None:
        share *= tl.load(VScale)
    out_0, out_1 = out_0 * share, out_1 * share
    if TWOS is not None:
        out_0 = tl.interleave(out_0, out_1)
    return lse, out_0, out_1


@triton.jit(do_not_specialize=ANY_VALUE, do_not_specialize_on_alignment=ANY_ADDRESS)
def attention_decode(
    Q, K, V, Out, Lse, Partial, Count, Bounds, Keys, Pairs, Distances, Slopes, Sinks, KScale, VScale,
    stride_qb: tl.int64, stride_qh: tl.int64, stride_qs: tl.int64,
    stride_kb: tl.int64, stride_kh: tl.int64, stride_ks: tl.int64,
    stride_vb: tl.int64, stride_vh: tl.int64, stride_vs: tl.int64,
    bounds_side: tl.int32, bounds_b: tl.int32, keys_b: tl.int32,
    pairs_b: tl.int64, pairs_h: tl.int64, pairs_q: tl.int64, pairs_k: tl.int64,
    distances_h: tl.int64, lse_at: tl.int64, seqlen_kv: tl.int32, scale: tl.float32, changed_by: tl.float32, HOW: tl.constexpr,
):  # fmt: skip
    """Grid: (splits, Hkv · blocks of rows, B). See launch.py for the arguments, plan.py for the operands, tuples.py for HOW.

    Row r of a kv head's GROUP · SEQLEN_Q is query r % SEQLEN_Q of head r // SEQLEN_Q of the group. KScale, VScale: factors of keys and
    values in FP8, or None. Partial: float32, (B, Hkv · blocks, splits, KEPT, Dv) results and, from lse_at on, (…, KEPT) logarithms; Count:
    int32 (B, Hkv · blocks), zero before and after. Both None for one split.
    """
    how: tl.constexpr = members(HOW)
    split, place, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    blocks: tl.constexpr = (how.GROUP * how.SEQLEN_Q + how.BLOCK_M - 1) // how.BLOCK_M
    kv_head, block = place // blocks, place % blocks
    local = block * how.BLOCK_M + tl.arange(0, how.BLOCK_M)
    # Rows beyond the last one repeat it, and are not stored.
    used = tl.minimum(local, how.GROUP * how.SEQLEN_Q - 1)
    heads, queries = kv_head * how.GROUP + used // how.SEQLEN_Q, used % how.SEQLEN_Q
    if how.EARLY:
        # The kernel before this one may still run: nothing that it writes is read before its end.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    lower, upper, first, end, none, some_none = _bounds(
        Bounds, batch, heads, queries, bounds_side, bounds_b, seqlen_kv, how
    )
    # Loaded while the bounds are.
    # Widened on their own, too: the interpreter gives a stride the width of its value.
    far_heads, far_queries = heads.to(tl.int64), queries.to(tl.int64)
    row = (batch.to(tl.int64) * stride_qb + far_heads * stride_qh + far_queries * stride_qs)[:, None]
    row = tl.multiple_of(row, [how.ALIGN, how.ALIGN])
    # Vectors are made of pairs, and so is a head of one part; half of it still fills a tensor core's instruction.
    in_twos: tl.constexpr = (
        how.NARROWER == 2 and how.ALIGN > 1 and how.QK_1 == 0 and how.V_1 == 0 and how.QK_0 >= 32 and how.V_0 >= 32
    )
    twos: tl.constexpr = K.dtype.element_ty if in_twos else None
    both: tl.constexpr = 1 if twos is None else 2
    qk_1: tl.constexpr = how.QK_1 if twos is None else how.QK_0 // 2
    v_1: tl.constexpr = how.V_1 if twos is None else how.V_0 // 2
    dims = both * tl.arange(0, how.QK_0 // both)[None, :]
    q_0 = tl.load(Q + row + dims, mask=dims < how.HEAD_DIM_QK, other=0.0, volatile=True)
    q_1 = q_0
    if qk_1 > 0:
        dims = (how.QK_0 if twos is None else 1) + both * tl.arange(0, qk_1)[None, :]
        q_1 = tl.load(Q + row + dims, mask=dims < how.HEAD_DIM_QK, other=0.0)
    # Divided by what the kernel is compiled for, where that is known: a division stands before the first load of a key.
    splits = tl.num_programs(0) if how.SPLITS == 0 else how.SPLITS
    tiles = tl.cdiv(tl.maximum(end - first, 0), how.BLOCK_N)
    active = tl.minimum(tl.maximum(tiles, 1), splits)
    if split >= active:
        return

    # A vector of keys or values has NARROWER times as many elements.
    align: tl.constexpr = how.ALIGN * how.NARROWER if how.ALIGN > 1 else 1
    K = at_head(K, batch, kv_head, stride_kb, stride_kh, align)
    V = at_head(V, batch, kv_head, stride_vb, stride_vh, align)
    if twos is not None:
        K, V = K.to(tl.pointer_type(tl.int16)), V.to(tl.pointer_type(tl.int16))
        stride_ks, stride_vs = stride_ks // 2, stride_vs // 2
    q_scale = None
    if how.NARROWER == 2 and q_0.dtype != tl.float16:
        q_0, q_1, q_scale = near_the_top(q_0, q_1, 2 if qk_1 > 0 else 1)
        q_scale = _rows(q_scale, how.SLICES)
    lift: tl.constexpr = WEIGHT if q_0.dtype == tl.float16 else 0.0
    if KScale is not None:
        scale *= tl.load(KScale)
    slope = None
    if Keys is not None:
        Keys += batch.to(tl.int64) * keys_b
    if Pairs is not None:
        Pairs = _rows(Pairs + batch.to(tl.int64) * pairs_b + far_heads[:, None] * pairs_h, how.SLICES)
    if Distances is not None:
        Distances = _rows(Distances + far_heads[:, None] * distances_h, how.SLICES)
    if Slopes is not None:
        slope = _rows(tl.load(Slopes + heads)[:, None], how.SLICES)
    of_row = _rows(queries[:, None], how.SLICES)
    lower, upper = _rows(lower[:, None], how.SLICES), _rows(upper[:, None], how.SLICES)
    if how.MEANS is not None and how.BOUNDS != "batch":
        none = _rows(none[:, None], how.SLICES)
    total = tl.zeros([how.BLOCK_M], tl.float32)
    peak = tl.full([how.BLOCK_M], float("-inf"), tl.float32)
    out_0 = tl.zeros([how.BLOCK_M, how.V_0 // both], tl.float32)
    out_1 = tl.zeros([how.BLOCK_M, v_1 if v_1 > 0 else 16], tl.float32)
    if how.SLICES > 1:
        q_0, q_1 = tl.broadcast_to(q_0[None], (how.SLICES, how.BLOCK_M, how.QK_0 // both)), q_1[None]
        if qk_1 > 0:
            q_1 = tl.broadcast_to(q_1, (how.SLICES, how.BLOCK_M, qk_1))
        total = tl.zeros([how.SLICES, how.BLOCK_M], tl.float32)
        peak = tl.full([how.SLICES, how.BLOCK_M], float("-inf"), tl.float32)
        out_0 = tl.zeros([how.SLICES, how.BLOCK_M, how.V_0 // both], tl.float32)
        out_1 = tl.zeros([how.SLICES, how.BLOCK_M, v_1 if v_1 > 0 else 16], tl.float32)
    own = Queries(
        q_0=q_0, q_1=q_1, scale=q_scale, positions=of_row, lower=lower, upper=upper,
        none=none, some_none=some_none, slope=slope,
    )  # fmt: skip
    of = Cache(
        K=K, V=V, stride_k=stride_ks, stride_v=stride_vs, Keys=Keys,
        Pairs=Pairs, pairs_q=pairs_q, pairs_k=pairs_k, Distances=Distances,
    )  # fmt: skip
    constants: tl.constexpr = KeyTile(
        HEAD_DIM_QK=how.HEAD_DIM_QK // both, HEAD_DIM_V=how.HEAD_DIM_V // both,
        QK_0=how.QK_0 // both, QK_1=how.QK_1, V_0=how.V_0 // both, V_1=how.V_1,
        TWOS=twos, LIFT=lift, ALIGN=align // both,
    )  # fmt: skip
    for tile in tl.range(split, tiles, splits):
        start = first + tile * how.BLOCK_N
        total, peak, out_0, out_1 = _step(
            total, peak, out_0, out_1, start, end, own, of, scale, changed_by, constants, how
        )

    if how.PLAIN:
        peak = peak * (scale * LOG2E)
    rows: tl.constexpr = how.BLOCK_M // 2 if 2 * how.KEPT <= how.BLOCK_M else how.BLOCK_M
    # Each way has an end of its own: results of both would be moved twice, to where either stores them from.
    if active == 1:
        lse, done_0, done_1 = _finished(
            total, peak, out_0, out_1, VScale, how.SLICES, how.BLOCK_M, rows, v_1, twos, lift
        )
        store(Out, Lse, Sinks, batch, kv_head, block * how.BLOCK_M + tl.arange(0, rows), lse, done_0, done_1, how)
    elif Partial is not None:
        lse_part, part_0, part_1 = _finished(
            total, peak, out_0, out_1, VScale, how.SLICES, how.BLOCK_M, rows, v_1, twos, lift
        )
        index = batch * tl.num_programs(1) + place
        record = index.to(tl.int64) * splits
        leave(Partial, lse_at, record + split, lse_part, part_0, part_1, how, rows)
        # All threads have written before one of them counts.
        tl.debug_barrier()
        arrived = tl.atomic_add(Count + index, 1, sem="acq_rel")
        if arrived == active - 1:
            combine(Out, Lse, Partial, Sinks, batch, kv_head, block * how.BLOCK_M, lse_at, record, active, how)
            tl.store(Count + index, 0)
