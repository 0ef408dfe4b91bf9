"""The gradient of q, and delta: one program a block of queries. kv_backward.py has those of k and v, bias_backward.py the biases'.

Each gradient has one writer, so the result is the same in every run; seven products instead of the five that a single pass with
atomic additions to dq takes.

Scores: where a bias is learned, the pass over the keys may keep the scores' gradients, (B, Hq, Skv, pitch) in q's dtype, for the
others to read (kept_backward.py): then all take five products, and as much memory as PyTorch's own kernels for such a bias.
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
def attention_row_stats(
    Out, GradOut, Lse, GradLse, RowStats,
    stride_ob, stride_oh, stride_os, stride_gb, stride_gh, stride_gs, heads_q, seqlen_q, stats_rows,
    BLOCK_M: tl.constexpr, HEAD_DIM_V: tl.constexpr, V_ALL: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """What the passes need of each row, (B, Hq, 2, stats_rows) float32: -lse in units of log 2, and
    delta = sum(out · grad_out) - grad_lse. Grid: (stats_rows / BLOCK_M, Hq, B).

    -lse of rows without an allowed key, and of those beyond the last, is -inf: their weights are 0.
    """
    start, head, batch = tl.program_id(0) * BLOCK_M, tl.program_id(1), tl.program_id(2)
    offsets = start + tl.arange(0, BLOCK_M)
    row = batch.to(tl.int64) * heads_q + head
    Out = at_head(Out, batch, head, stride_ob, stride_oh, ALIGN)
    GradOut = at_head(GradOut, batch, head, stride_gb, stride_gh, ALIGN)
    out = load_tile(Out, start, stride_os, seqlen_q, None, BLOCK_M, 0, V_ALL, HEAD_DIM_V, True, ALIGN)
    grad_out = load_tile(GradOut, start, stride_gs, seqlen_q, None, BLOCK_M, 0, V_ALL, HEAD_DIM_V, True, ALIGN)
    grad_lse = tl.load(GradLse + row * seqlen_q + offsets, mask=offsets < seqlen_q, other=0.0)
    base = _minus_lse(Lse + row * seqlen_q, offsets, seqlen_q)
    delta = _delta_of(_products(out, grad_out) - grad_lse, base)
    _store_row_stats(RowStats + row * 2 * stats_rows, offsets, stats_rows, base, delta)


@triton.jit
def _minus_lse(Lse, offsets, seqlen_q):
    lse = tl.load(Lse + offsets, mask=offsets < seqlen_q, other=float("-inf"))
    return tl.where(lse == float("-inf"), lse, -lse * LOG2E)


@triton.jit
def _products(out, grad_out):
    """(M,) sums of out · grad_out. A row without any key has out = 0, and its grad_out may be anything: nothing of it counts."""
    out = out.to(tl.float32)
    return tl.sum(tl.where(out == 0.0, 0.0, out * grad_out.to(tl.float32)), 1)


@triton.jit
def _delta_of(delta, base):
    """0 where a row has no key (-lse in units of log 2 is -inf), whatever is put on it."""
    return tl.where(base == float("-inf"), 0.0, delta)


@triton.jit
def _store_row_stats(stats, offsets, stats_rows, base, delta):
    inside = offsets < stats_rows
    tl.store(stats + offsets, base, mask=inside)
    tl.store(stats + stats_rows + offsets, delta, mask=inside)


@triton.jit
def row_stats(stats, offsets, stats_rows):
    """-lse in units of log 2, and delta, of rows of one head; stats_rows is a multiple of every pass' block."""
    return tl.load(stats + offsets), tl.load(stats + stats_rows + offsets)


@triton.jit
def _step_q(
    grad_0, grad_1, q_0, q_1, grad_out_0, grad_out_1, base, delta, tile,
    start_q, queries, lower, upper, document_q, slope, seed, head,
    K, V, Keys, DocumentsK, Mask, Bias, Distances,
    stride_ks, stride_vs, mask_q, mask_k, bias_q, bias_k, distances_phase,
    band_left, band_right, seqlen_q, seqlen_kv, scale, softcap, dropout_p,
    BLOCK_N: tl.constexpr, HEAD_DIM_QK: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    QK_0: tl.constexpr, QK_1: tl.constexpr, V_0: tl.constexpr, V_1: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, FAST_TANH: tl.constexpr,
    PLAIN: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What one block of keys adds to the gradient of a block of queries."""
    start = tile * BLOCK_N
    keys = start + tl.arange(0, BLOCK_N)[None, :]
    keys_used, keys_allowed, document_k = None, None, None
    if MASKED:
        if Keys is not None:
            keys_allowed = tl.load(Keys + keys, mask=keys < seqlen_kv, other=0) != 0
        if DocumentsK is not None:
            document_k = tl.load(DocumentsK + keys, mask=keys < seqlen_kv, other=0)
        keys_used = keys_in_use(
            start, start_q, queries, lower, upper, document_q, Keys, DocumentsK, Mask, mask_q, mask_k,
            band_left, band_right, seqlen_q, seqlen_kv, BLOCK_N, HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
    k_0 = load_tile(K, start, stride_ks, seqlen_kv, keys_used, BLOCK_N, 0, QK_0, HEAD_DIM_QK, MASKED, ALIGN)
    k_1 = k_0
    if QK_1 > 0:
        k_1 = load_tile(K, start, stride_ks, seqlen_kv, keys_used, BLOCK_N, QK_0, QK_1, HEAD_DIM_QK, MASKED, ALIGN)
    bias, distances = None, None
    if Bias is not None:
        bias = load_pairs(Bias, queries, keys, bias_q, bias_k, seqlen_q, seqlen_kv, MASKED)
    if Distances is not None:
        distances = load_distances(Distances, queries, keys, distances_phase, seqlen_q, seqlen_kv, MASKED)
    qk = tl.dot(q_0, tl.trans(k_0), input_precision=PRECISION)
    if QK_1 > 0:
        qk = tl.dot(q_1, tl.trans(k_1), qk, input_precision=PRECISION)
    v_0 = load_tile(V, start, stride_vs, seqlen_kv, None, BLOCK_N, 0, V_0, HEAD_DIM_V, MASKED, ALIGN)
    grad_weights = tl.dot(grad_out_0, tl.trans(v_0), input_precision=PRECISION)
    if V_1 > 0:
        v_1 = load_tile(V, start, stride_vs, seqlen_kv, None, BLOCK_N, V_0, V_1, HEAD_DIM_V, MASKED, ALIGN)
        grad_weights = tl.dot(grad_out_1, tl.trans(v_1), grad_weights, input_precision=PRECISION)
    logits, capped = change(qk, queries, keys, bias, distances, slope, scale, softcap, SOFTCAP, FAST_TANH, PLAIN, base)
    weights = tl.exp2(logits)
    if DROPOUT:
        grad_weights = tl.where(kept(seed, head, queries, keys, dropout_p), grad_weights / (1.0 - dropout_p), 0.0)
    grad = weights * (grad_weights - delta)
    if SOFTCAP:
        grad *= 1.0 - capped * capped
    if MASKED:
        allowed = is_allowed(
            queries, keys, lower, upper, document_q, document_k, keys_allowed, Mask, mask_q, mask_k,
            band_left, band_right, seqlen_q, seqlen_kv, HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
        grad = tl.where(allowed, grad, 0.0)
    grad = grad.to(k_0.dtype)
    grad_0 = tl.dot(grad, k_0, grad_0, input_precision=PRECISION)
    if QK_1 > 0:
        grad_1 = tl.dot(grad, k_1, grad_1, input_precision=PRECISION)
    return grad_0, grad_1


@triton.jit
def attention_grad_q(
    Q, K, V, GradOut, Out, Lse, GradLse, RowStats, GradQ,
    Rows, Keys, DocumentsQ, DocumentsK, Mask, Tiles, Bias, Distances, Slopes, Seed,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_gb, stride_gh, stride_gs, stride_dqb, stride_dqh, stride_dqs, stride_ob, stride_oh, stride_os, stats_rows,
    rows_side, rows_b, keys_b, documents_qb, documents_kb, mask_b, mask_h, mask_q, mask_k,
    tiles_b, tiles_h, tiles_row, bias_b, bias_h, bias_q, bias_k, distances_h, distances_phase,
    heads_q, group, seqlen_q, seqlen_kv, band_left, band_right, scale, softcap, dropout_p,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM_QK: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    QK_0: tl.constexpr, QK_1: tl.constexpr, V_0: tl.constexpr, V_1: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, FAST_TANH: tl.constexpr,
    PLAIN: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr,
    MASK_ALL: tl.constexpr, HEADS_LAST: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of queries, Hq, B), or as HEADS_LAST says. Lse, GradLse: (B, Hq, Sq), contiguous, float32.

    Makes RowStats as `attention_row_stats` does, for the pass over the keys, which comes later. ROUND: stats_rows is the next
    multiple.
    """
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
    GradOut = at_head(GradOut, batch, head, stride_gb, stride_gh, ALIGN)
    GradQ += batch.to(tl.int64) * stride_dqb + head.to(tl.int64) * stride_dqh
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

    grad_out_0 = load_tile(GradOut, start, stride_gs, seqlen_q, None, BLOCK_M, 0, V_0, HEAD_DIM_V, True, ALIGN)
    grad_out_1 = grad_out_0
    if V_1 > 0:
        grad_out_1 = load_tile(GradOut, start, stride_gs, seqlen_q, None, BLOCK_M, V_0, V_1, HEAD_DIM_V, True, ALIGN)
    Out = at_head(Out, batch, head, stride_ob, stride_oh, ALIGN)
    out_0 = load_tile(Out, start, stride_os, seqlen_q, None, BLOCK_M, 0, V_0, HEAD_DIM_V, True, ALIGN)
    delta = _products(out_0, grad_out_0)
    if V_1 > 0:
        out_1 = load_tile(Out, start, stride_os, seqlen_q, None, BLOCK_M, V_0, V_1, HEAD_DIM_V, True, ALIGN)
        delta += _products(out_1, grad_out_1)
    delta -= tl.load(GradLse + row * seqlen_q + offsets, mask=inside, other=0.0)
    base = _minus_lse(Lse + row * seqlen_q, offsets, seqlen_q)
    delta = _delta_of(delta, base)
    stats = RowStats + row * 2 * stats_rows
    _store_row_stats(stats, offsets, stats_rows, base, delta)
    if ROUND > BLOCK_M:
        if block == tl.num_programs(0) - 1:
            beyond = start + BLOCK_M + tl.arange(0, ROUND)
            nothing = tl.zeros([ROUND], tl.float32)
            _store_row_stats(stats, beyond, stats_rows, nothing + float("-inf"), nothing)
    base, delta = base[:, None], delta[:, None]
    q_0 = load_tile(Q, start, stride_qs, seqlen_q, None, BLOCK_M, 0, QK_0, HEAD_DIM_QK, True, ALIGN)
    q_1 = q_0
    if QK_1 > 0:
        q_1 = load_tile(Q, start, stride_qs, seqlen_q, None, BLOCK_M, QK_0, QK_1, HEAD_DIM_QK, True, ALIGN)
    grad_0 = tl.zeros([BLOCK_M, QK_0], tl.float32)
    grad_1 = tl.zeros([BLOCK_M, QK_1 if QK_1 > 0 else 16], tl.float32)
    for i in tl.range(0, partial):
        grad_0, grad_1 = _step_q(
            grad_0, grad_1, q_0, q_1, grad_out_0, grad_out_1, base, delta,
            partial_tile(List, i, first, second, full_first, full_last),
            start, queries, lower, upper, document_q, slope, seed, row,
            K, V, Keys, DocumentsK, Mask, Bias, Distances,
            stride_ks, stride_vs, mask_q, mask_k, bias_q, bias_k, distances_phase,
            band_left, band_right, seqlen_q, seqlen_kv, scale, softcap, dropout_p,
            BLOCK_N, HEAD_DIM_QK, HEAD_DIM_V, QK_0, QK_1, V_0, V_1,
            HAS_LEFT, HAS_RIGHT, SOFTCAP, FAST_TANH, PLAIN, DROPOUT, PRECISION, ALIGN, True,
        )  # fmt: skip
    for tile in tl.range(full_first, full_last):
        grad_0, grad_1 = _step_q(
            grad_0, grad_1, q_0, q_1, grad_out_0, grad_out_1, base, delta,
            tile,
            start, queries, lower, upper, document_q, slope, seed, row,
            K, V, Keys, DocumentsK, Mask, Bias, Distances,
            stride_ks, stride_vs, mask_q, mask_k, bias_q, bias_k, distances_phase,
            band_left, band_right, seqlen_q, seqlen_kv, scale, softcap, dropout_p,
            BLOCK_N, HEAD_DIM_QK, HEAD_DIM_V, QK_0, QK_1, V_0, V_1,
            HAS_LEFT, HAS_RIGHT, SOFTCAP, FAST_TANH, PLAIN, DROPOUT, PRECISION, ALIGN, False,
        )  # fmt: skip
    store_tile(GradQ, start, stride_dqs, seqlen_q, grad_0 * scale, BLOCK_M, 0, QK_0, HEAD_DIM_QK)
    if QK_1 > 0:
        store_tile(GradQ, start, stride_dqs, seqlen_q, grad_1 * scale, BLOCK_M, QK_0, QK_1, HEAD_DIM_QK)
