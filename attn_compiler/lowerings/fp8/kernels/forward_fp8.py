"""Attention forward on FP8 tensors, otherwise as forward.py: its masks, score changes, tile lists, and its lse.

What differs is what FP8's few bits ask for:
- Tensor cores of sm90 sum FP8 products in some 14 bits (https://github.com/vllm-project/flash-attention/pull/104). So weights · v is
  summed over one tile of keys there, and over the tiles in float32.
- Weights are rounded 2**8 times as large: at most 256 of the format's 448, so those down to 2**-14 of the largest stay normal numbers.
  Their sum is taken before the rounding and has the same factor, which falls out.
- The last keys come first. Where models put much weight on the first tokens (attention sinks), visiting those first would raise the
  maximum that all other weights are rounded against, and push them below the smallest number
  (https://arxiv.org/abs/2606.06521; FlashAttention-3 goes backwards too).
- A key that no query of a tile may see has a weight of 0, and 0 · NaN is NaN: v is not even read there. Only intervals, documents and
  dense masks ask for that; of the other masks nobody's keys were rounded to 0 (seen.py).
- Dropout's factor comes after the rounding, which it would push out of the format's range.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_compiler.lowerings.shared.kernels.optional import (
    at_index,
    list_of,
    load_column,
    load_one,
    load_upper,
    of_head,
)
from attn_compiler.lowerings.shared.kernels.tile_parts import (
    LN2,
    LOG2E,
    at_head,
    change,
    is_allowed,
    kept,
    keys_to_visit,
    load_distances,
    load_pairs,
    load_tile,
    partial_tile,
    store_tile,
)

#: log2 of what weights are rounded at; see above
WEIGHT = tl.constexpr(8.0)


@triton.jit
def _load_turned(
    base, start, stride, length, seen,
    SIZE: tl.constexpr, FIRST: tl.constexpr, PART: tl.constexpr, HEAD_DIM: tl.constexpr, CHECK: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """(PART, SIZE) elements of a tensor with positions last, as they lie there: head dims from FIRST, positions from `start`. Zeros
    beyond the head dim and, if CHECK, where `seen` (1, SIZE) does not hold; what is beyond the length has been made 0."""
    positions = tl.arange(0, SIZE)[None, :]
    dims = FIRST + tl.arange(0, PART)[:, None]
    pointers = (
        base + tl.multiple_of(start, SIZE) + tl.multiple_of(dims.to(tl.int64) * stride, [ALIGN, ALIGN]) + positions
    )
    if CHECK:
        # Of the last 16 positions, those beyond the length are anywhere.
        inside = start + positions < (length + 15) // 16 * 16
        if seen is not None:
            inside = inside & seen
        if FIRST + PART > HEAD_DIM:
            inside = inside & (dims < HEAD_DIM)
        tile = tl.load(pointers, mask=inside, other=0.0)
    elif FIRST + PART > HEAD_DIM:
        tile = tl.load(pointers, mask=dims < HEAD_DIM, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def _as_v_lies(weights, SIZE: tl.constexpr, KEYS: tl.constexpr):
    """(SIZE, KEYS) weights in the order of v's positions (fp8_rounding.in_order): for tensor cores of sm90 that is each thread's own."""
    groups = tl.reshape(weights, (SIZE, KEYS // 16, 2, 4, 2))
    return tl.reshape(tl.permute(groups, (0, 1, 3, 2, 4)), (SIZE, KEYS))


@triton.jit
def _step(
    total, peak, out_0, out_1, descale_v, q_0, q_1, descale_q, shift, tile, queries, lower, upper, document_q, slope, seed, head,
    K, V, DescaleK, DescaleV, Keys, DocumentsK, Mask, Bias, Distances,
    stride_ks, stride_vs, mask_q, mask_k, bias_q, bias_k, distances_phase,
    band_left, band_right, seqlen_q, seqlen_kv, scale, softcap, dropout_p,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM_QK: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    QK_0: tl.constexpr, QK_1: tl.constexpr, V_0: tl.constexpr, V_1: tl.constexpr, SCALE_BLOCK: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, FAST_TANH: tl.constexpr,
    PLAIN: tl.constexpr, DROPOUT: tl.constexpr, ALIGN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One block of keys of the online softmax. total, out_0, out_1 are 2**8 times too large, the latter in units of v's newest descale,
    descale_v. descale_q: of all rows, with k's where a head has one; shift: (M, 1)."""
    start = tile * BLOCK_N
    keys = start + tl.arange(0, BLOCK_N)[None, :]
    keys_allowed, document_k, values_seen = None, None, None
    # Of band and keys, what nobody sees is 0 already (seen.py).
    UNSEEN: tl.constexpr = MASKED and (lower is not None or DocumentsK is not None or Mask is not None)
    if MASKED:
        if Keys is not None:
            keys_allowed = tl.load(Keys + keys, mask=keys < seqlen_kv, other=0) != 0
        if DocumentsK is not None:
            document_k = tl.load(DocumentsK + keys, mask=keys < seqlen_kv, other=0)
    bias, distances = None, None
    if Bias is not None:
        bias = load_pairs(Bias, queries, keys, bias_q, bias_k, seqlen_q, seqlen_kv, MASKED)
    if Distances is not None:
        distances = load_distances(Distances, queries, keys, distances_phase, seqlen_q, seqlen_kv, MASKED)
    descale = descale_q
    if SCALE_BLOCK > 0:
        descale = descale_q * tl.load(DescaleK + start // SCALE_BLOCK)
    k_0 = load_tile(K, start, stride_ks, seqlen_kv, None, BLOCK_N, 0, QK_0, HEAD_DIM_QK, MASKED, ALIGN)
    SUM: tl.constexpr = tl.int32 if q_0.dtype == tl.int8 else tl.float32
    qk = tl.dot(q_0, tl.trans(k_0), out_dtype=SUM)
    if QK_1 > 0:
        k_1 = load_tile(K, start, stride_ks, seqlen_kv, None, BLOCK_N, QK_0, QK_1, HEAD_DIM_QK, MASKED, ALIGN)
        qk = tl.dot(q_1, tl.trans(k_1), qk, out_dtype=SUM)
    # Of int8, whole numbers.
    qk = qk.to(tl.float32)
    factor = 1.0
    if PLAIN:
        # With the maximum, one multiplication and addition for each pair.
        factor = scale * LOG2E * descale
        logits = qk
    elif SOFTCAP:
        qk = qk * descale
        if shift is not None:
            qk += shift
        logits, _ = change(qk, queries, keys, bias, distances, slope, scale, softcap, True, FAST_TANH, False)
    else:
        # What the shift adds is the same for all keys, and comes at the end.
        own = scale * descale
        logits, _ = change(qk, queries, keys, bias, distances, slope, own, softcap, False, FAST_TANH, False)
    if MASKED:
        allowed = is_allowed(
            queries, keys, lower, upper, document_q, document_k, keys_allowed, Mask, mask_q, mask_k,
            band_left, band_right, seqlen_q, seqlen_kv, HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
        logits = tl.where(allowed, logits, float("-inf"))
        if UNSEEN:
            # From the scores: of whether pairs are allowed, a tile beside theirs would be held, which spills.
            values_seen = _as_v_lies(tl.max(logits, 0)[None, :], 1, BLOCK_N) > float("-inf")
    new_peak = tl.maximum(peak, tl.max(logits, 1) * factor)
    against = new_peak
    if MASKED or Bias is not None:
        # Nothing allowed so far: exp2(-inf - 0) is 0, where -inf - -inf would be NaN.
        against = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(logits * factor - (against - WEIGHT)[:, None])
    decay = tl.exp2(peak - against)
    total = total * decay + tl.sum(weights, 1)
    if DROPOUT:
        weights = tl.where(kept(seed, head, queries, keys, dropout_p), weights, 0.0)
    weights = _as_v_lies(weights, BLOCK_M, BLOCK_N).to(V.dtype.element_ty)
    v_0 = _load_turned(V, start, stride_vs, seqlen_kv, values_seen, BLOCK_N, 0, V_0, HEAD_DIM_V, MASKED, ALIGN)
    if SCALE_BLOCK > 0:
        own_v = tl.load(DescaleV + start // SCALE_BLOCK)
        decay = decay * (descale_v / own_v)
        descale_v = own_v
    out_0 = out_0 * decay[:, None] + tl.dot(weights, tl.trans(v_0))
    if V_1 > 0:
        v_1 = _load_turned(V, start, stride_vs, seqlen_kv, values_seen, BLOCK_N, V_0, V_1, HEAD_DIM_V, MASKED, ALIGN)
        out_1 = out_1 * decay[:, None] + tl.dot(weights, tl.trans(v_1))
    return total, new_peak, out_0, out_1, descale_v


@triton.jit
def attention_forward_fp8(
    Q, K, V, DescaleQ, DescaleK, DescaleV, Shift, Out, Lse,
    Rows, Keys, DocumentsQ, DocumentsK, Mask, Tiles, Bias, Distances, Slopes, Sinks, Seed,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_ob, stride_oh, stride_os,
    descale_qb, descale_qh, descale_kb, descale_kh, descale_vb, descale_vh,
    rows_side, rows_b, keys_b, documents_qb, documents_kb, mask_b, mask_h, mask_q, mask_k,
    tiles_b, tiles_h, tiles_row, bias_b, bias_h, bias_q, bias_k, distances_h, distances_phase,
    heads_q, group, seqlen_q, seqlen_kv, band_left, band_right, scale, softcap, dropout_p,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM_QK: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    QK_0: tl.constexpr, QK_1: tl.constexpr, V_0: tl.constexpr, V_1: tl.constexpr, SCALE_BLOCK: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, FAST_TANH: tl.constexpr,
    PLAIN: tl.constexpr, DROPOUT: tl.constexpr, ALIGN: tl.constexpr, MASK_ALL: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of queries, Hq, B). Q, K, V (FP8, or int8 of Q and K) and descales: see fp8_quantise.names; the rest as in forward.py.

    V: (B, Hkv, Dv, Skv'), so stride_vs is that of head dims. SCALE_BLOCK: positions that share a scale, 0 if all of a head do; a
    multiple of BLOCK_M and BLOCK_N. Shift: float32 (B, Hq, Sq) that belongs to every product of a row, or None.
    """
    # Later blocks have more keys under a causal mask: they go first, so that the last programs to run are short.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head, batch = tl.program_id(1), tl.program_id(2)
    row = batch.to(tl.int64) * heads_q + head
    start = block * BLOCK_M
    offsets = start + tl.arange(0, BLOCK_M)
    inside = offsets < seqlen_q
    queries = offsets[:, None]

    Q = at_head(Q, batch, head, stride_qb, stride_qh, ALIGN)
    K = at_head(K, batch, head // group, stride_kb, stride_kh, ALIGN)
    V = at_head(V, batch, head // group, stride_vb, stride_vh, ALIGN)
    Out += batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh
    DescaleQ += batch.to(tl.int64) * descale_qb + head * descale_qh
    DescaleK += batch.to(tl.int64) * descale_kb + (head // group) * descale_kh
    DescaleV += batch.to(tl.int64) * descale_vb + (head // group) * descale_vh
    # One for all rows: blocks are multiples of what a program computes.
    descale_q = tl.load(DescaleQ + (start // SCALE_BLOCK if SCALE_BLOCK > 0 else 0))
    descale_v = tl.load(DescaleV)
    if SCALE_BLOCK == 0:
        descale_q *= tl.load(DescaleK)
    shift = load_column(Shift, row * seqlen_q + offsets, inside)
    Rows = at_index(Rows, batch, rows_b)
    lower = load_column(Rows, offsets, inside)
    upper = load_upper(Rows, rows_side, offsets, inside)
    Keys = at_index(Keys, batch, keys_b)
    document_q = load_column(at_index(DocumentsQ, batch, documents_qb), offsets, inside)
    DocumentsK = at_index(DocumentsK, batch, documents_kb)
    Mask = of_head(Mask, batch, head, mask_b, mask_h)
    Bias = of_head(Bias, batch, head, bias_b, bias_h)
    Distances = at_index(Distances, head, distances_h)
    slope = load_one(Slopes, head)
    seed = load_one(Seed, 0)
    List = list_of(Tiles, batch, head, block, tiles_b, tiles_h, tiles_row)
    partial, first, second, full_first, full_last = keys_to_visit(
        List, start, band_left, band_right, seqlen_q, seqlen_kv, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT, MASK_ALL
    )

    q_0 = load_tile(Q, start, stride_qs, seqlen_q, None, BLOCK_M, 0, QK_0, HEAD_DIM_QK, True, ALIGN)
    q_1 = q_0
    if QK_1 > 0:
        q_1 = load_tile(Q, start, stride_qs, seqlen_q, None, BLOCK_M, QK_0, QK_1, HEAD_DIM_QK, True, ALIGN)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    out_0 = tl.zeros([BLOCK_M, V_0], tl.float32)
    out_1 = tl.zeros([BLOCK_M, V_1 if V_1 > 0 else 16], tl.float32)
    for i in tl.range(0, partial):
        total, peak, out_0, out_1, descale_v = _step(
            total, peak, out_0, out_1, descale_v, q_0, q_1, descale_q, shift,
            partial_tile(List, partial - 1 - i, first, second, full_first, full_last),
            queries, lower, upper, document_q, slope, seed, row,
            K, V, DescaleK, DescaleV, Keys, DocumentsK, Mask, Bias, Distances,
            stride_ks, stride_vs, mask_q, mask_k, bias_q, bias_k, distances_phase,
            band_left, band_right, seqlen_q, seqlen_kv, scale, softcap, dropout_p,
            BLOCK_M, BLOCK_N, HEAD_DIM_QK, HEAD_DIM_V, QK_0, QK_1, V_0, V_1, SCALE_BLOCK,
            HAS_LEFT, HAS_RIGHT, SOFTCAP, FAST_TANH, PLAIN, DROPOUT, ALIGN, True,
        )  # fmt: skip
    for i in tl.range(full_first, full_last):
        total, peak, out_0, out_1, descale_v = _step(
            total, peak, out_0, out_1, descale_v, q_0, q_1, descale_q, shift, full_last - 1 - (i - full_first),
            queries, lower, upper, document_q, slope, seed, row,
            K, V, DescaleK, DescaleV, Keys, DocumentsK, Mask, Bias, Distances,
            stride_ks, stride_vs, mask_q, mask_k, bias_q, bias_k, distances_phase,
            band_left, band_right, seqlen_q, seqlen_kv, scale, softcap, dropout_p,
            BLOCK_M, BLOCK_N, HEAD_DIM_QK, HEAD_DIM_V, QK_0, QK_1, V_0, V_1, SCALE_BLOCK,
            HAS_LEFT, HAS_RIGHT, SOFTCAP, FAST_TANH, PLAIN, DROPOUT, ALIGN, False,
        )  # fmt: skip

    if Shift is not None and not SOFTCAP:
        moved = peak + tl.load(Shift + row * seqlen_q + offsets, mask=inside, other=0.0) * (scale * LOG2E)
        # A row without keys has no scores to move, also where q holds NaN.
        peak = tl.where(total == 0.0, peak, moved)
    if Sinks is not None:
        sink = tl.load(Sinks + head).to(tl.float32) * LOG2E
        with_sink = tl.maximum(peak, sink)
        decay = tl.exp2(peak - with_sink)
        total = total * decay + tl.exp2(sink - with_sink + WEIGHT)
        out_0, out_1 = out_0 * decay[:, None], out_1 * decay[:, None]
        peak = with_sink
    empty = total == 0.0
    divisor = tl.where(empty, 1.0, total)
    lse = tl.where(empty, float("-inf"), (peak - WEIGHT) * LN2 + tl.log(divisor))
    tl.store(Lse + row * seqlen_q + offsets, lse, mask=inside)
    if DROPOUT:
        divisor *= 1.0 - dropout_p
    divisor /= descale_v
    store_tile(Out, start, stride_os, seqlen_q, out_0 / divisor[:, None], BLOCK_M, 0, V_0, HEAD_DIM_V)
    if V_1 > 0:
        store_tile(Out, start, stride_os, seqlen_q, out_1 / divisor[:, None], BLOCK_M, V_0, V_1, HEAD_DIM_V)
