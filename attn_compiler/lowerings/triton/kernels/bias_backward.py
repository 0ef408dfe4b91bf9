"""Gradients of tensors added to the scores: a bias that broadcasts, or one number for each distance of key and query.

Each program owns a tile of the result and adds up, in a fixed order, the scores' gradients of everything that broadcasts to it. It reads
them from the backward's copy (backward.py), or computes two products again for each tile of the scores. No atomics.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attn_compiler.lowerings.shared.kernels.optional import at_index, load_one, of_head
from attn_compiler.lowerings.shared.kernels.releases import members
from attn_compiler.lowerings.shared.kernels.row_stats import row_stats
from attn_compiler.lowerings.shared.kernels.sums_backward import store_diagonals
from attn_compiler.lowerings.shared.kernels.tile_parts import (
    allowed_at,
    at_head,
    change,
    kept,
    kept_scores,
    load_bias,
    load_by_distance,
    load_kept_scores,
    load_tile,
)
from attn_compiler.lowerings.shared.kernels.tuples import Added, MaskOperands, Pairs, Positions


class _Given(NamedTuple):
    """Operands of the scores' gradients, of all batch rows and heads."""

    Q: Any
    K: Any
    V: Any
    GradOut: Any
    RowStats: Any
    stats_rows: Any
    operands: Any  # MaskOperands
    Bias: Any
    Distances: Any
    Slopes: Any
    seed: Any  # of dropout
    Scores: Any  # where the scores' gradients were kept
    pitch: Any


class _Lying(NamedTuple):
    """Strides of the operands."""

    q: Any  # Strides
    k: Any
    v: Any
    grad_out: Any
    masking: Any  # MaskStrides
    adding: Any  # AddedStrides


@triton.jit
def _scores_gradient(
    start_q, start_k, batch, head, given, lying, sizes, how: tl.constexpr, SPARSE: tl.constexpr
):  # fmt: skip
    """Return the (M, N) gradient of the logits of one tile, 0 where a pair is not allowed. given: `_Given`; lying: `_Lying`.

    SPARSE: whole tiles may be without an allowed pair, and are left out. A branch in the loop costs its pipelining.
    """
    row = batch.to(tl.int64) * sizes.heads_q + head
    offsets = start_q + tl.arange(0, how.BLOCK_M)
    queries = offsets[:, None]
    keys = start_k + tl.arange(0, how.BLOCK_N)[None, :]
    allowed = allowed_at(
        start_q, start_k, batch, head, given.operands, lying.masking, sizes, how, how.BLOCK_M, how.BLOCK_N
    )
    if given.Scores is not None:
        scores = kept_scores(given.Scores, row, sizes.seqlen_kv, given.pitch)
        grad = load_kept_scores(scores, queries, keys, given.pitch, sizes.seqlen_q, sizes.seqlen_kv)
        grad = grad.to(tl.float32)
        if SPARSE:
            grad = tl.where(allowed, grad, 0.0)
    else:
        grad = tl.zeros([how.BLOCK_M, how.BLOCK_N], tl.float32)
        some = True
        if SPARSE:
            some = tl.max(tl.max(allowed.to(tl.int32), 1), 0) > 0
        if some:
            q_head = at_head(given.Q, batch, head, lying.q.b, lying.q.h, how.ALIGN)
            k_head = at_head(given.K, batch, head // sizes.group, lying.k.b, lying.k.h, how.ALIGN)
            v_head = at_head(given.V, batch, head // sizes.group, lying.v.b, lying.v.h, how.ALIGN)
            grad_head = at_head(given.GradOut, batch, head, lying.grad_out.b, lying.grad_out.h, how.ALIGN)
            of_q = Positions(base=q_head, stride=lying.q.s, length=sizes.seqlen_q)
            of_k = Positions(base=k_head, stride=lying.k.s, length=sizes.seqlen_kv)
            of_v = Positions(base=v_head, stride=lying.v.s, length=sizes.seqlen_kv)
            of_grad = Positions(base=grad_head, stride=lying.grad_out.s, length=sizes.seqlen_q)
            q = load_tile(of_q, start_q, None, how.BLOCK_M, 0, how.QK_0, how.HEAD_DIM_QK, True, how.ALIGN)
            k = load_tile(of_k, start_k, None, how.BLOCK_N, 0, how.QK_0, how.HEAD_DIM_QK, True, how.ALIGN)
            slope = load_one(given.Slopes, head)
            adding = lying.adding
            bias_head = of_head(given.Bias, batch, head, adding.bias_b, adding.bias_h)
            added = Added(
                bias=Pairs(base=bias_head, q=adding.bias_q, k=adding.bias_k),
                Distances=at_index(given.Distances, head, adding.distances_h),
                phase=adding.distances_phase,
                slope=slope,
            )
            bias = load_bias(added, queries, keys, sizes, True)
            distances = load_by_distance(added, queries, keys, sizes, True)
            qk = tl.dot(q, tl.trans(k), input_precision=how.PRECISION)
            if how.QK_1 > 0:
                q = load_tile(of_q, start_q, None, how.BLOCK_M, how.QK_0, how.QK_1, how.HEAD_DIM_QK, True, how.ALIGN)
                k = load_tile(of_k, start_k, None, how.BLOCK_N, how.QK_0, how.QK_1, how.HEAD_DIM_QK, True, how.ALIGN)
                qk = tl.dot(q, tl.trans(k), qk, input_precision=how.PRECISION)
            g = load_tile(of_grad, start_q, None, how.BLOCK_M, 0, how.V_0, how.HEAD_DIM_V, True, how.ALIGN)
            v = load_tile(of_v, start_k, None, how.BLOCK_N, 0, how.V_0, how.HEAD_DIM_V, True, how.ALIGN)
            grad_weights = tl.dot(g, tl.trans(v), input_precision=how.PRECISION)
            if how.V_1 > 0:
                g = load_tile(of_grad, start_q, None, how.BLOCK_M, how.V_0, how.V_1, how.HEAD_DIM_V, True, how.ALIGN)
                v = load_tile(of_v, start_k, None, how.BLOCK_N, how.V_0, how.V_1, how.HEAD_DIM_V, True, how.ALIGN)
                grad_weights = tl.dot(g, tl.trans(v), grad_weights, input_precision=how.PRECISION)
            base, delta = row_stats(given.RowStats + row * 2 * given.stats_rows, offsets, given.stats_rows)
            logits, _ = change(
                qk, queries, keys, bias, distances, slope, sizes.scale, sizes.changed_by,
                how.CHANGE, how.FAST_TANH, False, base[:, None],
            )  # fmt: skip
            weights = tl.exp2(logits)
            if how.DROPOUT:
                keep = kept(given.seed, row, queries, keys, sizes.dropout_p)
                grad_weights = tl.where(keep, grad_weights / (1.0 - sizes.dropout_p), 0.0)
            grad = tl.where(allowed, weights * (grad_weights - delta[:, None]), 0.0)
    return grad


@triton.jit
def attention_grad_bias(
    Q, K, V, GradOut, RowStats, Grad,
    Rows, Keys, DocumentsQ, DocumentsK, Mask, Bias, Distances, Slopes, Seed, Scores,
    pitch, stats_rows, stride_q, stride_k, stride_v, stride_g, stride_grad, masking, adding, batch_size, sizes,
    HOW: tl.constexpr, SPARSE: tl.constexpr,
    ONE_B: tl.constexpr, ONE_H: tl.constexpr, ONE_Q: tl.constexpr, ONE_K: tl.constexpr,
):  # fmt: skip
    """Grad: the bias' own shape, strides given, any float dtype. ONE_*: the bias has size one there, so that axis is summed over.
    stride_grad: `GradStrides`; the other tuples: tuples.py.

    Grid: (blocks of queries · blocks of keys, heads, batch rows) of the bias, one along each axis of size one.
    """
    how: tl.constexpr = members(HOW)
    given = _Given(
        Q=Q, K=K, V=V, GradOut=GradOut, RowStats=RowStats, stats_rows=stats_rows,
        operands=MaskOperands(Rows=Rows, Keys=Keys, DocumentsQ=DocumentsQ, DocumentsK=DocumentsK, Mask=Mask),
        Bias=Bias, Distances=Distances, Slopes=Slopes, seed=load_one(Seed, 0), Scores=Scores, pitch=pitch,
    )  # fmt: skip
    lying = _Lying(q=stride_q, k=stride_k, v=stride_v, grad_out=stride_g, masking=masking, adding=adding)
    blocks_k = tl.cdiv(sizes.seqlen_kv, how.BLOCK_N)
    tile, head_0, batch_0 = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if ONE_K:
        block_q, block_k = tile, tile * 0
    elif ONE_Q:
        block_q, block_k = tile * 0, tile
    else:
        block_q, block_k = tile // blocks_k, tile % blocks_k
    grad = tl.zeros([how.BLOCK_M, how.BLOCK_N], tl.float32)
    count_h = sizes.heads_q if ONE_H else 1
    count_m = tl.cdiv(sizes.seqlen_q, how.BLOCK_M) if ONE_Q else 1
    count_n = blocks_k if ONE_K else 1
    # One loop over all summed axes: only the innermost loop prefetches the next tile.
    for i in range((batch_size if ONE_B else 1) * count_h * count_m * count_n):
        n, rest = i % count_n, i // count_n
        m, rest = rest % count_m, rest // count_m
        start_q, start_k = (block_q + m) * how.BLOCK_M, (block_k + n) * how.BLOCK_N
        batch, head = batch_0 + rest // count_h, head_0 + rest % count_h
        grad += _scores_gradient(start_q, start_k, batch, head, given, lying, sizes, how, SPARSE)
    Grad += batch_0.to(tl.int64) * stride_grad.grad_b + head_0.to(tl.int64) * stride_grad.grad_h
    rows = block_q * how.BLOCK_M + tl.arange(0, how.BLOCK_M)
    cols = block_k * how.BLOCK_N + tl.arange(0, how.BLOCK_N)
    if ONE_Q and ONE_K:
        tl.store(Grad, tl.sum(tl.sum(grad, 1), 0).to(Grad.dtype.element_ty))
    elif ONE_Q:
        pointers = Grad + cols * stride_grad.grad_k
        tl.store(pointers, tl.sum(grad, 0).to(Grad.dtype.element_ty), mask=cols < sizes.seqlen_kv)
    elif ONE_K:
        pointers = Grad + rows * stride_grad.grad_q
        tl.store(pointers, tl.sum(grad, 1).to(Grad.dtype.element_ty), mask=rows < sizes.seqlen_q)
    else:
        pointers = Grad + rows[:, None].to(tl.int64) * stride_grad.grad_q + cols[None, :] * stride_grad.grad_k
        inside = (rows[:, None] < sizes.seqlen_q) & (cols[None, :] < sizes.seqlen_kv)
        tl.store(pointers, grad.to(Grad.dtype.element_ty), mask=inside)


@triton.jit
def attention_grad_distances(
    Q, K, V, GradOut, RowStats, Sums,
    Rows, Keys, DocumentsQ, DocumentsK, Mask, Bias, Distances, Slopes, Seed, Scores,
    pitch, stats_rows, stride_q, stride_k, stride_v, stride_g, masking, adding, batch_size, sizes,
    HOW: tl.constexpr, SPARSE: tl.constexpr, ONE_H: tl.constexpr,
):  # fmt: skip
    """Sum tiles along a diagonal: BLOCK_M = BLOCK_N, so that an element of a tile has one distance on all of them.

    Sums: float32 (Hq|1, 1, nQ + nK - 1, 2, M), contiguous, for the diagonals k block - q block = d - (nQ - 1), for
    `attention_sum_diagonals`. Grid: (nQ + nK - 1, heads, 1).
    """
    how: tl.constexpr = members(HOW)
    given = _Given(
        Q=Q, K=K, V=V, GradOut=GradOut, RowStats=RowStats, stats_rows=stats_rows,
        operands=MaskOperands(Rows=Rows, Keys=Keys, DocumentsQ=DocumentsQ, DocumentsK=DocumentsK, Mask=Mask),
        Bias=Bias, Distances=Distances, Slopes=Slopes, seed=load_one(Seed, 0), Scores=Scores, pitch=pitch,
    )  # fmt: skip
    lying = _Lying(q=stride_q, k=stride_k, v=stride_v, grad_out=stride_g, masking=masking, adding=adding)
    blocks_q = tl.cdiv(sizes.seqlen_q, how.BLOCK_M)
    blocks_k = tl.cdiv(sizes.seqlen_kv, how.BLOCK_N)
    diagonal, head_0, batch_0 = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    offset = diagonal - (blocks_q - 1)
    first = tl.maximum(0, -offset)
    last = tl.minimum(blocks_q, blocks_k - offset)
    grad = tl.zeros([how.BLOCK_M, how.BLOCK_N], tl.float32)
    count_h = sizes.heads_q if ONE_H else 1
    count_m = last - first
    for i in range(batch_size * count_h * count_m):
        m, rest = first + i % count_m, i // count_m
        start_q, start_k = m * how.BLOCK_M, (m + offset) * how.BLOCK_N
        batch, head = batch_0 + rest // count_h, head_0 + rest % count_h
        grad += _scores_gradient(start_q, start_k, batch, head, given, lying, sizes, how, SPARSE)
    at = head_0 * (blocks_q + blocks_k - 1) + diagonal
    store_diagonals(Sums + at.to(tl.int64) * (2 * how.BLOCK_M), grad, how.BLOCK_M)
