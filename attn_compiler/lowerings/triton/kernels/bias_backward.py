"""Gradients of what is added to the scores: a bias that broadcasts, or one number for each distance of key and query.

Each program owns a tile of the result and adds up, in a fixed order, the scores' gradients of everything that broadcasts to it. It
reads them where the backward kept them (backward.py), or takes two products again for each tile of the scores. No atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_compiler.lowerings.shared.kernels.optional import at_index, load_one, of_head
from attn_compiler.lowerings.shared.kernels.tile_parts import (
    allowed_at,
    at_head,
    change,
    kept,
    kept_scores,
    load_distances,
    load_kept_scores,
    load_pairs,
    load_tile,
)
from attn_compiler.lowerings.triton.kernels.backward import row_stats
from attn_compiler.lowerings.triton.kernels.sums_backward import store_diagonals


@triton.jit
def _scores_gradient(
    start_q, start_k, batch, head,
    Q, K, V, GradOut, RowStats, Rows, Keys, DocumentsQ, DocumentsK, Mask, Bias, Distances, Slopes, Scores, seed,
    pitch, stats_rows, stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_gb, stride_gh, stride_gs,
    rows_side, rows_b, keys_b, documents_qb, documents_kb, mask_b, mask_h, mask_q, mask_k,
    bias_b, bias_h, bias_q, bias_k, distances_h, distances_phase,
    heads_q, group, seqlen_q, seqlen_kv, band_left, band_right, scale, softcap, dropout_p,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM_QK: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    QK_0: tl.constexpr, QK_1: tl.constexpr, V_0: tl.constexpr, V_1: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, FAST_TANH: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr, SPARSE: tl.constexpr,
):  # fmt: skip
    """(M, N) gradient of the logits of one tile, 0 where a pair is not allowed.

    SPARSE: whole tiles may be without an allowed pair, and are left out. A branch in the loop costs its pipelining.
    """
    row = batch.to(tl.int64) * heads_q + head
    offsets = start_q + tl.arange(0, BLOCK_M)
    queries = offsets[:, None]
    keys = start_k + tl.arange(0, BLOCK_N)[None, :]
    allowed = allowed_at(
        start_q, start_k, batch, head, Rows, Keys, DocumentsQ, DocumentsK, Mask,
        rows_side, rows_b, keys_b, documents_qb, documents_kb, mask_b, mask_h, mask_q, mask_k,
        band_left, band_right, seqlen_q, seqlen_kv, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT,
    )  # fmt: skip
    if Scores is not None:
        grad = load_kept_scores(kept_scores(Scores, row, seqlen_kv, pitch), queries, keys, pitch, seqlen_q, seqlen_kv)
        grad = grad.to(tl.float32)
        if SPARSE:
            grad = tl.where(allowed, grad, 0.0)
    else:
        grad = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        some = True
        if SPARSE:
            some = tl.max(tl.max(allowed.to(tl.int32), 1), 0) > 0
        if some:
            q_head = at_head(Q, batch, head, stride_qb, stride_qh, ALIGN)
            k_head = at_head(K, batch, head // group, stride_kb, stride_kh, ALIGN)
            v_head = at_head(V, batch, head // group, stride_vb, stride_vh, ALIGN)
            grad_head = at_head(GradOut, batch, head, stride_gb, stride_gh, ALIGN)
            q = load_tile(q_head, start_q, stride_qs, seqlen_q, None, BLOCK_M, 0, QK_0, HEAD_DIM_QK, True, ALIGN)
            k = load_tile(k_head, start_k, stride_ks, seqlen_kv, None, BLOCK_N, 0, QK_0, HEAD_DIM_QK, True, ALIGN)
            bias, distances = None, None
            if Bias is not None:
                bias_head = of_head(Bias, batch, head, bias_b, bias_h)
                bias = load_pairs(bias_head, queries, keys, bias_q, bias_k, seqlen_q, seqlen_kv, True)
            if Distances is not None:
                distances_head = at_index(Distances, head, distances_h)
                distances = load_distances(distances_head, queries, keys, distances_phase, seqlen_q, seqlen_kv, True)
            slope = load_one(Slopes, head)
            qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if QK_1 > 0:
                q = load_tile(q_head, start_q, stride_qs, seqlen_q, None, BLOCK_M, QK_0, QK_1, HEAD_DIM_QK, True, ALIGN)
                k = load_tile(
                    k_head, start_k, stride_ks, seqlen_kv, None, BLOCK_N, QK_0, QK_1, HEAD_DIM_QK, True, ALIGN
                )
                qk = tl.dot(q, tl.trans(k), qk, input_precision=PRECISION)
            g = load_tile(grad_head, start_q, stride_gs, seqlen_q, None, BLOCK_M, 0, V_0, HEAD_DIM_V, True, ALIGN)
            v = load_tile(v_head, start_k, stride_vs, seqlen_kv, None, BLOCK_N, 0, V_0, HEAD_DIM_V, True, ALIGN)
            grad_weights = tl.dot(g, tl.trans(v), input_precision=PRECISION)
            if V_1 > 0:
                g = load_tile(grad_head, start_q, stride_gs, seqlen_q, None, BLOCK_M, V_0, V_1, HEAD_DIM_V, True, ALIGN)
                v = load_tile(v_head, start_k, stride_vs, seqlen_kv, None, BLOCK_N, V_0, V_1, HEAD_DIM_V, True, ALIGN)
                grad_weights = tl.dot(g, tl.trans(v), grad_weights, input_precision=PRECISION)
            base, delta = row_stats(RowStats + row * 2 * stats_rows, offsets, stats_rows)
            logits, _ = change(
                qk, queries, keys, bias, distances, slope, scale, softcap, SOFTCAP, FAST_TANH, False, base[:, None]
            )
            weights = tl.exp2(logits)
            if DROPOUT:
                keep = kept(seed, row, queries, keys, dropout_p)
                grad_weights = tl.where(keep, grad_weights / (1.0 - dropout_p), 0.0)
            grad = tl.where(allowed, weights * (grad_weights - delta[:, None]), 0.0)
    return grad


@triton.jit
def attention_grad_bias(
    Q, K, V, GradOut, RowStats, Grad,
    Rows, Keys, DocumentsQ, DocumentsK, Mask, Bias, Distances, Slopes, Seed, Scores,
    pitch, stats_rows, stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_gb, stride_gh, stride_gs, grad_b, grad_h, grad_q, grad_k,
    rows_side, rows_b, keys_b, documents_qb, documents_kb, mask_b, mask_h, mask_q, mask_k,
    bias_b, bias_h, bias_q, bias_k, distances_h, distances_phase,
    batch_size, heads_q, group, seqlen_q, seqlen_kv, band_left, band_right, scale, softcap, dropout_p,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM_QK: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    QK_0: tl.constexpr, QK_1: tl.constexpr, V_0: tl.constexpr, V_1: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, FAST_TANH: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr, SPARSE: tl.constexpr,
    ONE_B: tl.constexpr, ONE_H: tl.constexpr, ONE_Q: tl.constexpr, ONE_K: tl.constexpr,
):  # fmt: skip
    """Grad: the bias' own shape, strides given, any float dtype. ONE_*: it has size one there, so that axis is summed over.

    Grid: (blocks of queries · blocks of keys, heads, batch rows) of the bias, one along each axis of size one.
    """
    blocks_k = tl.cdiv(seqlen_kv, BLOCK_N)
    tile, head_0, batch_0 = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if ONE_K:
        block_q, block_k = tile, tile * 0
    elif ONE_Q:
        block_q, block_k = tile * 0, tile
    else:
        block_q, block_k = tile // blocks_k, tile % blocks_k
    seed = load_one(Seed, 0)
    grad = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    count_h = heads_q if ONE_H else 1
    count_m = tl.cdiv(seqlen_q, BLOCK_M) if ONE_Q else 1
    count_n = blocks_k if ONE_K else 1
    # One loop over all axes that are summed: loads of the next tile are under way only within the innermost.
    for i in range((batch_size if ONE_B else 1) * count_h * count_m * count_n):
        n, rest = i % count_n, i // count_n
        m, rest = rest % count_m, rest // count_m
        grad += _scores_gradient(
            (block_q + m) * BLOCK_M, (block_k + n) * BLOCK_N, batch_0 + rest // count_h, head_0 + rest % count_h,
            Q, K, V, GradOut, RowStats, Rows, Keys, DocumentsQ, DocumentsK, Mask, Bias, Distances, Slopes, Scores,
            seed, pitch, stats_rows, stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb,
            stride_vh, stride_vs, stride_gb, stride_gh, stride_gs,
            rows_side, rows_b, keys_b, documents_qb, documents_kb, mask_b, mask_h, mask_q, mask_k,
            bias_b, bias_h, bias_q, bias_k, distances_h, distances_phase,
            heads_q, group, seqlen_q, seqlen_kv, band_left, band_right, scale, softcap, dropout_p,
            BLOCK_M, BLOCK_N, HEAD_DIM_QK, HEAD_DIM_V, QK_0, QK_1, V_0, V_1,
            HAS_LEFT, HAS_RIGHT, SOFTCAP, FAST_TANH, DROPOUT, PRECISION, ALIGN, SPARSE,
        )  # fmt: skip
    Grad += batch_0.to(tl.int64) * grad_b + head_0.to(tl.int64) * grad_h
    rows = block_q * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = block_k * BLOCK_N + tl.arange(0, BLOCK_N)
    if ONE_Q and ONE_K:
        tl.store(Grad, tl.sum(tl.sum(grad, 1), 0).to(Grad.dtype.element_ty))
    elif ONE_Q:
        tl.store(Grad + cols * grad_k, tl.sum(grad, 0).to(Grad.dtype.element_ty), mask=cols < seqlen_kv)
    elif ONE_K:
        tl.store(Grad + rows * grad_q, tl.sum(grad, 1).to(Grad.dtype.element_ty), mask=rows < seqlen_q)
    else:
        pointers = Grad + rows[:, None].to(tl.int64) * grad_q + cols[None, :] * grad_k
        inside = (rows[:, None] < seqlen_q) & (cols[None, :] < seqlen_kv)
        tl.store(pointers, grad.to(Grad.dtype.element_ty), mask=inside)


@triton.jit
def attention_grad_distances(
    Q, K, V, GradOut, RowStats, Sums,
    Rows, Keys, DocumentsQ, DocumentsK, Mask, Bias, Distances, Slopes, Seed, Scores,
    pitch, stats_rows, stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_gb, stride_gh, stride_gs,
    rows_side, rows_b, keys_b, documents_qb, documents_kb, mask_b, mask_h, mask_q, mask_k,
    bias_b, bias_h, bias_q, bias_k, distances_h, distances_phase,
    batch_size, heads_q, group, seqlen_q, seqlen_kv, band_left, band_right, scale, softcap, dropout_p,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM_QK: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    QK_0: tl.constexpr, QK_1: tl.constexpr, V_0: tl.constexpr, V_1: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, FAST_TANH: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr, SPARSE: tl.constexpr, ONE_H: tl.constexpr,
):  # fmt: skip
    """Sums over tiles along a diagonal: BLOCK_M = BLOCK_N, so that an element of a tile has one distance on all of them.

    Sums: float32 (Hq|1, 1, nQ + nK - 1, 2, M), contiguous, for the diagonals k block - q block = d - (nQ - 1), as
    `attention_sum_diagonals` takes them. Grid: (nQ + nK - 1, heads, 1).
    """
    blocks_q = tl.cdiv(seqlen_q, BLOCK_M)
    blocks_k = tl.cdiv(seqlen_kv, BLOCK_N)
    diagonal, head_0, batch_0 = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    offset = diagonal - (blocks_q - 1)
    first = tl.maximum(0, -offset)
    last = tl.minimum(blocks_q, blocks_k - offset)
    seed = load_one(Seed, 0)
    grad = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    count_h = heads_q if ONE_H else 1
    count_m = last - first
    for i in range(batch_size * count_h * count_m):
        m, rest = first + i % count_m, i // count_m
        grad += _scores_gradient(
            m * BLOCK_M, (m + offset) * BLOCK_N, batch_0 + rest // count_h, head_0 + rest % count_h,
            Q, K, V, GradOut, RowStats, Rows, Keys, DocumentsQ, DocumentsK, Mask, Bias, Distances, Slopes, Scores,
            seed, pitch, stats_rows, stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb,
            stride_vh, stride_vs, stride_gb, stride_gh, stride_gs,
            rows_side, rows_b, keys_b, documents_qb, documents_kb, mask_b, mask_h, mask_q, mask_k,
            bias_b, bias_h, bias_q, bias_k, distances_h, distances_phase,
            heads_q, group, seqlen_q, seqlen_kv, band_left, band_right, scale, softcap, dropout_p,
            BLOCK_M, BLOCK_N, HEAD_DIM_QK, HEAD_DIM_V, QK_0, QK_1, V_0, V_1,
            HAS_LEFT, HAS_RIGHT, SOFTCAP, FAST_TANH, DROPOUT, PRECISION, ALIGN, SPARSE,
        )  # fmt: skip
    at = head_0 * (blocks_q + blocks_k - 1) + diagonal
    store_diagonals(Sums + at.to(tl.int64) * (2 * BLOCK_M), grad, BLOCK_M)
