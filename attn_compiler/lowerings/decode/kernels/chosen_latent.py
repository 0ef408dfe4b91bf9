"""Attention of many queries over the latent that k and v are made of, where each query has chosen its keys by their indices.

A program has one query and a block of its heads, which all share the chosen keys: its products are (heads, chosen keys). It loads each
chosen key's latent by the key's index, once for both products. Keys that were not chosen are not read at all.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_compiler.lowerings.shared.kernels.releases import members
from attn_compiler.lowerings.shared.kernels.tile_parts import LN2, LOG2E


@triton.jit
def _of_keys(X, keys, used, stride, WIDTH: tl.constexpr, DIMS: tl.constexpr, ALIGN: tl.constexpr):
    """Rows of (Skv, DIMS) at keys, 0 where they do not count."""
    at = tl.multiple_of(keys * stride, [ALIGN])[:, None]
    dims = tl.arange(0, WIDTH)[None, :]
    if WIDTH == DIMS:
        found = tl.load(X + at + dims, mask=used[:, None], other=0.0)
    else:
        found = tl.load(X + at + dims, mask=used[:, None] & (dims < DIMS), other=0.0)
    return found


@triton.jit
def attention_chosen_latent(
    Q, C, R, Out, Lse, Index, Counts,
    stride_qb: tl.int64, stride_qh: tl.int64, stride_qs: tl.int64, stride_ob: tl.int64, stride_oh: tl.int64, stride_os: tl.int64,
    stride_cb: tl.int64, stride_cs: tl.int64, stride_rb: tl.int64, stride_rs: tl.int64,
    index_row: tl.int64, counts_row: tl.int64,
    heads: tl.int32, seqlen_q: tl.int32, seqlen_kv: tl.int32, chosen: tl.int32, scale: tl.float32, HOW: tl.constexpr,
):  # fmt: skip
    """Grid: (Sq, blocks of BLOCK_M heads, B). HOW: `ChosenSwitches`.

    Q: (B, H, Sq, rank + rope dims); C, R: the latent (B, 1, Skv, rank) and the part of keys beside it, or None. Index: int64 (B · Sq,
    chosen), the keys of each query; those outside 0 to Skv - 1 do not count, nor does one whose element of Counts, bool (B · Sq, chosen) or
    None, is False. Out: (B, H, Sq, rank); Lse: float32 (B, H, Sq), contiguous, natural logarithm. A query none of whose keys count gets
    0 and -inf. The scale is positive.
    """
    how: tl.constexpr = members(HOW)
    query, block, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    local = block * how.BLOCK_M + tl.arange(0, how.BLOCK_M)
    # Rows beyond the last head repeat it, and are not stored.
    of_heads = tl.minimum(local, heads - 1).to(tl.int64)
    at = tl.multiple_of(batch * stride_qb + query.to(tl.int64) * stride_qs + of_heads * stride_qh, [how.ALIGN])[:, None]
    dims = tl.arange(0, how.WIDTH)[None, :]
    q_0 = tl.load(Q + at + dims, mask=dims < how.RANK, other=0.0)
    q_1 = q_0
    if how.ROPE > 0:
        beside = tl.arange(0, how.ROPE_WIDTH)[None, :]
        q_1 = tl.load(Q + at + how.RANK + beside, mask=beside < how.ROPE, other=0.0)
        R += batch * stride_rb
    C += batch * stride_cb
    row = batch * seqlen_q + query
    Index += row * index_row
    if Counts is not None:
        Counts += row * counts_row
    total = tl.zeros([how.BLOCK_M], tl.float32)
    peak = tl.full([how.BLOCK_M], float("-inf"), tl.float32)
    out = tl.zeros([how.BLOCK_M, how.WIDTH], tl.float32)
    factor = scale * LOG2E
    for start in tl.range(0, chosen, how.BLOCK_N):
        places = start + tl.arange(0, how.BLOCK_N)
        keys = tl.load(Index + places, mask=places < chosen, other=-1)
        used = (keys >= 0) & (keys < seqlen_kv)
        if Counts is not None:
            used = used & (tl.load(Counts + places, mask=places < chosen, other=0) != 0)
        c = _of_keys(C, keys, used, stride_cs, how.WIDTH, how.RANK, how.ALIGN)
        qk = tl.dot(q_0, tl.trans(c), input_precision=how.PRECISION)
        if how.ROPE > 0:
            r = _of_keys(R, keys, used, stride_rs, how.ROPE_WIDTH, how.ROPE, how.ALIGN)
            qk = tl.dot(q_1, tl.trans(r), qk, input_precision=how.PRECISION)
        qk = tl.where(used[None, :], qk, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(qk, 1))
        # Nothing so far: exp2(-inf - 0) is 0, where -inf - -inf would be NaN.
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(qk * factor - (shift * factor)[:, None])
        decay = tl.exp2((peak - shift) * factor)
        total = total * decay + tl.sum(weights, 1)
        peak = new_peak
        out = tl.dot(weights.to(c.dtype), c, out * decay[:, None], input_precision=how.PRECISION)
    divisor = tl.where(total == 0.0, 1.0, total)
    lse = tl.where(total == 0.0, float("-inf"), (peak * factor + tl.log2(divisor)) * LN2)
    tl.store(Lse + (batch * heads + local) * seqlen_q + query, lse, mask=local < heads)
    at = (batch * stride_ob + query.to(tl.int64) * stride_os + local.to(tl.int64) * stride_oh)[:, None]
    found = (out / divisor[:, None]).to(Out.dtype.element_ty)
    tl.store(Out + at + dims, found, mask=(local < heads)[:, None] & (dims < how.RANK))
