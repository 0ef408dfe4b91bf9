"""The gradients of k and v: one program a block of keys, which sums over the blocks of queries and the query heads of a group.

The scores are held transposed, (keys, queries), so that they are the left operand of both products. See backward.py. Where something
is added to them, or they are kept, keys and queries are taken in the order of fragments.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_compiler.lowerings.shared.kernels.fragments import (
    in_query_order,
    key_order,
    load_distance_fragments,
    load_fragments,
    query_order,
    store_fragments,
)
from attn_compiler.lowerings.shared.kernels.optional import at_index, list_of, load_one, of_head
from attn_compiler.lowerings.shared.kernels.tile_parts import (
    at_head,
    change,
    head_and_batch,
    is_allowed,
    kept,
    kept_scores,
    load_list,
    load_tile,
    partial_tile,
    queries_in_band,
    queries_in_use,
    store_tile,
)
from attn_compiler.lowerings.triton.kernels.backward import row_stats


@triton.jit
def _step_kv(
    grad_k_0, grad_k_1, grad_v_0, grad_v_1, k_0, k_1, v_0, v_1, tile,
    start_k, first_key, last_key, keys, keys_allowed, document_k, slope, seed, head,
    Q, GradOut, RowStats, stats_rows, Rows, rows_side, DocumentsQ, Mask, Bias, Distances, Scores,
    stride_qs, stride_gs, mask_q, mask_k, bias_q, bias_k, distances_phase, pitch,
    band_left, band_right, seqlen_q, seqlen_kv, scale, softcap, dropout_p,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM_QK: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    QK_0: tl.constexpr, QK_1: tl.constexpr, V_0: tl.constexpr, V_1: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, FAST_TANH: tl.constexpr,
    PLAIN: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr, MASKED: tl.constexpr,
    FOR_K: tl.constexpr, FOR_V: tl.constexpr, IN_FRAGMENTS: tl.constexpr,
):  # fmt: skip
    """What one block of queries adds to the gradients of a block of keys. The scores are transposed: (N, M)."""
    start = tile * BLOCK_M
    order = None
    offsets = start + tl.arange(0, BLOCK_M)
    natural = offsets
    if IN_FRAGMENTS:
        order = query_order(BLOCK_M)
        offsets = start + order
    queries = offsets[None, :]
    lower, upper, document_q, queries_used = None, None, None, None
    if MASKED:
        inside = offsets < seqlen_q
        if Rows is not None:
            lower = tl.load(Rows + offsets, mask=inside, other=0)[None, :]
            upper = tl.load(Rows + rows_side + offsets, mask=inside, other=0)[None, :]
        if DocumentsQ is not None:
            document_q = tl.load(DocumentsQ + offsets, mask=inside, other=0)[None, :]
        queries_used = queries_in_use(
            offsets, keys, first_key, last_key, lower, upper, document_q, document_k, keys_allowed, Mask, mask_q, mask_k,
            band_left, band_right, seqlen_q, seqlen_kv, HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
    bias, distances = None, None
    if Bias is not None:
        bias = load_fragments(Bias, start, start_k, bias_q, bias_k, seqlen_q, seqlen_kv, BLOCK_N, BLOCK_M)
    if Distances is not None:
        distances = load_distance_fragments(
            Distances, start, start_k, distances_phase, seqlen_q, seqlen_kv, BLOCK_N, BLOCK_M
        )
    q_0 = load_tile(Q, start, stride_qs, seqlen_q, queries_used, BLOCK_M, 0, QK_0, HEAD_DIM_QK, True, ALIGN, order)
    q_1 = q_0
    qk = tl.dot(k_0, tl.trans(q_0), input_precision=PRECISION)
    if QK_1 > 0:
        q_1 = load_tile(
            Q, start, stride_qs, seqlen_q, queries_used, BLOCK_M, QK_0, QK_1, HEAD_DIM_QK, True, ALIGN, order
        )
        qk = tl.dot(k_1, tl.trans(q_1), qk, input_precision=PRECISION)
    base, delta = row_stats(RowStats, natural, stats_rows)
    if IN_FRAGMENTS:
        base, delta = in_query_order(base, BLOCK_M), in_query_order(delta, BLOCK_M)
    logits, capped = change(
        qk, queries, keys, bias, distances, slope, scale, softcap, SOFTCAP, FAST_TANH, PLAIN, base[None, :]
    )
    weights = tl.exp2(logits)
    if MASKED:
        allowed = is_allowed(
            queries, keys, lower, upper, document_q, document_k, keys_allowed, None if IN_FRAGMENTS else Mask, mask_q, mask_k,
            band_left, band_right, seqlen_q, seqlen_kv, HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
        if IN_FRAGMENTS and Mask is not None:
            mask = load_fragments(Mask, start, start_k, mask_q, mask_k, seqlen_q, seqlen_kv, BLOCK_N, BLOCK_M)
            allowed = allowed & (mask != 0)
        weights = tl.where(allowed, weights, 0.0)
    grad_out_0 = load_tile(
        GradOut, start, stride_gs, seqlen_q, queries_used, BLOCK_M, 0, V_0, HEAD_DIM_V, True, ALIGN, order
    )
    grad_out_1 = grad_out_0
    if V_1 > 0:
        grad_out_1 = load_tile(
            GradOut, start, stride_gs, seqlen_q, queries_used, BLOCK_M, V_0, V_1, HEAD_DIM_V, True, ALIGN, order
        )
    used = weights
    if DROPOUT:
        keep = kept(seed, head, queries, keys, dropout_p)
        used = tl.where(keep, weights / (1.0 - dropout_p), 0.0)
    if FOR_V:
        used = used.to(grad_out_0.dtype)
        grad_v_0 = tl.dot(used, grad_out_0, grad_v_0, input_precision=PRECISION)
        if V_1 > 0:
            grad_v_1 = tl.dot(used, grad_out_1, grad_v_1, input_precision=PRECISION)
    if FOR_K:
        grad_weights = tl.dot(v_0, tl.trans(grad_out_0), input_precision=PRECISION)
        if V_1 > 0:
            grad_weights = tl.dot(v_1, tl.trans(grad_out_1), grad_weights, input_precision=PRECISION)
        if DROPOUT:
            grad_weights = tl.where(keep, grad_weights / (1.0 - dropout_p), 0.0)
        grad = weights * (grad_weights - delta[None, :])
        if SOFTCAP:
            tl.static_assert(Scores is None, "what is kept are gradients of the scores after the softcap")
            grad *= 1.0 - capped * capped
        if MASKED:
            grad = tl.where(allowed, grad, 0.0)
        if Scores is not None:
            store_fragments(Scores, grad, start, start_k, pitch, seqlen_q, seqlen_kv, BLOCK_N, BLOCK_M)
        grad = grad.to(q_0.dtype)
        grad_k_0 = tl.dot(grad, q_0, grad_k_0, input_precision=PRECISION)
        if QK_1 > 0:
            grad_k_1 = tl.dot(grad, q_1, grad_k_1, input_precision=PRECISION)
    return grad_k_0, grad_k_1, grad_v_0, grad_v_1


@triton.jit
def attention_grad_kv(
    Q, K, V, GradOut, RowStats, GradK, GradV,
    Rows, Keys, DocumentsQ, DocumentsK, Mask, Tiles, Bias, Distances, Slopes, Seed, Scores,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_gb, stride_gh, stride_gs, stride_dkb, stride_dkh, stride_dks, stride_dvb, stride_dvh, stride_dvs, pitch, stats_rows,
    rows_side, rows_b, keys_b, documents_qb, documents_kb, mask_b, mask_h, mask_q, mask_k,
    tiles_b, tiles_h, tiles_row, bias_b, bias_h, bias_q, bias_k, distances_h, distances_phase,
    heads_q, group, seqlen_q, seqlen_kv, band_left, band_right, scale, softcap, dropout_p,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM_QK: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    QK_0: tl.constexpr, QK_1: tl.constexpr, V_0: tl.constexpr, V_1: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, FAST_TANH: tl.constexpr,
    PLAIN: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr,
    MASK_ALL: tl.constexpr, HEADS_LAST: tl.constexpr, FOR_K: tl.constexpr, FOR_V: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of keys, Hkv, B), or as HEADS_LAST says. Sums over the query heads of the group, in their order.

    FOR_K, FOR_V: what is asked for. Wide heads leave no room for both sums beside the tiles.
    """
    block = tl.program_id(0)
    head_kv, batch = head_and_batch(HEADS_LAST)
    start = block * BLOCK_N
    IN_FRAGMENTS: tl.constexpr = Bias is not None or Distances is not None or Scores is not None
    order = None
    offsets = start + tl.arange(0, BLOCK_N)
    if IN_FRAGMENTS:
        order = key_order(BLOCK_N)
        offsets = start + order
    keys = offsets[:, None]
    inside = keys < seqlen_kv
    first_key, last_key = start, tl.minimum(start + BLOCK_N, seqlen_kv) - 1

    K = at_head(K, batch, head_kv, stride_kb, stride_kh, ALIGN)
    V = at_head(V, batch, head_kv, stride_vb, stride_vh, ALIGN)
    GradK += batch.to(tl.int64) * stride_dkb + head_kv.to(tl.int64) * stride_dkh
    GradV += batch.to(tl.int64) * stride_dvb + head_kv.to(tl.int64) * stride_dvh
    Rows = at_index(Rows, batch, rows_b)
    keys_allowed = None
    if Keys is not None:
        keys_allowed = tl.load(at_index(Keys, batch, keys_b) + keys, mask=inside, other=0) != 0
        first_key = tl.min(tl.where(keys_allowed, keys, seqlen_kv))
        last_key = tl.max(tl.where(keys_allowed, keys, -1))
    document_k = None
    if DocumentsK is not None:
        document_k = tl.load(at_index(DocumentsK, batch, documents_kb) + keys, mask=inside, other=0)
    DocumentsQ = at_index(DocumentsQ, batch, documents_qb)
    seed = load_one(Seed, 0)

    k_0 = load_tile(K, start, stride_ks, seqlen_kv, keys_allowed, BLOCK_N, 0, QK_0, HEAD_DIM_QK, True, ALIGN, order)
    v_0 = load_tile(V, start, stride_vs, seqlen_kv, keys_allowed, BLOCK_N, 0, V_0, HEAD_DIM_V, True, ALIGN, order)
    k_1, v_1 = k_0, v_0
    if QK_1 > 0:
        k_1 = load_tile(
            K, start, stride_ks, seqlen_kv, keys_allowed, BLOCK_N, QK_0, QK_1, HEAD_DIM_QK, True, ALIGN, order
        )
    if V_1 > 0:
        v_1 = load_tile(V, start, stride_vs, seqlen_kv, keys_allowed, BLOCK_N, V_0, V_1, HEAD_DIM_V, True, ALIGN, order)
    grad_k_0 = tl.zeros([BLOCK_N, QK_0], tl.float32)
    grad_k_1 = tl.zeros([BLOCK_N, QK_1 if QK_1 > 0 else 16], tl.float32)
    grad_v_0 = tl.zeros([BLOCK_N, V_0], tl.float32)
    grad_v_1 = tl.zeros([BLOCK_N, V_1 if V_1 > 0 else 16], tl.float32)
    for member in range(group):
        head = head_kv * group + member
        row = batch.to(tl.int64) * heads_q + head
        stats_head = RowStats + row * 2 * stats_rows
        q_head = at_head(Q, batch, head, stride_qb, stride_qh, ALIGN)
        grad_head = at_head(GradOut, batch, head, stride_gb, stride_gh, ALIGN)
        mask_head = of_head(Mask, batch, head, mask_b, mask_h)
        bias_head = of_head(Bias, batch, head, bias_b, bias_h)
        distances_head = at_index(Distances, head, distances_h)
        scores_head = None
        if Scores is not None:
            scores_head = kept_scores(Scores, row, seqlen_kv, pitch)
        slope = load_one(Slopes, head)
        List = list_of(Tiles, batch, head, block, tiles_b, tiles_h, tiles_row)
        if List is not None:
            partial, first, second, full_first, full_last = load_list(List, seqlen_q > BLOCK_M)
        else:
            first, full_first, full_last, last = queries_in_band(
                start, tl.minimum(start + BLOCK_N, seqlen_kv) - 1, band_left, band_right, seqlen_q,
                BLOCK_M, HAS_LEFT, HAS_RIGHT,
            )  # fmt: skip
            if MASK_ALL:
                full_first, full_last = last, last
            partial = (full_first - first) + (last - full_last)
            second = first
        for i in tl.range(0, partial):
            grad_k_0, grad_k_1, grad_v_0, grad_v_1 = _step_kv(
                grad_k_0, grad_k_1, grad_v_0, grad_v_1, k_0, k_1, v_0, v_1,
                partial_tile(List, i, first, second, full_first, full_last),
                start, first_key, last_key, keys, keys_allowed, document_k, slope, seed, row,
                q_head, grad_head, stats_head, stats_rows, Rows, rows_side, DocumentsQ,
                mask_head, bias_head, distances_head, scores_head,
                stride_qs, stride_gs, mask_q, mask_k, bias_q, bias_k, distances_phase, pitch,
                band_left, band_right, seqlen_q, seqlen_kv, scale, softcap, dropout_p,
                BLOCK_M, BLOCK_N, HEAD_DIM_QK, HEAD_DIM_V, QK_0, QK_1, V_0, V_1,
                HAS_LEFT, HAS_RIGHT, SOFTCAP, FAST_TANH, PLAIN, DROPOUT, PRECISION, ALIGN, True, FOR_K, FOR_V, IN_FRAGMENTS,
            )  # fmt: skip
        for tile in tl.range(full_first, full_last):
            grad_k_0, grad_k_1, grad_v_0, grad_v_1 = _step_kv(
                grad_k_0, grad_k_1, grad_v_0, grad_v_1, k_0, k_1, v_0, v_1,
                tile,
                start, first_key, last_key, keys, keys_allowed, document_k, slope, seed, row,
                q_head, grad_head, stats_head, stats_rows, Rows, rows_side, DocumentsQ,
                mask_head, bias_head, distances_head, scores_head,
                stride_qs, stride_gs, mask_q, mask_k, bias_q, bias_k, distances_phase, pitch,
                band_left, band_right, seqlen_q, seqlen_kv, scale, softcap, dropout_p,
                BLOCK_M, BLOCK_N, HEAD_DIM_QK, HEAD_DIM_V, QK_0, QK_1, V_0, V_1,
                HAS_LEFT, HAS_RIGHT, SOFTCAP, FAST_TANH, PLAIN, DROPOUT, PRECISION, ALIGN, False, FOR_K, FOR_V, IN_FRAGMENTS,
            )  # fmt: skip
    if FOR_K:
        store_tile(GradK, start, stride_dks, seqlen_kv, grad_k_0 * scale, BLOCK_N, 0, QK_0, HEAD_DIM_QK, order)
        if QK_1 > 0:
            store_tile(GradK, start, stride_dks, seqlen_kv, grad_k_1 * scale, BLOCK_N, QK_0, QK_1, HEAD_DIM_QK, order)
    if FOR_V:
        store_tile(GradV, start, stride_dvs, seqlen_kv, grad_v_0, BLOCK_N, 0, V_0, HEAD_DIM_V, order)
        if V_1 > 0:
            store_tile(GradV, start, stride_dvs, seqlen_kv, grad_v_1, BLOCK_N, V_0, V_1, HEAD_DIM_V, order)
