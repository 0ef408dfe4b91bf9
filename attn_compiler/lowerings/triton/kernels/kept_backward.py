"""The gradient of q, and that of what is added to the scores, of scores' gradients that the pass of dk and dv kept (kv_backward.py).

Both read all that was kept, which is far more than anything else they read. So programs of both that read the same follow each other,
and what one reads from memory the other finds in the L2 cache. A group of programs has a span of queries: of each head and batch row
that what is added is shared by, there is a program of dq for each block of queries; after these come those of the other gradient.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_compiler.lowerings.shared.kernels.optional import at_index, list_of, load_column, load_upper, of_head
from attn_compiler.lowerings.shared.kernels.tile_parts import (
    allowed_at,
    at_head,
    is_allowed,
    kept_scores,
    keys_in_use,
    keys_to_visit,
    load_kept_scores,
    load_tile,
    partial_tile,
    store_tile,
)
from attn_compiler.lowerings.triton.kernels.sums_backward import store_diagonals


@triton.jit
def _step_q(
    grad_0, grad_1, tile, start_q, queries, lower, upper, document_q, K, Keys, DocumentsK, Mask, Scores,
    stride_ks, mask_q, mask_k, pitch, band_left, band_right, seqlen_q, seqlen_kv,
    BLOCK_N: tl.constexpr, HEAD_DIM_QK: tl.constexpr, QK_0: tl.constexpr, QK_1: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What one block of keys adds to the gradient of a block of queries."""
    start = tile * BLOCK_N
    rows = start + tl.arange(0, BLOCK_N)[:, None]
    grad = tl.trans(load_kept_scores(Scores, tl.trans(queries), rows, pitch, seqlen_q, seqlen_kv))
    keys_used = None
    if MASKED:
        keys = start + tl.arange(0, BLOCK_N)[None, :]
        keys_allowed, document_k = None, None
        if Keys is not None:
            keys_allowed = tl.load(Keys + keys, mask=keys < seqlen_kv, other=0) != 0
        if DocumentsK is not None:
            document_k = tl.load(DocumentsK + keys, mask=keys < seqlen_kv, other=0)
        allowed = is_allowed(
            queries, keys, lower, upper, document_q, document_k, keys_allowed, Mask, mask_q, mask_k,
            band_left, band_right, seqlen_q, seqlen_kv, HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
        grad = tl.where(allowed, grad, 0.0)
        keys_used = keys_in_use(
            start, start_q, queries, lower, upper, document_q, Keys, DocumentsK, Mask, mask_q, mask_k,
            band_left, band_right, seqlen_q, seqlen_kv, BLOCK_N, HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
    k_0 = load_tile(K, start, stride_ks, seqlen_kv, keys_used, BLOCK_N, 0, QK_0, HEAD_DIM_QK, MASKED, ALIGN)
    grad = grad.to(k_0.dtype)
    grad_0 = tl.dot(grad, k_0, grad_0, input_precision=PRECISION)
    if QK_1 > 0:
        k_1 = load_tile(K, start, stride_ks, seqlen_kv, keys_used, BLOCK_N, QK_0, QK_1, HEAD_DIM_QK, MASKED, ALIGN)
        grad_1 = tl.dot(grad, k_1, grad_1, input_precision=PRECISION)
    return grad_0, grad_1


@triton.jit
def _grad_q(
    block, head, batch, K, GradQ, Rows, Keys, DocumentsQ, DocumentsK, Mask, Tiles, Scores,
    stride_kb, stride_kh, stride_ks, stride_dqb, stride_dqh, stride_dqs, pitch,
    rows_side, rows_b, keys_b, documents_qb, documents_kb, mask_b, mask_h, mask_q, mask_k, tiles_b, tiles_h, tiles_row,
    heads_q, group, seqlen_q, seqlen_kv, band_left, band_right, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM_QK: tl.constexpr, QK_0: tl.constexpr, QK_1: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr, MASK_ALL: tl.constexpr,
):  # fmt: skip
    start = block * BLOCK_M
    offsets = start + tl.arange(0, BLOCK_M)
    inside = offsets < seqlen_q
    queries = offsets[:, None]
    K = at_head(K, batch, head // group, stride_kb, stride_kh, ALIGN)
    GradQ += batch.to(tl.int64) * stride_dqb + head.to(tl.int64) * stride_dqh
    Scores = kept_scores(Scores, batch.to(tl.int64) * heads_q + head, seqlen_kv, pitch)
    Rows = at_index(Rows, batch, rows_b)
    lower = load_column(Rows, offsets, inside)
    upper = load_upper(Rows, rows_side, offsets, inside)
    Keys = at_index(Keys, batch, keys_b)
    document_q = load_column(at_index(DocumentsQ, batch, documents_qb), offsets, inside)
    DocumentsK = at_index(DocumentsK, batch, documents_kb)
    Mask = of_head(Mask, batch, head, mask_b, mask_h)
    List = list_of(Tiles, batch, head, block, tiles_b, tiles_h, tiles_row)
    partial, first, second, full_first, full_last = keys_to_visit(
        List, start, band_left, band_right, seqlen_q, seqlen_kv, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT, MASK_ALL
    )
    grad_0 = tl.zeros([BLOCK_M, QK_0], tl.float32)
    grad_1 = tl.zeros([BLOCK_M, QK_1 if QK_1 > 0 else 16], tl.float32)
    for i in tl.range(0, partial):
        grad_0, grad_1 = _step_q(
            grad_0, grad_1, partial_tile(List, i, first, second, full_first, full_last),
            start, queries, lower, upper, document_q, K, Keys, DocumentsK, Mask, Scores,
            stride_ks, mask_q, mask_k, pitch, band_left, band_right, seqlen_q, seqlen_kv,
            BLOCK_N, HEAD_DIM_QK, QK_0, QK_1, HAS_LEFT, HAS_RIGHT, PRECISION, ALIGN, True,
        )  # fmt: skip
    for tile in tl.range(full_first, full_last):
        grad_0, grad_1 = _step_q(
            grad_0, grad_1, tile,
            start, queries, lower, upper, document_q, K, Keys, DocumentsK, Mask, Scores,
            stride_ks, mask_q, mask_k, pitch, band_left, band_right, seqlen_q, seqlen_kv,
            BLOCK_N, HEAD_DIM_QK, QK_0, QK_1, HAS_LEFT, HAS_RIGHT, PRECISION, ALIGN, False,
        )  # fmt: skip
    store_tile(GradQ, start, stride_dqs, seqlen_q, grad_0 * scale, BLOCK_M, 0, QK_0, HEAD_DIM_QK)
    if QK_1 > 0:
        store_tile(GradQ, start, stride_dqs, seqlen_q, grad_1 * scale, BLOCK_M, QK_0, QK_1, HEAD_DIM_QK)


@triton.jit
def _kept_tile(
    start_q, start_k, batch, head, Rows, Keys, DocumentsQ, DocumentsK, Mask, Scores, pitch,
    rows_side, rows_b, keys_b, documents_qb, documents_kb, mask_b, mask_h, mask_q, mask_k,
    heads_q, seqlen_q, seqlen_kv, band_left, band_right,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SPARSE: tl.constexpr,
):  # fmt: skip
    """(M, N) float32, 0 where a pair is not allowed. SPARSE: there may be such pairs, and tiles that were not written."""
    queries = start_q + tl.arange(0, BLOCK_M)[:, None]
    keys = start_k + tl.arange(0, BLOCK_N)[None, :]
    scores = kept_scores(Scores, batch.to(tl.int64) * heads_q + head, seqlen_kv, pitch)
    grad = load_kept_scores(scores, queries, keys, pitch, seqlen_q, seqlen_kv).to(tl.float32)
    if SPARSE:
        allowed = allowed_at(
            start_q, start_k, batch, head, Rows, Keys, DocumentsQ, DocumentsK, Mask,
            rows_side, rows_b, keys_b, documents_qb, documents_kb, mask_b, mask_h, mask_q, mask_k,
            band_left, band_right, seqlen_q, seqlen_kv, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
        grad = tl.where(allowed, grad, 0.0)
    return grad


@triton.jit
def _grad_bias(
    start_q, start_k, head_0, batch_0, count_h, count, Grad, Rows, Keys, DocumentsQ, DocumentsK, Mask, Scores,
    pitch, grad_b, grad_h, grad_q, grad_k,
    rows_side, rows_b, keys_b, documents_qb, documents_kb, mask_b, mask_h, mask_q, mask_k,
    heads_q, seqlen_q, seqlen_kv, band_left, band_right,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SPARSE: tl.constexpr,
):  # fmt: skip
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i in range(count):
        total += _kept_tile(
            start_q, start_k, batch_0 + i // count_h, head_0 + i % count_h,
            Rows, Keys, DocumentsQ, DocumentsK, Mask, Scores, pitch,
            rows_side, rows_b, keys_b, documents_qb, documents_kb, mask_b, mask_h, mask_q, mask_k,
            heads_q, seqlen_q, seqlen_kv, band_left, band_right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT, SPARSE,
        )  # fmt: skip
    queries = start_q + tl.arange(0, BLOCK_M)[:, None]
    keys = start_k + tl.arange(0, BLOCK_N)[None, :]
    Grad += batch_0.to(tl.int64) * grad_b + head_0.to(tl.int64) * grad_h
    pointers = Grad + queries.to(tl.int64) * grad_q + keys * grad_k
    tl.store(pointers, total.to(Grad.dtype.element_ty), mask=(queries < seqlen_q) & (keys < seqlen_kv))


@triton.jit
def _sum_diagonal(
    first_block, blocks, diagonal, head_0, count_h, count, Sums, Rows, Keys, DocumentsQ, DocumentsK, Mask, Scores, pitch,
    rows_side, rows_b, keys_b, documents_qb, documents_kb, mask_b, mask_h, mask_q, mask_k,
    heads_q, seqlen_q, seqlen_kv, band_left, band_right,
    SIZE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SPARSE: tl.constexpr,
):  # fmt: skip
    """Tiles whose block of keys is `diagonal` after their block of queries, of so many blocks of queries from the first on: summed
    along their own diagonals, 2 · SIZE float32 to Sums."""
    first = tl.maximum(first_block, -diagonal)
    last = tl.minimum(tl.minimum(first_block + blocks, tl.cdiv(seqlen_q, SIZE)), tl.cdiv(seqlen_kv, SIZE) - diagonal)
    length = tl.maximum(last - first, 0)
    if HAS_RIGHT:
        length = tl.where(diagonal * SIZE - (SIZE - 1) > band_right, 0, length)
    if HAS_LEFT:
        length = tl.where(diagonal * SIZE + (SIZE - 1) < -band_left, 0, length)
    total = tl.zeros([SIZE, SIZE], tl.float32)
    for i in range(count * length):
        start, member = (first + i % length) * SIZE, i // length
        total += _kept_tile(
            start, start + diagonal * SIZE, member // count_h, head_0 + member % count_h,
            Rows, Keys, DocumentsQ, DocumentsK, Mask, Scores, pitch,
            rows_side, rows_b, keys_b, documents_qb, documents_kb, mask_b, mask_h, mask_q, mask_k,
            heads_q, seqlen_q, seqlen_kv, band_left, band_right, SIZE, SIZE, HAS_LEFT, HAS_RIGHT, SPARSE,
        )  # fmt: skip
    store_diagonals(Sums, total, SIZE)


@triton.jit
def attention_grad_q_kept(
    K, GradQ, Grad, Sums, Rows, Keys, DocumentsQ, DocumentsK, Mask, Tiles, Scores,
    stride_kb, stride_kh, stride_ks, stride_dqb, stride_dqh, stride_dqs, pitch, grad_b, grad_h, grad_q, grad_k,
    rows_side, rows_b, keys_b, documents_qb, documents_kb, mask_b, mask_h, mask_q, mask_k, tiles_b, tiles_h, tiles_row,
    batch_size, heads_q, group, seqlen_q, seqlen_kv, band_left, band_right, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM_QK: tl.constexpr, QK_0: tl.constexpr, QK_1: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr, MASK_ALL: tl.constexpr,
    ONE_B: tl.constexpr, ONE_H: tl.constexpr, SPAN: tl.constexpr, SIZE: tl.constexpr, SPARSE: tl.constexpr,
):  # fmt: skip
    """GradQ in logical BHSD, and nothing else or one of

    Grad: the gradient of a bias (B|1, Hq|1, Sq, Skv), strides given, any float dtype.
    Sums: float32 (Hq|1, spans, nK + SPAN / SIZE - 1, 2, SIZE), contiguous, for `attention_sum_diagonals`.

    ONE_*: that has size one there, so the axis is summed over, in a fixed order. Its tiles have SIZE queries and keys. SPAN: queries of
    a group of programs, a multiple of BLOCK_M and SIZE. Grid: (spans · all programs of one, heads and batch rows that are not summed
    over).
    """
    count_h = heads_q if ONE_H else 1
    count = (batch_size if ONE_B else 1) * count_h
    head_0, batch_0 = tl.program_id(1), tl.program_id(2)
    of_dq, of_other, blocks_k = count * (SPAN // BLOCK_M), 0, tl.cdiv(seqlen_kv, SIZE)
    if Grad is not None:
        of_other = blocks_k * (SPAN // SIZE)
    elif Sums is not None:
        of_other = blocks_k + SPAN // SIZE - 1
    spans = tl.cdiv(seqlen_q, SPAN)
    # Under a causal mask the last queries have most to do, and begin.
    span, part = spans - 1 - tl.program_id(0) // (of_dq + of_other), tl.program_id(0) % (of_dq + of_other)
    if part < of_dq:
        block, member = span * (SPAN // BLOCK_M) + part // count, part % count
        if block * BLOCK_M < seqlen_q:
            _grad_q(
                block, head_0 + member % count_h, batch_0 + member // count_h,
                K, GradQ, Rows, Keys, DocumentsQ, DocumentsK, Mask, Tiles, Scores,
                stride_kb, stride_kh, stride_ks, stride_dqb, stride_dqh, stride_dqs, pitch, rows_side, rows_b, keys_b,
                documents_qb, documents_kb, mask_b, mask_h, mask_q, mask_k, tiles_b, tiles_h, tiles_row,
                heads_q, group, seqlen_q, seqlen_kv, band_left, band_right, scale,
                BLOCK_M, BLOCK_N, HEAD_DIM_QK, QK_0, QK_1, HAS_LEFT, HAS_RIGHT, PRECISION, ALIGN, MASK_ALL,
            )  # fmt: skip
    elif Grad is not None:
        tile = part - of_dq
        _grad_bias(
            span * SPAN + tile % (SPAN // SIZE) * SIZE, tile // (SPAN // SIZE) * SIZE,
            head_0, batch_0, count_h, count, Grad, Rows, Keys, DocumentsQ, DocumentsK, Mask, Scores,
            pitch, grad_b, grad_h, grad_q, grad_k,
            rows_side, rows_b, keys_b, documents_qb, documents_kb, mask_b, mask_h, mask_q, mask_k,
            heads_q, seqlen_q, seqlen_kv, band_left, band_right, SIZE, SIZE, HAS_LEFT, HAS_RIGHT, SPARSE,
        )  # fmt: skip
    elif Sums is not None:
        diagonal = part - of_dq
        at = (head_0 * spans + span) * of_other + diagonal
        _sum_diagonal(
            span * (SPAN // SIZE), SPAN // SIZE, diagonal - span * (SPAN // SIZE) - (SPAN // SIZE - 1),
            head_0, count_h, count, Sums + at.to(tl.int64) * (2 * SIZE),
            Rows, Keys, DocumentsQ, DocumentsK, Mask, Scores, pitch,
            rows_side, rows_b, keys_b, documents_qb, documents_kb, mask_b, mask_h, mask_q, mask_k,
            heads_q, seqlen_q, seqlen_kv, band_left, band_right, SIZE, HAS_LEFT, HAS_RIGHT, SPARSE,
        )  # fmt: skip
