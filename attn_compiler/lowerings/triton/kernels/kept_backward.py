"""The gradients of q and of tensors added to the scores, from the scores' gradients that the pass of dk and dv kept (kv_backward.py).

Both read all of these, far more than anything else. So programs of both that read the same tiles follow each other, and one finds in the
L2 cache what the other has read from memory. A group of programs has a span of queries. For each head and batch row that shares the added
tensor, it has a program of dq for each block of queries. Then come the programs of the other gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attn_compiler.lowerings.shared.kernels.optional import (
    at_index,
    list_of,
    load_column,
    load_keys,
    load_row,
    load_upper,
    of_head,
)
from attn_compiler.lowerings.shared.kernels.releases import members
from attn_compiler.lowerings.shared.kernels.sums_backward import store_diagonals
from attn_compiler.lowerings.shared.kernels.tile_parts import (
    allowed_at,
    at_head,
    is_allowed,
    kept_scores,
    keys_in_use,
    load_kept_scores,
    load_tile,
    store_tile,
)
from attn_compiler.lowerings.shared.kernels.tile_visits import keys_to_visit, partial_tile
from attn_compiler.lowerings.shared.kernels.tuples import KeyMasks, MaskOperands, Pairs, Positions, QueryRows


class _Kept(NamedTuple):
    """The kept gradients of scores, and their mask operands, of all batch rows and heads."""

    Scores: Any
    pitch: Any
    operands: Any  # MaskOperands
    masking: Any  # MaskStrides


@triton.jit
def _step_q(grad_0, grad_1, tile, rows, masks, k, scores, pitch, sizes, how: tl.constexpr, MASKED: tl.constexpr):
    """Add one block of keys to the gradient of a block of queries. rows: `QueryRows`; masks: `KeyMasks`; k: `Positions`; scores: of this
    head."""
    start = tile * how.BLOCK_N
    seqlen_q, seqlen_kv = sizes.seqlen_q, sizes.seqlen_kv
    of_keys = start + tl.arange(0, how.BLOCK_N)[:, None]
    grad = tl.trans(load_kept_scores(scores, tl.trans(rows.queries), of_keys, pitch, seqlen_q, seqlen_kv))
    keys_used = None
    if MASKED:
        keys = start + tl.arange(0, how.BLOCK_N)[None, :]
        keys_allowed = load_keys(masks.Keys, keys, keys < seqlen_kv)
        document_k = load_row(masks.Documents, keys, keys < seqlen_kv)
        allowed = is_allowed(
            rows.queries, keys, rows.lower, rows.upper, rows.document, document_k, keys_allowed, masks.mask, sizes, how
        )
        grad = tl.where(allowed, grad, 0.0)
        keys_used = keys_in_use(start, rows, masks, sizes, how)
    k_0 = load_tile(k, start, keys_used, how.BLOCK_N, 0, how.QK_0, how.HEAD_DIM_QK, MASKED, how.ALIGN)
    grad = grad.to(k_0.dtype)
    grad_0 = tl.dot(grad, k_0, grad_0, input_precision=how.PRECISION)
    if how.QK_1 > 0:
        k_1 = load_tile(k, start, keys_used, how.BLOCK_N, how.QK_0, how.QK_1, how.HEAD_DIM_QK, MASKED, how.ALIGN)
        grad_1 = tl.dot(grad, k_1, grad_1, input_precision=how.PRECISION)
    return grad_0, grad_1


@triton.jit
def _grad_q(block, head, batch, K, GradQ, Tiles, stride_k, stride_dq, of, lists, sizes, how: tl.constexpr):
    """Compute dq of one block of queries. of: `_Kept`."""
    operands, masking = of.operands, of.masking
    start = block * how.BLOCK_M
    offsets = start + tl.arange(0, how.BLOCK_M)
    inside = offsets < sizes.seqlen_q
    K = at_head(K, batch, head // sizes.group, stride_k.b, stride_k.h, how.ALIGN)
    GradQ += batch.to(tl.int64) * stride_dq.b + head.to(tl.int64) * stride_dq.h
    k = Positions(base=K, stride=stride_k.s, length=sizes.seqlen_kv)
    grad_q = Positions(base=GradQ, stride=stride_dq.s, length=sizes.seqlen_q)
    scores = kept_scores(of.Scores, batch.to(tl.int64) * sizes.heads_q + head, sizes.seqlen_kv, of.pitch)
    Rows = at_index(operands.Rows, batch, masking.rows_b)
    rows = QueryRows(
        start=start,
        queries=offsets[:, None],
        lower=load_column(Rows, offsets, inside),
        upper=load_upper(Rows, masking.rows_side, offsets, inside),
        document=load_column(at_index(operands.DocumentsQ, batch, masking.documents_qb), offsets, inside),
    )
    Mask = of_head(operands.Mask, batch, head, masking.mask_b, masking.mask_h)
    masks = KeyMasks(
        Keys=at_index(operands.Keys, batch, masking.keys_b),
        Documents=at_index(operands.DocumentsK, batch, masking.documents_kb),
        mask=Pairs(base=Mask, q=masking.mask_q, k=masking.mask_k),
    )
    List = list_of(Tiles, batch, head, block, lists)
    partial, first, second, full_first, full_last = keys_to_visit(List, start, sizes, how)
    grad_0 = tl.zeros([how.BLOCK_M, how.QK_0], tl.float32)
    grad_1 = tl.zeros([how.BLOCK_M, how.QK_1 if how.QK_1 > 0 else 16], tl.float32)
    for i in tl.range(0, partial):
        tile = partial_tile(List, i, first, second, full_first, full_last)
        grad_0, grad_1 = _step_q(grad_0, grad_1, tile, rows, masks, k, scores, of.pitch, sizes, how, True)
    for tile in tl.range(full_first, full_last):
        grad_0, grad_1 = _step_q(grad_0, grad_1, tile, rows, masks, k, scores, of.pitch, sizes, how, False)
    store_tile(grad_q, start, grad_0 * sizes.scale, how.BLOCK_M, 0, how.QK_0, how.HEAD_DIM_QK)
    if how.QK_1 > 0:
        store_tile(grad_q, start, grad_1 * sizes.scale, how.BLOCK_M, how.QK_0, how.QK_1, how.HEAD_DIM_QK)


@triton.jit
def _kept_tile(
    start_q, start_k, batch, head, of, sizes, how: tl.constexpr, SIZE: tl.constexpr, SPARSE: tl.constexpr
):  # fmt: skip
    """Load (SIZE, SIZE) float32, 0 where a pair is not allowed. of: `_Kept`. SPARSE: there may be such pairs, and tiles that were not
    written."""
    queries = start_q + tl.arange(0, SIZE)[:, None]
    keys = start_k + tl.arange(0, SIZE)[None, :]
    scores = kept_scores(of.Scores, batch.to(tl.int64) * sizes.heads_q + head, sizes.seqlen_kv, of.pitch)
    grad = load_kept_scores(scores, queries, keys, of.pitch, sizes.seqlen_q, sizes.seqlen_kv).to(tl.float32)
    if SPARSE:
        allowed = allowed_at(start_q, start_k, batch, head, of.operands, of.masking, sizes, how, SIZE, SIZE)
        grad = tl.where(allowed, grad, 0.0)
    return grad


@triton.jit
def _grad_bias(
    start_q, start_k, head_0, batch_0, count_h, count, Grad, stride_grad, of, sizes, how: tl.constexpr,
    SIZE: tl.constexpr, SPARSE: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the bias's gradient. of: `_Kept`."""
    total = tl.zeros([SIZE, SIZE], tl.float32)
    for i in range(count):
        batch, head = batch_0 + i // count_h, head_0 + i % count_h
        total += _kept_tile(start_q, start_k, batch, head, of, sizes, how, SIZE, SPARSE)
    queries = start_q + tl.arange(0, SIZE)[:, None]
    keys = start_k + tl.arange(0, SIZE)[None, :]
    Grad += batch_0.to(tl.int64) * stride_grad.grad_b + head_0.to(tl.int64) * stride_grad.grad_h
    pointers = Grad + queries.to(tl.int64) * stride_grad.grad_q + keys * stride_grad.grad_k
    tl.store(pointers, total.to(Grad.dtype.element_ty), mask=(queries < sizes.seqlen_q) & (keys < sizes.seqlen_kv))


@triton.jit
def _sum_diagonal(
    first_block, blocks, diagonal, head_0, count_h, count, Sums, of, sizes, how: tl.constexpr,
    SIZE: tl.constexpr, SPARSE: tl.constexpr,
):  # fmt: skip
    """Sum tiles whose block of keys is `diagonal` after their block of queries, of `blocks` blocks of queries from the first on, along
    their own diagonals: 2 · SIZE float32 to Sums. of: `_Kept`."""
    first = tl.maximum(first_block, -diagonal)
    last = tl.minimum(
        tl.minimum(first_block + blocks, tl.cdiv(sizes.seqlen_q, SIZE)), tl.cdiv(sizes.seqlen_kv, SIZE) - diagonal
    )
    length = tl.maximum(last - first, 0)
    if how.HAS_RIGHT:
        length = tl.where(diagonal * SIZE - (SIZE - 1) > sizes.band_right, 0, length)
    if how.HAS_LEFT:
        length = tl.where(diagonal * SIZE + (SIZE - 1) < -sizes.band_left, 0, length)
    total = tl.zeros([SIZE, SIZE], tl.float32)
    for i in range(count * length):
        start, member = (first + i % length) * SIZE, i // length
        batch, head = member // count_h, head_0 + member % count_h
        total += _kept_tile(start, start + diagonal * SIZE, batch, head, of, sizes, how, SIZE, SPARSE)
    store_diagonals(Sums, total, SIZE)


@triton.jit
def attention_grad_q_kept(
    K, GradQ, Grad, Sums, Rows, Keys, DocumentsQ, DocumentsK, Mask, Tiles, Scores,
    stride_k, stride_dq, pitch, stride_grad, masking, lists, batch_size, sizes, HOW: tl.constexpr,
    ONE_B: tl.constexpr, ONE_H: tl.constexpr, SPAN: tl.constexpr, SIZE: tl.constexpr, SPARSE: tl.constexpr,
):  # fmt: skip
    """Write GradQ in logical BHSD, and at most one of:

    Grad: the gradient of a bias (B|1, Hq|1, Sq, Skv), strides given, any float dtype. Sums: float32 (Hq|1, spans, nK + SPAN / SIZE - 1, 2,
    SIZE), contiguous, for `attention_sum_diagonals`.

    ONE_*: the tensor has size one there, so the axis is summed over, in a fixed order. Its tiles have SIZE queries and keys. SPAN: queries
    of a group of programs, a multiple of BLOCK_M and SIZE. Grid: (spans · all programs of one, heads and batch rows that are not summed
    over). stride_grad: `GradStrides`; the other tuples: tuples.py.
    """
    how: tl.constexpr = members(HOW)
    operands = MaskOperands(Rows=Rows, Keys=Keys, DocumentsQ=DocumentsQ, DocumentsK=DocumentsK, Mask=Mask)
    of = _Kept(Scores=Scores, pitch=pitch, operands=operands, masking=masking)
    count_h = sizes.heads_q if ONE_H else 1
    count = (batch_size if ONE_B else 1) * count_h
    head_0, batch_0 = tl.program_id(1), tl.program_id(2)
    of_dq, of_other, blocks_k = count * (SPAN // how.BLOCK_M), 0, tl.cdiv(sizes.seqlen_kv, SIZE)
    if Grad is not None:
        of_other = blocks_k * (SPAN // SIZE)
    elif Sums is not None:
        of_other = blocks_k + SPAN // SIZE - 1
    spans = tl.cdiv(sizes.seqlen_q, SPAN)
    # Under a causal mask the last queries have the most work, and begin.
    span, part = spans - 1 - tl.program_id(0) // (of_dq + of_other), tl.program_id(0) % (of_dq + of_other)
    if part < of_dq:
        block, member = span * (SPAN // how.BLOCK_M) + part // count, part % count
        if block * how.BLOCK_M < sizes.seqlen_q:
            head, batch = head_0 + member % count_h, batch_0 + member // count_h
            _grad_q(block, head, batch, K, GradQ, Tiles, stride_k, stride_dq, of, lists, sizes, how)
    elif Grad is not None:
        tile = part - of_dq
        _grad_bias(
            span * SPAN + tile % (SPAN // SIZE) * SIZE, tile // (SPAN // SIZE) * SIZE,
            head_0, batch_0, count_h, count, Grad, stride_grad, of, sizes, how, SIZE, SPARSE,
        )  # fmt: skip
    elif Sums is not None:
        diagonal = part - of_dq
        at = (head_0 * spans + span) * of_other + diagonal
        _sum_diagonal(
            span * (SPAN // SIZE), SPAN // SIZE, diagonal - span * (SPAN // SIZE) - (SPAN // SIZE - 1),
            head_0, count_h, count, Sums + at.to(tl.int64) * (2 * SIZE), of, sizes, how, SIZE, SPARSE,
        )  # fmt: skip
