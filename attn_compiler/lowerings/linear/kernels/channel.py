"""A decay for each channel of k: all that does not depend on the state, in three kernels. Names as in forward.py, but c is of each channel.

    A = stril(Σ aᵢ kᵢ aⱼ kⱼ exp(cᵢ - cⱼ)), L = β A;  P = tril(Σ bᵢ qᵢ aⱼ kⱼ exp(cᵢ - cⱼ))        sums over channels

The exponent belongs to no product: exp(c) exp(-c) would overflow. Rows go by blocks of 16. The part before a block is a product around the
block's first row, whose exponents are at most 0. Within a block it goes key by key.
"""

from __future__ import annotations

import triton.language as tl

from attn_compiler.lowerings.linear.kernels.tiles import (
    has_bad,
    inverse,
    norm_factor,
    numbers,
    product,
    rows,
    store_parts,
)
from attn_compiler.lowerings.shared.kernels.releases_assembler_sm90 import assembled_jit


@assembled_jit(do_not_specialize=["length", "chunks"])
def channel_sums(
    Q, K, G, Sums, Norms, Queries, Early, Later, heads, group, length, chunks, scale, eps, q_b, q_s, q_h, k_b, k_s, k_h, g_b, g_s, g_h,
    C: tl.constexpr, DK: tl.constexpr, WK: tl.constexpr, NORM: tl.constexpr, PARTS: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """Grid: (chunks B H,). G: (B, S, H, DK). Sums: c, (B, H, chunks, C, WK). Queries, Early, Later: b q exp(c), a k exp(c) and
    a k exp(c at the end - c), in parts, (B, H, chunks, PLANES, C, WK). Others: as in forward.py."""
    at = tl.program_id(0).to(tl.int64)
    row, chunk = at // chunks, (at % chunks).to(tl.int32)
    batch, head = row // heads, row % heads
    i, d = tl.arange(0, C), tl.arange(0, WK)
    token = chunk * C + i
    g = rows(G + batch * g_b + head * g_h, token, length, g_s, d, DK, WK).to(tl.float32)
    c = tl.cumsum(g, 0)
    # A sum of its own: the end's sum less c would lose digits where decays are strong.
    next_g = rows(G + batch * g_b + head * g_h, token + 1, tl.minimum(length, chunk * C + C), g_s, d, DK, WK)
    after = tl.cumsum(next_g.to(tl.float32), 0, reverse=True)
    tl.store(Sums + at * C * WK + i[:, None] * WK + d[None, :], c)
    k = rows(K + batch * k_b + head // group * k_h, token, length, k_s, d, DK, WK)
    q = rows(Q + batch * q_b + head // group * q_h, token, length, q_s, d, DK, WK)
    a, b = norm_factor(k, eps, NORM), norm_factor(q, eps, NORM) * scale
    tl.store(Norms + at * 2 * C + i, b)
    tl.store(Norms + at * 2 * C + C + i, a)
    of_keys, of_all = at * PLANES * C * WK + i[:, None] * WK + d[None, :], C * WK
    store_parts(Queries, of_keys, of_all, q.to(tl.float32) * b[:, None] * tl.exp(c), PARTS)
    store_parts(Early, of_keys, of_all, k.to(tl.float32) * a[:, None] * tl.exp(c), PARTS)
    store_parts(Later, of_keys, of_all, k.to(tl.float32) * a[:, None] * tl.exp(after), PARTS)


@assembled_jit(do_not_specialize=["length", "chunks"])
def channel_pairs(
    Q, K, Beta, Lower, Pairs, Sums, Norms, heads, group, length, chunks,
    q_b, q_s, q_h, k_b, k_s, k_h, beta_b, beta_s, beta_h,
    C: tl.constexpr, DK: tl.constexpr, WK: tl.constexpr, PARTS: tl.constexpr, PLANES: tl.constexpr, OF_PAIRS: tl.constexpr,
):  # fmt: skip
    """Compute 16 rows of a chunk. Grid: (C / 16 chunks B H,). Lower: L, (B, H, chunks, C, C) in float32. Others: as in forward.py."""
    blocks: tl.constexpr = C // 16
    block = tl.program_id(0) % blocks
    at = (tl.program_id(0) // blocks).to(tl.int64)
    row, chunk = at // chunks, (at % chunks).to(tl.int32)
    batch, head = row // heads, row % heads
    i, d, own = tl.arange(0, C), tl.arange(0, WK), block * 16 + tl.arange(0, 16)
    Q += batch * q_b + head // group * q_h
    K += batch * k_b + head // group * k_h
    Sums += at * C * WK
    Norms += at * 2 * C
    c, base = tl.load(Sums + i[:, None] * WK + d[None, :]), tl.load(Sums + block * 16 * WK + d)
    c_own = tl.load(Sums + own[:, None] * WK + d[None, :])
    is_before = (i < block * 16)[:, None]
    keys = rows(K, chunk * C + i, length, k_s, d, DK, WK).to(tl.float32) * tl.load(Norms + C + i)[:, None]
    keys = tl.where(is_before, keys * tl.exp(tl.where(is_before, base[None, :] - c, 0.0)), 0.0)
    q = rows(Q, chunk * C + own, length, q_s, d, DK, WK).to(tl.float32) * tl.load(Norms + own)[:, None]
    k = rows(K, chunk * C + own, length, k_s, d, DK, WK).to(tl.float32) * tl.load(Norms + C + own)[:, None]
    grown = tl.exp(c_own - base[None, :])
    pairs = tl.trans(product(keys, tl.trans(q * grown), PARTS))
    lower = tl.trans(product(keys, tl.trans(k * grown), PARTS))
    for one in tl.static_range(16):
        j = block * 16 + one
        # The chunk's last rows may be beyond the sequence; a and k are 0 there.
        is_key = (d < DK) & (chunk * C + j < length)
        key = tl.load(K + (chunk * C + j).to(tl.int64) * k_s + d, mask=is_key, other=0.0).to(tl.float32)
        key *= tl.load(Norms + C + j)
        is_seen = (own >= j)[:, None]
        key = key[None, :] * tl.exp(tl.where(is_seen, c_own - tl.load(Sums + j * WK + d)[None, :], 0.0))
        is_here = is_seen & (i == j)[None, :]
        pairs = tl.where(is_here, tl.sum(q * key, 1)[:, None], pairs)
        lower = tl.where(is_here, tl.sum(k * key, 1)[:, None], lower)
    lower *= numbers(Beta + batch * beta_b + head * beta_h, chunk * C + own, length, beta_s)[:, None]
    of_pairs = own[:, None] * C + i[None, :]
    store_parts(Pairs, at * PLANES * C * C + of_pairs, C * C, pairs, OF_PAIRS)
    tl.store(Lower + at * C * C + of_pairs, tl.where(own[:, None] > i[None, :], lower, 0.0))


@assembled_jit(do_not_specialize=["length", "chunks"])
def channel_inverse(
    V, Beta, Lower, Inverse, Factors, heads, length, chunks, v_b, v_s, v_h, beta_b, beta_s, beta_h,
    C: tl.constexpr, DV: tl.constexpr, WV: tl.constexpr, PARTS: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """Compute T of L. Grid: (chunks B H,). Factors: the last two alone."""
    at = tl.program_id(0).to(tl.int64)
    row, chunk = at // chunks, (at % chunks).to(tl.int32)
    i = tl.arange(0, C)
    of_pairs = i[:, None] * C + i[None, :]
    found = inverse(tl.load(Lower + at * C * C + of_pairs), Inverse + at * PLANES * C * C, C, PARTS)
    store_parts(Inverse, at * PLANES * C * C + of_pairs, C * C, found, PARTS)
    batch, head, token = row // heads, row % heads, chunk * C + i
    beta = numbers(Beta + batch * beta_b + head * beta_h, token, length, beta_s)
    v = rows(V + batch * v_b + head * v_h, token, length, v_s, tl.arange(0, WV), DV, WV)
    is_bad = has_bad(v.to(tl.float32) * beta[:, None]) | has_bad(found)
    tl.store(Factors + at * 5 * C + 3 * C + i, beta)
    tl.store(Factors + at * 5 * C + 4 * C + i, i * 0.0 + tl.where(is_bad, 1.0, 0.0))
