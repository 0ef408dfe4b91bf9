"""Attention forward, FlashAttention-2 style (https://arxiv.org/abs/2307.08691): one program a block of queries and a head.

Blocks of keys that are only partly allowed come first, with the mask evaluated; then those that are allowed in full, without.
Nothing else is visited. A head dim that is no power of two is two tiles (80 = 64 + 16), so no work is wasted on padding.
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
from attn_compiler.lowerings.shared.kernels.tile_parts import (
    LN2,
    LOG2E,
    LOW,
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
)
from attn_compiler.lowerings.shared.kernels.tile_visits import keys_to_visit, partial_tile
from attn_compiler.lowerings.shared.kernels.tuples import Added, KeyMasks, Pairs, Positions, QueryRows


class _Queries(NamedTuple):
    """A program's block of queries."""

    rows: Any  # QueryRows
    q_0: Any  # tiles of the first and the further head dims
    q_1: Any
    seed: Any  # of dropout
    head: Any  # of all batch rows' heads


class _Head(NamedTuple):
    """The keys and values of a head, and their masks and biases."""

    k: Any  # Positions
    v: Any  # Positions
    masks: Any  # KeyMasks
    added: Any  # Added


@triton.jit
def _step(total, peak, out_0, out_1, tile, own, of, sizes, how: tl.constexpr, MASKED: tl.constexpr):
    """One block of keys of the online softmax. total, peak: (M,) of a row so far; out_0, out_1: (M, V_0), (M, V_1). own: `_Queries`;
    of: `_Head`. Beside a bias logits have the model's units, so its lowest numbers stay finite; otherwise units of log 2 or of the
    scale."""
    start = tile * how.BLOCK_N
    keys = start + tl.arange(0, how.BLOCK_N)[None, :]
    queries, seqlen_kv = own.rows.queries, sizes.seqlen_kv
    values_used, keys_allowed, document_k = None, None, None
    if MASKED:
        keys_allowed = load_keys(of.masks.Keys, keys, keys < seqlen_kv)
        document_k = load_row(of.masks.Documents, keys, keys < seqlen_kv)
        if how.ONE_KV:
            values_used = keys_in_use(start, own.rows, of.masks, sizes, how)
    bias = load_bias(of.added, queries, keys, sizes, MASKED)
    distances = load_by_distance(of.added, queries, keys, sizes, MASKED)
    k_0 = load_tile(of.k, start, values_used, how.BLOCK_N, 0, how.QK_0, how.HEAD_DIM_QK, MASKED, how.ALIGN)
    k_1 = k_0
    qk = tl.dot(own.q_0, tl.trans(k_0), input_precision=how.PRECISION)
    if how.QK_1 > 0:
        k_1 = load_tile(of.k, start, values_used, how.BLOCK_N, how.QK_0, how.QK_1, how.HEAD_DIM_QK, MASKED, how.ALIGN)
        qk = tl.dot(own.q_1, tl.trans(k_1), qk, input_precision=how.PRECISION)
    UNIT: tl.constexpr = LOG2E if bias is None else 1.0
    logits, _ = change(
        qk, queries, keys, bias, distances, of.added.slope, sizes.scale, sizes.changed_by,
        how.CHANGE, how.FAST_TANH, how.PLAIN, None, UNIT,
    )  # fmt: skip
    if MASKED:
        allowed = is_allowed(
            queries, keys, own.rows.lower, own.rows.upper, own.rows.document, document_k, keys_allowed, of.masks.mask,
            sizes, how,
        )  # fmt: skip
        logits = tl.where(allowed, logits, float("-inf"))
        if not how.ONE_KV:
            values_used = keys_in_use(start, own.rows, of.masks, sizes, how)
    new_peak = tl.maximum(peak, tl.max(logits, 1))
    shift = new_peak
    if MASKED or bias is not None:
        # Nothing allowed so far: exp2(-inf - 0) is 0, where -inf - -inf would be NaN.
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    if how.PLAIN:
        weights = tl.exp2(logits * (sizes.scale * LOG2E) - (shift * (sizes.scale * LOG2E))[:, None])
        decay = tl.exp2((peak - shift) * (sizes.scale * LOG2E))
    elif bias is not None:
        weights = tl.exp2((logits - shift[:, None]) * LOG2E)
        decay = tl.exp2((peak - shift) * LOG2E)
    else:
        weights = tl.exp2(logits - shift[:, None])
        decay = tl.exp2(peak - shift)
    total = total * decay + tl.sum(weights, 1)
    if how.DROPOUT:
        keep = kept(own.seed, own.head, queries, keys, sizes.dropout_p)
        weights = tl.where(keep, weights / (1.0 - sizes.dropout_p), 0.0)
    out_0 = out_0 * decay[:, None]
    v_0 = k_0
    if not how.ONE_KV:
        v_0 = load_tile(of.v, start, values_used, how.BLOCK_N, 0, how.V_0, how.HEAD_DIM_V, MASKED, how.ALIGN)
    weights = weights.to(v_0.dtype)
    out_0 = tl.dot(weights, v_0, out_0, input_precision=how.PRECISION)
    if how.V_1 > 0:
        out_1 = out_1 * decay[:, None]
        v_1 = k_1
        if not how.ONE_KV:
            v_1 = load_tile(of.v, start, values_used, how.BLOCK_N, how.V_0, how.V_1, how.HEAD_DIM_V, MASKED, how.ALIGN)
        out_1 = tl.dot(weights, v_1, out_1, input_precision=how.PRECISION)
    return total, new_peak, out_0, out_1


@triton.jit
def _block(
    block, head, batch, Q, K, V, Out, Lse, Rows, Keys, DocumentsQ, DocumentsK, Mask, Tiles, Bias, Distances, Slopes, Sinks, Seed,
    stride_q, stride_k, stride_v, stride_o, masking, lists, adding, sizes, how: tl.constexpr,
):  # fmt: skip
    """Compute one block of queries of a head, from its loads to its stores. Operands as those of `attention_forward`."""
    row = batch.to(tl.int64) * sizes.heads_q + head
    start = block * how.BLOCK_M
    offsets = start + tl.arange(0, how.BLOCK_M)
    inside = offsets < sizes.seqlen_q

    Q = at_head(Q, batch, head, stride_q.b, stride_q.h, how.ALIGN)
    K = at_head(K, batch, head // sizes.group, stride_k.b, stride_k.h, how.ALIGN)
    V = at_head(V, batch, head // sizes.group, stride_v.b, stride_v.h, how.ALIGN)
    Out += batch.to(tl.int64) * stride_o.b + head.to(tl.int64) * stride_o.h
    q = Positions(base=Q, stride=stride_q.s, length=sizes.seqlen_q)
    k = Positions(base=K, stride=stride_k.s, length=sizes.seqlen_kv)
    v = Positions(base=V, stride=stride_v.s, length=sizes.seqlen_kv)
    out = Positions(base=Out, stride=stride_o.s, length=sizes.seqlen_q)
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
    List = list_of(Tiles, batch, head, block, lists)
    partial, first, second, full_first, full_last = keys_to_visit(List, start, sizes, how)

    q_0 = load_tile(q, start, None, how.BLOCK_M, 0, how.QK_0, how.HEAD_DIM_QK, True, how.ALIGN)
    q_1 = q_0
    if how.QK_1 > 0:
        q_1 = load_tile(q, start, None, how.BLOCK_M, how.QK_0, how.QK_1, how.HEAD_DIM_QK, True, how.ALIGN)
    own = _Queries(rows=rows, q_0=q_0, q_1=q_1, seed=seed, head=row)
    total = tl.zeros([how.BLOCK_M], tl.float32)
    peak = tl.full([how.BLOCK_M], float("-inf"), tl.float32)
    out_0 = tl.zeros([how.BLOCK_M, how.V_0], tl.float32)
    out_1 = tl.zeros([how.BLOCK_M, how.V_1 if how.V_1 > 0 else 16], tl.float32)
    for i in tl.range(0, partial):
        tile = partial_tile(List, i, first, second, full_first, full_last)
        total, peak, out_0, out_1 = _step(total, peak, out_0, out_1, tile, own, of, sizes, how, True)
    for tile in tl.range(full_first, full_last):
        total, peak, out_0, out_1 = _step(total, peak, out_0, out_1, tile, own, of, sizes, how, False)

    # Factor from the unit of the logits to units of log 2.
    TO_LOG2: tl.constexpr = 1.0 if Bias is None else LOG2E
    if how.PLAIN:
        peak = peak * (sizes.scale * LOG2E)
    if Sinks is not None:
        sink = tl.load(Sinks + head).to(tl.float32) * (LOG2E / TO_LOG2)
        with_sink = tl.maximum(peak, sink)
        # A sink of -inf beside no key at all: -inf - -inf would be NaN.
        shift = tl.where(with_sink == float("-inf"), 0.0, with_sink)
        decay = tl.exp2((peak - shift) * TO_LOG2)
        total = total * decay + tl.exp2((sink - shift) * TO_LOG2)
        out_0, out_1 = out_0 * decay[:, None], out_1 * decay[:, None]
        peak = with_sink
    empty = total == 0.0
    divisor = tl.where(empty, 1.0, total)
    lse = tl.where(empty, float("-inf"), peak * (LN2 * TO_LOG2) + tl.log(divisor))
    if how.MARKS_LOW:
        lse = tl.where((total == sizes.seqlen_kv) & (peak < LOW), float("inf"), lse)
    tl.store(Lse + row * sizes.seqlen_q + offsets, lse, mask=inside)
    store_tile(out, start, out_0 / divisor[:, None], how.BLOCK_M, 0, how.V_0, how.HEAD_DIM_V)
    if how.V_1 > 0:
        store_tile(out, start, out_1 / divisor[:, None], how.BLOCK_M, how.V_0, how.V_1, how.HEAD_DIM_V)


@triton.jit
def attention_forward(
    Q, K, V, Out, Lse, Rows, Keys, DocumentsQ, DocumentsK, Mask, Tiles, Bias, Distances, Slopes, Sinks, Seed,
    stride_q, stride_k, stride_v, stride_o, masking, lists, adding, sizes, HOW: tl.constexpr, HEADS_LAST: tl.constexpr,
):  # fmt: skip
    """Compute out and lse. Grid: (blocks of queries, Hq, B), or as HEADS_LAST says. Operands: kernel_plan.Plan; tuples: tuples.py,
    stride_*: `Strides`.

    Lse: (B, Hq, Sq), contiguous, float32, natural logarithm. A row without any allowed key gets 0 and -inf. MARKS_LOW: one whose keys
    all got the same low number gets the mean of v, and inf.
    """
    how: tl.constexpr = members(HOW)
    # Later blocks have more keys under a causal mask: they start first, so that the last programs to run are short.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head, batch = head_and_batch(HEADS_LAST)
    _block(
        block, head, batch, Q, K, V, Out, Lse, Rows, Keys, DocumentsQ, DocumentsK, Mask, Tiles, Bias, Distances, Slopes, Sinks, Seed,
        stride_q, stride_k, stride_v, stride_o, masking, lists, adding, sizes, how,
    )  # fmt: skip


@triton.jit
def _any_marked(of_head, first, seqlen_q, LENGTH: tl.constexpr):
    """Return whether any lse of LENGTH rows is NaN."""
    offsets = first + tl.arange(0, LENGTH)
    lse = tl.load(of_head + offsets, mask=offsets < seqlen_q, other=0.0)
    return tl.max((lse != lse).to(tl.int32), 0) > 0


@triton.jit
def attention_again(
    Q, K, V, Out, Lse, Rows, Keys, DocumentsQ, DocumentsK, Mask, Tiles, Bias, Distances, Slopes, Sinks, Seed,
    stride_q, stride_k, stride_v, stride_o, masking, lists, adding, sizes, HOW: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Recompute the blocks of queries that have an lse of NaN, as `attention_forward` does. Grid: (parts of TOGETHER blocks · B · Hq,)."""
    how: tl.constexpr = members(HOW)
    LENGTH: tl.constexpr = TOGETHER * how.BLOCK_M
    parts = tl.cdiv(sizes.seqlen_q, LENGTH)
    part, row = tl.program_id(0) % parts, tl.program_id(0) // parts
    of_head = Lse + row.to(tl.int64) * sizes.seqlen_q
    # NaN is rare, so all blocks are checked at once before each by itself.
    if _any_marked(of_head, part * LENGTH, sizes.seqlen_q, LENGTH):
        for block in range(part * TOGETHER, part * TOGETHER + TOGETHER):
            if _any_marked(of_head, block * how.BLOCK_M, sizes.seqlen_q, how.BLOCK_M):
                _block(
                    block, row % sizes.heads_q, row // sizes.heads_q, Q, K, V, Out, Lse, Rows, Keys, DocumentsQ, DocumentsK, Mask,
                    Tiles, Bias, Distances, Slopes, Sinks, Seed, stride_q, stride_k, stride_v, stride_o, masking, lists, adding, sizes,
                    how,
                )  # fmt: skip
