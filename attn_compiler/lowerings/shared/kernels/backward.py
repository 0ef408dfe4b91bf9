"""The gradient of q, and delta: a program computes a block of queries. kv_backward.py computes the gradients of k and v, bias_backward.py
those of biases.

Each gradient has one writer, so every run gives the same bits. That takes seven products, where one pass with atomic additions to dq
takes five.

Scores: where a bias is learned, the pass over the keys may store the scores' gradients, (B, Hq, Skv, pitch) in q's dtype. The other passes
read them (kept_backward.py). All passes take five products then, and as much memory as PyTorch's own kernels for such a bias.
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
    load_one,
    load_row,
    load_upper,
    of_head,
)
from attn_compiler.lowerings.shared.kernels.releases import members
from attn_compiler.lowerings.shared.kernels.row_stats import (
    delta_of,
    make_row_stats,
    minus_lse,
    products,
    store_row_stats,
)
from attn_compiler.lowerings.shared.kernels.tile_parts import (
    at_head,
    change,
    head_and_batch,
    is_allowed,
    kept,
    keys_in_use,
    load_bias,
    load_by_distance,
    load_tile,
    store_tile,
    through_change,
)
from attn_compiler.lowerings.shared.kernels.tile_visits import keys_to_visit, partial_tile
from attn_compiler.lowerings.shared.kernels.tuples import Added, KeyMasks, Pairs, Positions, QueryRows


@triton.jit
def attention_row_stats(
    Out, GradOut, Lse, GradLse, RowStats, stride_o, stride_g, heads_q, seqlen_q, stats_rows,
    BLOCK_M: tl.constexpr, HEAD_DIM_V: tl.constexpr, V_ALL: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Compute RowStats (B, Hq, 2, stats_rows) float32, as row_stats.py says. Grid: (stats_rows / BLOCK_M, Hq, B)."""
    start, head, batch = tl.program_id(0) * BLOCK_M, tl.program_id(1), tl.program_id(2)
    make_row_stats(
        Out, GradOut, Lse, GradLse, RowStats, stride_o, stride_g, start, head, batch, heads_q, seqlen_q, stats_rows,
        BLOCK_M, HEAD_DIM_V, V_ALL, ALIGN,
    )  # fmt: skip


class _Queries(NamedTuple):
    """A program's block of queries."""

    rows: Any  # QueryRows
    q_0: Any  # tiles of the first and the further head dims
    q_1: Any
    grad_out_0: Any
    grad_out_1: Any
    base: Any  # -lse in units of log 2, (M, 1)
    delta: Any  # (M, 1)
    seed: Any  # of dropout
    head: Any  # of all batch rows' heads


class _Head(NamedTuple):
    """The keys and values of a head, and their masks and biases."""

    k: Any  # Positions
    v: Any  # Positions
    masks: Any  # KeyMasks
    added: Any  # Added


@triton.jit
def _step_q(grad_0, grad_1, tile, own, of, sizes, how: tl.constexpr, MASKED: tl.constexpr):
    """Return the contribution of one block of keys to the gradient of a block of queries. own: `_Queries`; of: `_Head`."""
    start = tile * how.BLOCK_N
    keys = start + tl.arange(0, how.BLOCK_N)[None, :]
    queries, seqlen_kv = own.rows.queries, sizes.seqlen_kv
    keys_used, keys_allowed, document_k = None, None, None
    if MASKED:
        keys_allowed = load_keys(of.masks.Keys, keys, keys < seqlen_kv)
        document_k = load_row(of.masks.Documents, keys, keys < seqlen_kv)
        keys_used = keys_in_use(start, own.rows, of.masks, sizes, how)
    k_0 = load_tile(of.k, start, keys_used, how.BLOCK_N, 0, how.QK_0, how.HEAD_DIM_QK, MASKED, how.ALIGN)
    k_1 = k_0
    if how.QK_1 > 0:
        k_1 = load_tile(of.k, start, keys_used, how.BLOCK_N, how.QK_0, how.QK_1, how.HEAD_DIM_QK, MASKED, how.ALIGN)
    bias = load_bias(of.added, queries, keys, sizes, MASKED)
    distances = load_by_distance(of.added, queries, keys, sizes, MASKED)
    qk = tl.dot(own.q_0, tl.trans(k_0), input_precision=how.PRECISION)
    if how.QK_1 > 0:
        qk = tl.dot(own.q_1, tl.trans(k_1), qk, input_precision=how.PRECISION)
    v_0 = load_tile(of.v, start, None, how.BLOCK_N, 0, how.V_0, how.HEAD_DIM_V, MASKED, how.ALIGN)
    grad_weights = tl.dot(own.grad_out_0, tl.trans(v_0), input_precision=how.PRECISION)
    if how.V_1 > 0:
        v_1 = load_tile(of.v, start, None, how.BLOCK_N, how.V_0, how.V_1, how.HEAD_DIM_V, MASKED, how.ALIGN)
        grad_weights = tl.dot(own.grad_out_1, tl.trans(v_1), grad_weights, input_precision=how.PRECISION)
    logits, found = change(
        qk, queries, keys, bias, distances, of.added.slope, sizes.scale, sizes.changed_by,
        how.CHANGE, how.FAST_TANH, how.PLAIN, own.base,
    )  # fmt: skip
    weights = tl.exp2(logits)
    if how.DROPOUT:
        keep = kept(own.seed, own.head, queries, keys, sizes.dropout_p)
        grad_weights = tl.where(keep, grad_weights / (1.0 - sizes.dropout_p), 0.0)
    grad = weights * (grad_weights - own.delta)
    grad = through_change(grad, found, how.CHANGE)
    if MASKED:
        allowed = is_allowed(
            queries, keys, own.rows.lower, own.rows.upper, own.rows.document, document_k, keys_allowed, of.masks.mask,
            sizes, how,
        )  # fmt: skip
        grad = tl.where(allowed, grad, 0.0)
    grad = grad.to(k_0.dtype)
    grad_0 = tl.dot(grad, k_0, grad_0, input_precision=how.PRECISION)
    if how.QK_1 > 0:
        grad_1 = tl.dot(grad, k_1, grad_1, input_precision=how.PRECISION)
    return grad_0, grad_1


@triton.jit
def attention_grad_q(
    Q, K, V, GradOut, Out, Lse, GradLse, RowStats, GradQ,
    Rows, Keys, DocumentsQ, DocumentsK, Mask, Tiles, Bias, Distances, Slopes, Seed,
    stride_q, stride_k, stride_v, stride_g, stride_dq, stride_o, stats_rows, masking, lists, adding, sizes,
    HOW: tl.constexpr, HEADS_LAST: tl.constexpr, ROUND: tl.constexpr, TOGETHER: tl.constexpr,
    Wanted=None,
):  # fmt: skip
    """Compute the gradient of q. Grid: (blocks of queries, Hq, B), or as HEADS_LAST says. Lse, GradLse: (B, Hq, Sq), contiguous, float32.
    Tuples: tuples.py. TOGETHER: blocks of queries that share one list of tiles.

    Writes RowStats as `attention_row_stats` does, for the later pass over the keys. ROUND: stats_rows is the next
    multiple. Wanted: int32, nothing is done where it is 0; None: always wanted.
    """
    if Wanted is not None:
        if tl.load(Wanted) == 0:
            return
    how: tl.constexpr = members(HOW)
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head, batch = head_and_batch(HEADS_LAST)
    row = batch.to(tl.int64) * sizes.heads_q + head
    start = block * how.BLOCK_M
    offsets = start + tl.arange(0, how.BLOCK_M)
    inside = offsets < sizes.seqlen_q

    Q = at_head(Q, batch, head, stride_q.b, stride_q.h, how.ALIGN)
    K = at_head(K, batch, head // sizes.group, stride_k.b, stride_k.h, how.ALIGN)
    V = at_head(V, batch, head // sizes.group, stride_v.b, stride_v.h, how.ALIGN)
    GradOut = at_head(GradOut, batch, head, stride_g.b, stride_g.h, how.ALIGN)
    GradQ += batch.to(tl.int64) * stride_dq.b + head.to(tl.int64) * stride_dq.h
    q = Positions(base=Q, stride=stride_q.s, length=sizes.seqlen_q)
    k = Positions(base=K, stride=stride_k.s, length=sizes.seqlen_kv)
    v = Positions(base=V, stride=stride_v.s, length=sizes.seqlen_kv)
    grad_out = Positions(base=GradOut, stride=stride_g.s, length=sizes.seqlen_q)
    grad_q = Positions(base=GradQ, stride=stride_dq.s, length=sizes.seqlen_q)
    Rows = at_index(Rows, batch, masking.rows_b)
    rows = QueryRows(
        start=start,
        queries=offsets[:, None],
        lower=load_column(Rows, offsets, inside),
        upper=load_upper(Rows, masking.rows_side, offsets, inside),
        document=load_column(at_index(DocumentsQ, batch, masking.documents_qb), offsets, inside),
    )
    mask = Pairs(base=of_head(Mask, batch, head, masking.mask_b, masking.mask_h), q=masking.mask_q, k=masking.mask_k)
    masks = KeyMasks(
        Keys=at_index(Keys, batch, masking.keys_b),
        Documents=at_index(DocumentsK, batch, masking.documents_kb),
        mask=mask,
    )
    bias = Pairs(base=of_head(Bias, batch, head, adding.bias_b, adding.bias_h), q=adding.bias_q, k=adding.bias_k)
    Distances = at_index(Distances, head, adding.distances_h)
    added = Added(bias=bias, Distances=Distances, phase=adding.distances_phase, slope=load_one(Slopes, head))
    of = _Head(k=k, v=v, masks=masks, added=added)
    seed = load_one(Seed, 0)
    List = list_of(Tiles, batch, head, block // TOGETHER, lists)
    partial, first, second, full_first, full_last = keys_to_visit(List, start, sizes, how)

    grad_out_0 = load_tile(grad_out, start, None, how.BLOCK_M, 0, how.V_0, how.HEAD_DIM_V, True, how.ALIGN)
    grad_out_1 = grad_out_0
    if how.V_1 > 0:
        grad_out_1 = load_tile(grad_out, start, None, how.BLOCK_M, how.V_0, how.V_1, how.HEAD_DIM_V, True, how.ALIGN)
    Out = at_head(Out, batch, head, stride_o.b, stride_o.h, how.ALIGN)
    out = Positions(base=Out, stride=stride_o.s, length=sizes.seqlen_q)
    out_0 = load_tile(out, start, None, how.BLOCK_M, 0, how.V_0, how.HEAD_DIM_V, True, how.ALIGN)
    delta = products(out_0, grad_out_0)
    if how.V_1 > 0:
        out_1 = load_tile(out, start, None, how.BLOCK_M, how.V_0, how.V_1, how.HEAD_DIM_V, True, how.ALIGN)
        delta += products(out_1, grad_out_1)
    delta -= tl.load(GradLse + row * sizes.seqlen_q + offsets, mask=inside, other=0.0)
    base = minus_lse(Lse + row * sizes.seqlen_q, offsets, sizes.seqlen_q)
    delta = delta_of(delta, base)
    stats = RowStats + row * 2 * stats_rows
    store_row_stats(stats, offsets, stats_rows, base, delta)
    if ROUND > how.BLOCK_M:
        if block == tl.num_programs(0) - 1:
            beyond = start + how.BLOCK_M + tl.arange(0, ROUND)
            nothing = tl.zeros([ROUND], tl.float32)
            store_row_stats(stats, beyond, stats_rows, nothing + float("-inf"), nothing)
    q_0 = load_tile(q, start, None, how.BLOCK_M, 0, how.QK_0, how.HEAD_DIM_QK, True, how.ALIGN)
    q_1 = q_0
    if how.QK_1 > 0:
        q_1 = load_tile(q, start, None, how.BLOCK_M, how.QK_0, how.QK_1, how.HEAD_DIM_QK, True, how.ALIGN)
    own = _Queries(
        rows=rows,
        q_0=q_0,
        q_1=q_1,
        grad_out_0=grad_out_0,
        grad_out_1=grad_out_1,
        base=base[:, None],
        delta=delta[:, None],
        seed=seed,
        head=row,
    )
    grad_0 = tl.zeros([how.BLOCK_M, how.QK_0], tl.float32)
    grad_1 = tl.zeros([how.BLOCK_M, how.QK_1 if how.QK_1 > 0 else 16], tl.float32)
    for i in tl.range(0, partial):
        tile = partial_tile(List, i, first, second, full_first, full_last)
        grad_0, grad_1 = _step_q(grad_0, grad_1, tile, own, of, sizes, how, True)
    for tile in tl.range(full_first, full_last):
        grad_0, grad_1 = _step_q(grad_0, grad_1, tile, own, of, sizes, how, False)
    store_tile(grad_q, start, grad_0 * sizes.scale, how.BLOCK_M, 0, how.QK_0, how.HEAD_DIM_QK)
    if how.QK_1 > 0:
        store_tile(grad_q, start, grad_1 * sizes.scale, how.BLOCK_M, how.QK_0, how.QK_1, how.HEAD_DIM_QK)
