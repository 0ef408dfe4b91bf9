"""Attention forward, FlashAttention-2 style (https://arxiv.org/abs/2307.08691): one program a block of queries and a head.

Blocks of keys that are only partly allowed come first, with the mask evaluated; then those that are allowed in full, without.
Nothing else is visited. A head dim that is no power of two is two tiles (80 = 64 + 16), so it costs what it is.
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
    head_and_batch,
    is_allowed,
    kept,
    keys_in_use,
    keys_to_visit,
    load_distances,
    load_pairs,
    load_tile,
    partial_tile,
    store_tile,
)


@triton.jit
def _step(
    total, peak, out_0, out_1, q_0, q_1, tile, start_q, queries, lower, upper, document_q, slope, seed, head,
    K, V, Keys, DocumentsK, Mask, Bias, Distances,
    stride_ks, stride_vs, mask_q, mask_k, bias_q, bias_k, distances_phase,
    band_left, band_right, seqlen_q, seqlen_kv, scale, softcap, dropout_p,
    BLOCK_N: tl.constexpr, HEAD_DIM_QK: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    QK_0: tl.constexpr, QK_1: tl.constexpr, V_0: tl.constexpr, V_1: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, FAST_TANH: tl.constexpr,
    PLAIN: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One block of keys of the online softmax. total, peak: (M,) of a row so far; out_0, out_1: (M, V_0), (M, V_1)."""
    start = tile * BLOCK_N
    keys = start + tl.arange(0, BLOCK_N)[None, :]
    values_used = None
    keys_allowed = None
    document_k = None
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
    k_0 = load_tile(K, start, stride_ks, seqlen_kv, None, BLOCK_N, 0, QK_0, HEAD_DIM_QK, MASKED, ALIGN)
    qk = tl.dot(q_0, tl.trans(k_0), input_precision=PRECISION)
    if QK_1 > 0:
        k_1 = load_tile(K, start, stride_ks, seqlen_kv, None, BLOCK_N, QK_0, QK_1, HEAD_DIM_QK, MASKED, ALIGN)
        qk = tl.dot(q_1, tl.trans(k_1), qk, input_precision=PRECISION)
    logits, _ = change(qk, queries, keys, bias, distances, slope, scale, softcap, SOFTCAP, FAST_TANH, PLAIN)
    if MASKED:
        allowed = is_allowed(
            queries, keys, lower, upper, document_q, document_k, keys_allowed, Mask, mask_q, mask_k,
            band_left, band_right, seqlen_q, seqlen_kv, HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
        logits = tl.where(allowed, logits, float("-inf"))
        values_used = keys_in_use(
            start, start_q, queries, lower, upper, document_q, Keys, DocumentsK, Mask, mask_q, mask_k,
            band_left, band_right, seqlen_q, seqlen_kv, BLOCK_N, HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
    new_peak = tl.maximum(peak, tl.max(logits, 1))
    shift = new_peak
    if MASKED or Bias is not None:
        # Nothing allowed so far: exp2(-inf - 0) is 0, where -inf - -inf would be NaN.
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    if PLAIN:
        weights = tl.exp2(logits * (scale * LOG2E) - (shift * (scale * LOG2E))[:, None])
        decay = tl.exp2((peak - shift) * (scale * LOG2E))
    else:
        weights = tl.exp2(logits - shift[:, None])
        decay = tl.exp2(peak - shift)
    total = total * decay + tl.sum(weights, 1)
    if DROPOUT:
        weights = tl.where(kept(seed, head, queries, keys, dropout_p), weights / (1.0 - dropout_p), 0.0)
    out_0 = out_0 * decay[:, None]
    v_0 = load_tile(V, start, stride_vs, seqlen_kv, values_used, BLOCK_N, 0, V_0, HEAD_DIM_V, MASKED, ALIGN)
    weights = weights.to(v_0.dtype)
    out_0 = tl.dot(weights, v_0, out_0, input_precision=PRECISION)
    if V_1 > 0:
        out_1 = out_1 * decay[:, None]
        v_1 = load_tile(V, start, stride_vs, seqlen_kv, values_used, BLOCK_N, V_0, V_1, HEAD_DIM_V, MASKED, ALIGN)
        out_1 = tl.dot(weights, v_1, out_1, input_precision=PRECISION)
    return total, new_peak, out_0, out_1


@triton.jit
def attention_forward(
    Q, K, V, Out, Lse, Rows, Keys, DocumentsQ, DocumentsK, Mask, Tiles, Bias, Distances, Slopes, Sinks, Seed,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_ob, stride_oh, stride_os,
    rows_side, rows_b, keys_b, documents_qb, documents_kb, mask_b, mask_h, mask_q, mask_k,
    tiles_b, tiles_h, tiles_row, bias_b, bias_h, bias_q, bias_k, distances_h, distances_phase,
    heads_q, group, seqlen_q, seqlen_kv, band_left, band_right, scale, softcap, dropout_p,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM_QK: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    QK_0: tl.constexpr, QK_1: tl.constexpr, V_0: tl.constexpr, V_1: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, FAST_TANH: tl.constexpr,
    PLAIN: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr,
    MASK_ALL: tl.constexpr, HEADS_LAST: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of queries, Hq, B), or as HEADS_LAST says. Arguments: launch.py; operands: kernel_plan.Plan.

    Lse: (B, Hq, Sq), contiguous, float32, natural logarithm. A row without any allowed key gets 0 and -inf.
    """
    # Later blocks have more keys under a causal mask: they go first, so that the last programs to run are short.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head, batch = head_and_batch(HEADS_LAST)
    row = batch.to(tl.int64) * heads_q + head
    start = block * BLOCK_M
    offsets = start + tl.arange(0, BLOCK_M)
    inside = offsets < seqlen_q
    queries = offsets[:, None]

    Q = at_head(Q, batch, head, stride_qb, stride_qh, ALIGN)
    K = at_head(K, batch, head // group, stride_kb, stride_kh, ALIGN)
    V = at_head(V, batch, head // group, stride_vb, stride_vh, ALIGN)
    Out += batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh
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
        total, peak, out_0, out_1 = _step(
            total, peak, out_0, out_1, q_0, q_1, partial_tile(List, i, first, second, full_first, full_last),
            start, queries, lower, upper, document_q, slope, seed, row,
            K, V, Keys, DocumentsK, Mask, Bias, Distances,
            stride_ks, stride_vs, mask_q, mask_k, bias_q, bias_k, distances_phase,
            band_left, band_right, seqlen_q, seqlen_kv, scale, softcap, dropout_p,
            BLOCK_N, HEAD_DIM_QK, HEAD_DIM_V, QK_0, QK_1, V_0, V_1,
            HAS_LEFT, HAS_RIGHT, SOFTCAP, FAST_TANH, PLAIN, DROPOUT, PRECISION, ALIGN, True,
        )  # fmt: skip
    for tile in tl.range(full_first, full_last):
        total, peak, out_0, out_1 = _step(
            total, peak, out_0, out_1, q_0, q_1, tile,
            start, queries, lower, upper, document_q, slope, seed, row,
            K, V, Keys, DocumentsK, Mask, Bias, Distances,
            stride_ks, stride_vs, mask_q, mask_k, bias_q, bias_k, distances_phase,
            band_left, band_right, seqlen_q, seqlen_kv, scale, softcap, dropout_p,
            BLOCK_N, HEAD_DIM_QK, HEAD_DIM_V, QK_0, QK_1, V_0, V_1,
            HAS_LEFT, HAS_RIGHT, SOFTCAP, FAST_TANH, PLAIN, DROPOUT, PRECISION, ALIGN, False,
        )  # fmt: skip

    if PLAIN:
        peak = peak * (scale * LOG2E)
    if Sinks is not None:
        sink = tl.load(Sinks + head).to(tl.float32) * LOG2E
        with_sink = tl.maximum(peak, sink)
        # A sink of -inf beside no key at all: -inf - -inf would be NaN.
        shift = tl.where(with_sink == float("-inf"), 0.0, with_sink)
        decay = tl.exp2(peak - shift)
        total = total * decay + tl.exp2(sink - shift)
        out_0, out_1 = out_0 * decay[:, None], out_1 * decay[:, None]
        peak = with_sink
    empty = total == 0.0
    divisor = tl.where(empty, 1.0, total)
    lse = tl.where(empty, float("-inf"), peak * LN2 + tl.log(divisor))
    tl.store(Lse + row * seqlen_q + offsets, lse, mask=inside)
    store_tile(Out, start, stride_os, seqlen_q, out_0 / divisor[:, None], BLOCK_M, 0, V_0, HEAD_DIM_V)
    if V_1 > 0:
        store_tile(Out, start, stride_os, seqlen_q, out_1 / divisor[:, None], BLOCK_M, V_0, V_1, HEAD_DIM_V)
