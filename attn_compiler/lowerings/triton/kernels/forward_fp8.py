"""Attention forward on FP8 tensors, otherwise as forward.py: its masks, score changes, tile lists, and its lse.

It differs where FP8's few bits ask for it:
- Tensor cores of sm90 sum FP8 products in some 14 bits (https://github.com/vllm-project/flash-attention/pull/104). So weights · v is
  summed over one tile of keys there, and over the tiles in float32.
- Weights are rounded 2**8 times as large: at most 256 of the format's 448, so those down to 2**-14 of the largest stay normal numbers.
  Their sum is taken before the rounding and has the same factor, which falls out.
- The last keys come first. Where models put much weight on the first tokens (attention sinks), visiting those first would raise the
  maximum that all other weights are rounded against, and push them below the smallest number
  (https://arxiv.org/abs/2606.06521; FlashAttention-3 goes backwards too).
- A key that no query of a tile may see has a weight of 0, and 0 · NaN is NaN: v is not even read there. Only intervals, documents and
  dense masks ask for that; of the other masks nobody's keys were rounded to 0 (fp8/visible_keys.py).
- Dropout's factor comes after the rounding, which it would push out of the format's range.
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
    at_head,
    change,
    is_allowed,
    kept,
    load_bias,
    load_by_distance,
    load_tile,
    store_tile,
)
from attn_compiler.lowerings.shared.kernels.tile_visits import keys_to_visit, partial_tile
from attn_compiler.lowerings.shared.kernels.tuples import Added, KeyMasks, Pairs, Positions, QueryRows

#: log2 of the rounded weights' factor; see above
WEIGHT = tl.constexpr(8.0)


@triton.jit
def _load_turned(
    x, start, seen, SIZE: tl.constexpr, FIRST: tl.constexpr, PART: tl.constexpr, HEAD_DIM: tl.constexpr,
    CHECK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Load (PART, SIZE) elements of a tensor with positions last: head dims from FIRST, positions from `start`. Zeros beyond the head dim
    and, if CHECK, where `seen` (1, SIZE) is False; elements beyond the length are 0 in memory. x: `Positions` whose stride is that of head
    dims."""
    positions = tl.arange(0, SIZE)[None, :]
    dims = FIRST + tl.arange(0, PART)[:, None]
    pointers = (
        x.base + tl.multiple_of(start, SIZE) + tl.multiple_of(dims.to(tl.int64) * x.stride, [ALIGN, ALIGN]) + positions
    )
    if CHECK:
        # Among the last 16 positions, those beyond the length may stand anywhere.
        inside = start + positions < (x.length + 15) // 16 * 16
        if seen is not None:
            inside = inside & seen
        if FIRST + PART > HEAD_DIM:
            inside = inside & (dims < HEAD_DIM)
        tile = tl.load(pointers, mask=inside, other=0.0)
    elif FIRST + PART > HEAD_DIM:
        tile = tl.load(pointers, mask=dims < HEAD_DIM, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def _as_v_lies(weights, SIZE: tl.constexpr, KEYS: tl.constexpr):
    """Return (SIZE, KEYS) weights in the order of v's positions (fp8_rounding.in_order): for tensor cores of sm90 that is each thread's
    own."""
    groups = tl.reshape(weights, (SIZE, KEYS // 16, 2, 4, 2))
    return tl.reshape(tl.permute(groups, (0, 1, 3, 2, 4)), (SIZE, KEYS))


class _Queries(NamedTuple):
    """State that a program keeps for its block of queries."""

    rows: Any  # QueryRows
    q_0: Any  # tiles of the first and the further head dims
    q_1: Any
    descale: Any  # of all rows, with k's where a head has one
    shift: Any  # (M, 1), or None
    seed: Any  # of dropout
    head: Any  # of all batch rows' heads


class _Head(NamedTuple):
    """The keys and values of a head, with their mask and score operands."""

    k: Any  # Positions
    v: Any  # Positions; its stride is that of head dims
    DescaleK: Any
    DescaleV: Any
    masks: Any  # KeyMasks
    added: Any  # Added


@triton.jit
def _step(
    total, peak, out_0, out_1, descale_v, tile, own, of, sizes, how: tl.constexpr, SCALE_BLOCK: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Process one block of keys in the online softmax. total, out_0, out_1 are 2**8 times too large, the latter in units of v's newest
    descale, descale_v. own: `_Queries`; of: `_Head`."""
    start = tile * how.BLOCK_N
    keys = start + tl.arange(0, how.BLOCK_N)[None, :]
    rows, masks, seqlen_kv = own.rows, of.masks, sizes.seqlen_kv
    queries = rows.queries
    keys_allowed, document_k, values_seen = None, None, None
    # Keys that a band or a vector of keys hides are 0 already (fp8/visible_keys.py).
    UNSEEN: tl.constexpr = MASKED and (
        rows.lower is not None or masks.Documents is not None or masks.mask.base is not None
    )
    if MASKED:
        keys_allowed = load_keys(masks.Keys, keys, keys < seqlen_kv)
        document_k = load_row(masks.Documents, keys, keys < seqlen_kv)
    bias = load_bias(of.added, queries, keys, sizes, MASKED)
    distances = load_by_distance(of.added, queries, keys, sizes, MASKED)
    descale = own.descale
    if SCALE_BLOCK > 0:
        descale = own.descale * tl.load(of.DescaleK + start // SCALE_BLOCK)
    k_0 = load_tile(of.k, start, None, how.BLOCK_N, 0, how.QK_0, how.HEAD_DIM_QK, MASKED, how.ALIGN)
    SUM: tl.constexpr = tl.int32 if own.q_0.dtype == tl.int8 else tl.float32
    qk = tl.dot(own.q_0, tl.trans(k_0), out_dtype=SUM)
    if how.QK_1 > 0:
        k_1 = load_tile(of.k, start, None, how.BLOCK_N, how.QK_0, how.QK_1, how.HEAD_DIM_QK, MASKED, how.ALIGN)
        qk = tl.dot(own.q_1, tl.trans(k_1), qk, out_dtype=SUM)
    # Products of int8 are whole numbers.
    qk = qk.to(tl.float32)
    factor = 1.0
    if how.PLAIN:
        # With the maximum, one multiplication and addition for each pair.
        factor = sizes.scale * LOG2E * descale
        logits = qk
    elif how.CHANGE != "unchanged":
        qk = qk * descale
        if own.shift is not None:
            qk += own.shift
        logits, _ = change(
            qk, queries, keys, bias, distances, of.added.slope, sizes.scale, sizes.changed_by, how.CHANGE, how.FAST_TANH, False
        )  # fmt: skip
    else:
        # The shift is the same for all keys, and is added at the end.
        scale = sizes.scale * descale
        logits, _ = change(
            qk, queries, keys, bias, distances, of.added.slope, scale, sizes.changed_by, how.CHANGE, how.FAST_TANH, False
        )  # fmt: skip
    if MASKED:
        allowed = is_allowed(
            queries, keys, rows.lower, rows.upper, rows.document, document_k, keys_allowed, masks.mask, sizes, how
        )
        logits = tl.where(allowed, logits, float("-inf"))
        if UNSEEN:
            # From the scores: of whether pairs are allowed, a tile beside theirs would be held, which spills.
            values_seen = _as_v_lies(tl.max(logits, 0)[None, :], 1, how.BLOCK_N) > float("-inf")
    new_peak = tl.maximum(peak, tl.max(logits, 1) * factor)
    against = new_peak
    if MASKED or of.added.bias.base is not None:
        # Nothing allowed so far: exp2(-inf - 0) is 0, where -inf - -inf would be NaN.
        against = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(logits * factor - (against - WEIGHT)[:, None])
    decay = tl.exp2(peak - against)
    total = total * decay + tl.sum(weights, 1)
    if how.DROPOUT:
        weights = tl.where(kept(own.seed, own.head, queries, keys, sizes.dropout_p), weights, 0.0)
    weights = _as_v_lies(weights, how.BLOCK_M, how.BLOCK_N).to(of.v.base.dtype.element_ty)
    v_0 = _load_turned(of.v, start, values_seen, how.BLOCK_N, 0, how.V_0, how.HEAD_DIM_V, MASKED, how.ALIGN)
    if SCALE_BLOCK > 0:
        own_v = tl.load(of.DescaleV + start // SCALE_BLOCK)
        decay = decay * (descale_v / own_v)
        descale_v = own_v
    out_0 = out_0 * decay[:, None] + tl.dot(weights, tl.trans(v_0))
    if how.V_1 > 0:
        v_1 = _load_turned(of.v, start, values_seen, how.BLOCK_N, how.V_0, how.V_1, how.HEAD_DIM_V, MASKED, how.ALIGN)
        out_1 = out_1 * decay[:, None] + tl.dot(weights, tl.trans(v_1))
    return total, new_peak, out_0, out_1, descale_v


@triton.jit
def attention_forward_fp8(
    Q, K, V, DescaleQ, DescaleK, DescaleV, Shift, Out, Lse,
    Rows, Keys, DocumentsQ, DocumentsK, Mask, Tiles, Bias, Distances, Slopes, Sinks, Seed,
    stride_q, stride_k, stride_v, stride_o, stride_descales, masking, lists, adding, sizes,
    HOW: tl.constexpr, SCALE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of queries, Hq, B). Q, K, V (FP8, or int8 of Q and K) and descales: see fp8_quantise.names; the rest as in forward.py.

    V: (B, Hkv, Dv, Skv'), so stride_v.s is that of head dims. SCALE_BLOCK: positions that share a scale, 0 if all of a head do; a
    multiple of BLOCK_M and BLOCK_N. Shift: float32 (B, Hq, Sq) that belongs to every product of a row, or None.
    """
    how: tl.constexpr = members(HOW)
    # Later blocks have more keys under a causal mask: they go first, so that the last programs to run are short.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head, batch = tl.program_id(1), tl.program_id(2)
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
    DescaleQ += batch.to(tl.int64) * stride_descales.descale_qb + head * stride_descales.descale_qh
    DescaleK += batch.to(tl.int64) * stride_descales.descale_kb + (head // sizes.group) * stride_descales.descale_kh
    DescaleV += batch.to(tl.int64) * stride_descales.descale_vb + (head // sizes.group) * stride_descales.descale_vh
    # One for all rows: blocks are multiples of what a program computes.
    descale_q = tl.load(DescaleQ + (start // SCALE_BLOCK if SCALE_BLOCK > 0 else 0))
    descale_v = tl.load(DescaleV)
    if SCALE_BLOCK == 0:
        descale_q *= tl.load(DescaleK)
    shift = load_column(Shift, row * sizes.seqlen_q + offsets, inside)
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
    of = _Head(k=k, v=v, DescaleK=DescaleK, DescaleV=DescaleV, masks=masks, added=added)
    seed = load_one(Seed, 0)
    List = list_of(Tiles, batch, head, block, lists)
    partial, first, second, full_first, full_last = keys_to_visit(List, start, sizes, how)

    q_0 = load_tile(q, start, None, how.BLOCK_M, 0, how.QK_0, how.HEAD_DIM_QK, True, how.ALIGN)
    q_1 = q_0
    if how.QK_1 > 0:
        q_1 = load_tile(q, start, None, how.BLOCK_M, how.QK_0, how.QK_1, how.HEAD_DIM_QK, True, how.ALIGN)
    own = _Queries(rows=rows, q_0=q_0, q_1=q_1, descale=descale_q, shift=shift, seed=seed, head=row)
    total = tl.zeros([how.BLOCK_M], tl.float32)
    peak = tl.full([how.BLOCK_M], float("-inf"), tl.float32)
    out_0 = tl.zeros([how.BLOCK_M, how.V_0], tl.float32)
    out_1 = tl.zeros([how.BLOCK_M, how.V_1 if how.V_1 > 0 else 16], tl.float32)
    for i in tl.range(0, partial):
        tile = partial_tile(List, partial - 1 - i, first, second, full_first, full_last)
        total, peak, out_0, out_1, descale_v = _step(
            total, peak, out_0, out_1, descale_v, tile, own, of, sizes, how, SCALE_BLOCK, True
        )
    for i in tl.range(full_first, full_last):
        tile = full_last - 1 - (i - full_first)
        total, peak, out_0, out_1, descale_v = _step(
            total, peak, out_0, out_1, descale_v, tile, own, of, sizes, how, SCALE_BLOCK, False
        )

    if Shift is not None and how.CHANGE == "unchanged":
        moved = peak + tl.load(Shift + row * sizes.seqlen_q + offsets, mask=inside, other=0.0) * (sizes.scale * LOG2E)
        # A row without keys has no scores to shift, also where q holds NaN.
        peak = tl.where(total == 0.0, peak, moved)
    if Sinks is not None:
        sink = tl.load(Sinks + head).to(tl.float32) * LOG2E
        with_sink = tl.maximum(peak, sink)
        decay = tl.exp2(peak - with_sink)
        total = total * decay + tl.exp2(sink - with_sink + WEIGHT)
        out_0, out_1 = out_0 * decay[:, None], out_1 * decay[:, None]
        peak = with_sink
    empty = total == 0.0
    divisor = tl.where(empty, 1.0, total)
    lse = tl.where(empty, float("-inf"), (peak - WEIGHT) * LN2 + tl.log(divisor))
    tl.store(Lse + row * sizes.seqlen_q + offsets, lse, mask=inside)
    if how.DROPOUT:
        divisor *= 1.0 - sizes.dropout_p
    divisor /= descale_v
    store_tile(out, start, out_0 / divisor[:, None], how.BLOCK_M, 0, how.V_0, how.HEAD_DIM_V)
    if how.V_1 > 0:
        store_tile(out, start, out_1 / divisor[:, None], how.BLOCK_M, how.V_0, how.V_1, how.HEAD_DIM_V)
