"""The gradients of k and v: one program a block of keys, which sums over the blocks of queries and the query heads of a group.

The scores are held transposed, (keys, queries), so that they are the left operand of both products. See backward.py. With biases, or
stored scores, keys and queries are taken in the order of fragments.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
from attn_compiler.lowerings.shared.kernels.optional import at_index, list_of, load_keys, load_one, load_row, of_head
from attn_compiler.lowerings.shared.kernels.releases import members
from attn_compiler.lowerings.shared.kernels.row_stats import row_stats
from attn_compiler.lowerings.shared.kernels.tile_parts import (
    at_head,
    change,
    head_and_batch,
    is_allowed,
    kept,
    kept_scores,
    load_tile,
    queries_in_use,
    store_tile,
    through_change,
)
from attn_compiler.lowerings.shared.kernels.tile_visits import partial_tile, queries_to_visit
from attn_compiler.lowerings.shared.kernels.tuples import Added, Pairs, Positions


class _Keys(NamedTuple):
    """A program's block of keys."""

    start: Any  # the first key
    first: Any  # the first and the last key of the block that may be used at all
    last: Any
    keys: Any  # (N, 1), as the next two
    allowed: Any
    document: Any
    k_0: Any  # tiles of the first and the further head dims
    k_1: Any
    v_0: Any
    v_1: Any


class _Head(NamedTuple):
    """The queries of a head, and their masks and biases."""

    q: Any  # Positions
    grad_out: Any  # Positions
    RowStats: Any
    stats_rows: Any
    Rows: Any
    rows_side: Any  # MaskStrides.rows_side
    Documents: Any
    mask: Any  # Pairs
    added: Any  # Added
    Scores: Any  # memory for the scores' gradients
    pitch: Any
    seed: Any  # of dropout
    head: Any  # of all batch rows' heads


@triton.jit
def _step_kv(
    grad_k_0, grad_k_1, grad_v_0, grad_v_1, tile, own, of, sizes, how: tl.constexpr,
    MASKED: tl.constexpr, FOR_K: tl.constexpr, FOR_V: tl.constexpr, IN_FRAGMENTS: tl.constexpr,
):  # fmt: skip
    """Return what a block of queries adds to the gradients of a block of keys. Scores are transposed: (N, M). own: `_Keys`; of: `_Head`."""
    start = tile * how.BLOCK_M
    order = None
    offsets = start + tl.arange(0, how.BLOCK_M)
    natural = offsets
    if IN_FRAGMENTS:
        order = query_order(how.BLOCK_M)
        offsets = start + order
    queries, keys = offsets[None, :], own.keys
    lower, upper, document_q, queries_used = None, None, None, None
    if MASKED:
        inside = offsets < sizes.seqlen_q
        if of.Rows is not None:
            lower = tl.load(of.Rows + offsets, mask=inside, other=0)[None, :]
            upper = tl.load(of.Rows + of.rows_side + offsets, mask=inside, other=0)[None, :]
        if of.Documents is not None:
            document_q = tl.load(of.Documents + offsets, mask=inside, other=0)[None, :]
        queries_used = queries_in_use(
            offsets, keys, own.first, own.last, lower, upper, document_q, own.document, own.allowed, of.mask, sizes, how
        )
    bias, distances = None, None
    if of.added.bias.base is not None:
        bias = load_fragments(of.added.bias, start, own.start, sizes, how.BLOCK_N, how.BLOCK_M)
    if of.added.Distances is not None:
        distances = load_distance_fragments(of.added, start, own.start, sizes, how.BLOCK_N, how.BLOCK_M)
    q_0 = load_tile(of.q, start, queries_used, how.BLOCK_M, 0, how.QK_0, how.HEAD_DIM_QK, True, how.ALIGN, order)
    q_1 = q_0
    qk = tl.dot(own.k_0, tl.trans(q_0), input_precision=how.PRECISION)
    if how.QK_1 > 0:
        q_1 = load_tile(
            of.q, start, queries_used, how.BLOCK_M, how.QK_0, how.QK_1, how.HEAD_DIM_QK, True, how.ALIGN, order
        )
        qk = tl.dot(own.k_1, tl.trans(q_1), qk, input_precision=how.PRECISION)
    base, delta = row_stats(of.RowStats, natural, of.stats_rows)
    if IN_FRAGMENTS:
        base, delta = in_query_order(base, how.BLOCK_M), in_query_order(delta, how.BLOCK_M)
    logits, found = change(
        qk, queries, keys, bias, distances, of.added.slope, sizes.scale, sizes.changed_by,
        how.CHANGE, how.FAST_TANH, how.PLAIN, base[None, :],
    )  # fmt: skip
    weights = tl.exp2(logits)
    if MASKED:
        allowed = is_allowed(
            queries, keys, lower, upper, document_q, own.document, own.allowed,
            Pairs(base=None, q=0, k=0) if IN_FRAGMENTS else of.mask, sizes, how,
        )  # fmt: skip
        if IN_FRAGMENTS and of.mask.base is not None:
            mask = load_fragments(of.mask, start, own.start, sizes, how.BLOCK_N, how.BLOCK_M)
            allowed = allowed & (mask != 0)
        weights = tl.where(allowed, weights, 0.0)
    grad_out_0 = load_tile(
        of.grad_out, start, queries_used, how.BLOCK_M, 0, how.V_0, how.HEAD_DIM_V, True, how.ALIGN, order
    )
    grad_out_1 = grad_out_0
    if how.V_1 > 0:
        grad_out_1 = load_tile(
            of.grad_out, start, queries_used, how.BLOCK_M, how.V_0, how.V_1, how.HEAD_DIM_V, True, how.ALIGN, order
        )
    used = weights
    if how.DROPOUT:
        keep = kept(of.seed, of.head, queries, keys, sizes.dropout_p)
        used = tl.where(keep, weights / (1.0 - sizes.dropout_p), 0.0)
    if FOR_V:
        used = used.to(grad_out_0.dtype)
        grad_v_0 = tl.dot(used, grad_out_0, grad_v_0, input_precision=how.PRECISION)
        if how.V_1 > 0:
            grad_v_1 = tl.dot(used, grad_out_1, grad_v_1, input_precision=how.PRECISION)
    if FOR_K:
        grad_weights = tl.dot(own.v_0, tl.trans(grad_out_0), input_precision=how.PRECISION)
        if how.V_1 > 0:
            grad_weights = tl.dot(own.v_1, tl.trans(grad_out_1), grad_weights, input_precision=how.PRECISION)
        if how.DROPOUT:
            grad_weights = tl.where(keep, grad_weights / (1.0 - sizes.dropout_p), 0.0)
        grad = weights * (grad_weights - delta[None, :])
        tl.static_assert(of.Scores is None or how.CHANGE == "unchanged", "what is kept are gradients of changed scores")
        grad = through_change(grad, found, how.CHANGE)
        if MASKED:
            grad = tl.where(allowed, grad, 0.0)
        if of.Scores is not None:
            store_fragments(of.Scores, grad, start, own.start, of.pitch, sizes, how.BLOCK_N, how.BLOCK_M)
        grad = grad.to(q_0.dtype)
        grad_k_0 = tl.dot(grad, q_0, grad_k_0, input_precision=how.PRECISION)
        if how.QK_1 > 0:
            grad_k_1 = tl.dot(grad, q_1, grad_k_1, input_precision=how.PRECISION)
    return grad_k_0, grad_k_1, grad_v_0, grad_v_1


@triton.jit
def attention_grad_kv(
    Q, K, V, GradOut, RowStats, GradK, GradV,
    Rows, Keys, DocumentsQ, DocumentsK, Mask, Tiles, Bias, Distances, Slopes, Seed, Scores,
    stride_q, stride_k, stride_v, stride_g, stride_dk, stride_dv, pitch, stats_rows, masking, lists, adding, sizes,
    HOW: tl.constexpr, HEADS_LAST: tl.constexpr, FOR_K: tl.constexpr, FOR_V: tl.constexpr,
    Wanted=None,
):  # fmt: skip
    """Compute the gradients of k and v, summed over the query heads of the group, in their order. Grid: (blocks of keys, Hkv, B), or as
    HEADS_LAST says. Tuples: tuples.py.

    FOR_K, FOR_V: which gradients to compute. Wide heads leave no room for both sums beside the tiles. Wanted: int32, nothing is done where
        it is 0; None: always wanted.
    """
    if Wanted is not None:
        if tl.load(Wanted) == 0:
            return
    how: tl.constexpr = members(HOW)
    block = tl.program_id(0)
    head_kv, batch = head_and_batch(HEADS_LAST)
    start = block * how.BLOCK_N
    IN_FRAGMENTS: tl.constexpr = Bias is not None or Distances is not None or Scores is not None
    order = None
    offsets = start + tl.arange(0, how.BLOCK_N)
    if IN_FRAGMENTS:
        order = key_order(how.BLOCK_N)
        offsets = start + order
    keys = offsets[:, None]
    inside = keys < sizes.seqlen_kv
    first_key, last_key = start, tl.minimum(start + how.BLOCK_N, sizes.seqlen_kv) - 1

    K = at_head(K, batch, head_kv, stride_k.b, stride_k.h, how.ALIGN)
    V = at_head(V, batch, head_kv, stride_v.b, stride_v.h, how.ALIGN)
    GradK += batch.to(tl.int64) * stride_dk.b + head_kv.to(tl.int64) * stride_dk.h
    GradV += batch.to(tl.int64) * stride_dv.b + head_kv.to(tl.int64) * stride_dv.h
    k = Positions(base=K, stride=stride_k.s, length=sizes.seqlen_kv)
    v = Positions(base=V, stride=stride_v.s, length=sizes.seqlen_kv)
    grad_k = Positions(base=GradK, stride=stride_dk.s, length=sizes.seqlen_kv)
    grad_v = Positions(base=GradV, stride=stride_dv.s, length=sizes.seqlen_kv)
    Rows = at_index(Rows, batch, masking.rows_b)
    keys_allowed = load_keys(at_index(Keys, batch, masking.keys_b), keys, inside)
    if keys_allowed is not None:
        first_key = tl.min(tl.where(keys_allowed, keys, sizes.seqlen_kv))
        last_key = tl.max(tl.where(keys_allowed, keys, -1))
    document_k = load_row(at_index(DocumentsK, batch, masking.documents_kb), keys, inside)
    DocumentsQ = at_index(DocumentsQ, batch, masking.documents_qb)
    seed = load_one(Seed, 0)

    k_0 = load_tile(k, start, keys_allowed, how.BLOCK_N, 0, how.QK_0, how.HEAD_DIM_QK, True, how.ALIGN, order)
    v_0 = load_tile(v, start, keys_allowed, how.BLOCK_N, 0, how.V_0, how.HEAD_DIM_V, True, how.ALIGN, order)
    k_1, v_1 = k_0, v_0
    if how.QK_1 > 0:
        k_1 = load_tile(
            k, start, keys_allowed, how.BLOCK_N, how.QK_0, how.QK_1, how.HEAD_DIM_QK, True, how.ALIGN, order
        )
    if how.V_1 > 0:
        v_1 = load_tile(v, start, keys_allowed, how.BLOCK_N, how.V_0, how.V_1, how.HEAD_DIM_V, True, how.ALIGN, order)
    own = _Keys(
        start=start,
        first=first_key,
        last=last_key,
        keys=keys,
        allowed=keys_allowed,
        document=document_k,
        k_0=k_0,
        k_1=k_1,
        v_0=v_0,
        v_1=v_1,
    )
    grad_k_0 = tl.zeros([how.BLOCK_N, how.QK_0], tl.float32)
    grad_k_1 = tl.zeros([how.BLOCK_N, how.QK_1 if how.QK_1 > 0 else 16], tl.float32)
    grad_v_0 = tl.zeros([how.BLOCK_N, how.V_0], tl.float32)
    grad_v_1 = tl.zeros([how.BLOCK_N, how.V_1 if how.V_1 > 0 else 16], tl.float32)
    for member in range(sizes.group):
        head = head_kv * sizes.group + member
        row = batch.to(tl.int64) * sizes.heads_q + head
        stats_head = RowStats + row * 2 * stats_rows
        q_head = at_head(Q, batch, head, stride_q.b, stride_q.h, how.ALIGN)
        grad_head = at_head(GradOut, batch, head, stride_g.b, stride_g.h, how.ALIGN)
        mask_head = of_head(Mask, batch, head, masking.mask_b, masking.mask_h)
        bias_head = of_head(Bias, batch, head, adding.bias_b, adding.bias_h)
        distances_head = at_index(Distances, head, adding.distances_h)
        scores_head = None
        if Scores is not None:
            scores_head = kept_scores(Scores, row, sizes.seqlen_kv, pitch)
        added = Added(
            bias=Pairs(base=bias_head, q=adding.bias_q, k=adding.bias_k),
            Distances=distances_head,
            phase=adding.distances_phase,
            slope=load_one(Slopes, head),
        )
        of = _Head(
            q=Positions(base=q_head, stride=stride_q.s, length=sizes.seqlen_q),
            grad_out=Positions(base=grad_head, stride=stride_g.s, length=sizes.seqlen_q),
            RowStats=stats_head,
            stats_rows=stats_rows,
            Rows=Rows,
            rows_side=masking.rows_side,
            Documents=DocumentsQ,
            mask=Pairs(base=mask_head, q=masking.mask_q, k=masking.mask_k),
            added=added,
            Scores=scores_head,
            pitch=pitch,
            seed=seed,
            head=row,
        )
        List = list_of(Tiles, batch, head, block, lists)
        partial, first, second, full_first, full_last = queries_to_visit(List, start, sizes, how)
        for i in tl.range(0, partial):
            tile = partial_tile(List, i, first, second, full_first, full_last)
            grad_k_0, grad_k_1, grad_v_0, grad_v_1 = _step_kv(
                grad_k_0, grad_k_1, grad_v_0, grad_v_1, tile, own, of, sizes, how, True, FOR_K, FOR_V, IN_FRAGMENTS
            )
        for tile in tl.range(full_first, full_last):
            grad_k_0, grad_k_1, grad_v_0, grad_v_1 = _step_kv(
                grad_k_0, grad_k_1, grad_v_0, grad_v_1, tile, own, of, sizes, how, False, FOR_K, FOR_V, IN_FRAGMENTS
            )
    if FOR_K:
        store_tile(grad_k, start, grad_k_0 * sizes.scale, how.BLOCK_N, 0, how.QK_0, how.HEAD_DIM_QK, order)
        if how.QK_1 > 0:
            store_tile(grad_k, start, grad_k_1 * sizes.scale, how.BLOCK_N, how.QK_0, how.QK_1, how.HEAD_DIM_QK, order)
    if FOR_V:
        store_tile(grad_v, start, grad_v_0, how.BLOCK_N, 0, how.V_0, how.HEAD_DIM_V, order)
        if how.V_1 > 0:
            store_tile(grad_v, start, grad_v_1, how.BLOCK_N, how.V_0, how.V_1, how.HEAD_DIM_V, order)
