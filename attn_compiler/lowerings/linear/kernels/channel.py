"""A decay for each channel of k: all that does not depend on the state, in one kernel. Names as in forward.py, but c is of each channel.

    A = stril(Σ aᵢ kᵢ aⱼ kⱼ exp(cᵢ - cⱼ)), L = β A;  P = tril(Σ bᵢ qᵢ aⱼ kⱼ exp(cᵢ - cⱼ))        sums over channels

Where |c| is small, these are products of rows with exp(c) and keys with exp(-c). Elsewhere exp(-c) would overflow: rows of the second half
of a chunk and keys of the first half are multiplied with decays from and to the row between, and so on in each half.
"""

from __future__ import annotations

import triton
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

#: largest |c| of a chunk whose decays are divided by each other; parts of exp(-c) are numbers of bfloat16 that are no denormals
WEAK = tl.constexpr(40.0)


@assembled_jit(do_not_specialize=["length", "chunks"])
def channel_chunks(
    Q, K, V, G, Beta, Inverse, Pairs, Sums, Norms, Factors, Queries, Early, Later,
    heads, group, length, chunks, scale, eps,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, g_b, g_s, g_h, beta_b, beta_s, beta_h,
    C: tl.constexpr, DK: tl.constexpr, WK: tl.constexpr, DV: tl.constexpr, WV: tl.constexpr, NORM: tl.constexpr,
    PARTS: tl.constexpr, PLANES: tl.constexpr, OF_PAIRS: tl.constexpr, KEEPS: tl.constexpr, DS: tl.constexpr,
):  # fmt: skip
    """Grid: (chunks B H,). G: (B, S, H, DK). Sums: c, (B, H, chunks, C, WK); without KEEPS, where |c| is small, of the
    last row alone. Queries, Early, Later: b q exp(c), a k exp(c) and a k exp(c at the end - c), in parts, (B, H, chunks, PLANES, C, WK).
    Factors: β and whether a number is not finite alone. Others: as in forward.py."""
    at = tl.program_id(0).to(tl.int64)
    row, chunk = at // chunks, (at % chunks).to(tl.int32)
    batch, head = row // heads, row % heads
    i, d = tl.arange(0, C), tl.arange(0, DS)
    token = chunk * C + i
    G += batch * g_b + head * g_h
    Q += batch * q_b + head // group * q_h
    K += batch * k_b + head // group * k_h
    V += batch * v_b + head * v_h
    beta = numbers(Beta + batch * beta_b + head * beta_h, token, length, beta_s)
    v = rows(V, token, length, v_s, tl.arange(0, WV), DV, WV)
    is_bad = has_bad(v.to(tl.float32) * beta[:, None])
    a = norm_factor(rows(K, token, length, k_s, tl.arange(0, WK), DK, WK), eps, NORM)
    b = norm_factor(rows(Q, token, length, q_s, tl.arange(0, WK), DK, WK), eps, NORM) * scale
    if KEEPS:
        tl.store(Norms + at * 2 * C + i, b)
        tl.store(Norms + at * 2 * C + C + i, a)
    pairs, lower = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    for share in range(0, WK, DS):
        own = share + d
        g = rows(G, token, length, g_s, own, DK, WK).to(tl.float32)
        q = rows(Q, token, length, q_s, own, DK, WK).to(tl.float32) * b[:, None]
        k = rows(K, token, length, k_s, own, DK, WK).to(tl.float32) * a[:, None]
        c = tl.cumsum(g, 0)
        grown = tl.exp(c)
        queries, early = q * grown, k * grown
        of_keys, of_all = at * PLANES * C * WK + i[:, None] * WK + own[None, :], C * WK
        store_parts(Queries, of_keys, of_all, queries, OF_PAIRS)
        store_parts(Early, of_keys, of_all, early, PARTS)
        of_sums = Sums + at * C * WK + i[:, None] * WK + own[None, :]
        is_weak = tl.max(tl.max(tl.abs(c), 1), 0) < WEAK
        if KEEPS or not is_weak:
            tl.store(of_sums, c)
        else:
            tl.store(of_sums, c, mask=i[:, None] == C - 1)
        if is_weak:
            back = k * tl.exp(-c)
            later = back * tl.exp(tl.sum(tl.where(i[:, None] == C - 1, c, 0.0), 0))[None, :]
            back = tl.trans(back)
            pairs, lower = product(queries, back, OF_PAIRS, pairs), product(early, back, PARTS, lower)
        else:
            # A sum of its own: the end's sum less c would lose digits.
            next_g = rows(G, token + 1, tl.minimum(length, chunk * C + C), g_s, own, DK, WK).to(tl.float32)
            later = k * tl.exp(tl.cumsum(next_g, 0, reverse=True))
            tl.debug_barrier()
            pairs, lower = _by_halves(q, k, c, of_sums, pairs, lower, i, C, WK, PARTS, OF_PAIRS)
        store_parts(Later, of_keys, of_all, later, PARTS)
    of_pairs = i[:, None] * C + i[None, :]
    pairs = tl.where(i[:, None] >= i[None, :], pairs, 0.0)
    store_parts(Pairs, at * PLANES * C * C + of_pairs, C * C, pairs, OF_PAIRS)
    lower = tl.where(i[:, None] > i[None, :], lower * beta[:, None], 0.0)
    found = inverse(lower, Inverse + at * PLANES * C * C, C, PARTS)
    store_parts(Inverse, at * PLANES * C * C + of_pairs, C * C, found, PARTS)
    is_bad = is_bad | has_bad(found)
    tl.store(Factors + at * 5 * C + 3 * C + i, beta)
    tl.store(Factors + at * 5 * C + 4 * C + i, i * 0.0 + tl.where(is_bad, 1.0, 0.0))


@triton.jit
def _by_halves(
    q, k, c, of_sums, pairs, lower, i, C: tl.constexpr, WK: tl.constexpr, PARTS: tl.constexpr, OF_PAIRS: tl.constexpr
):
    """Add P and A, whose exponents are those of decays alone. of_sums: addresses of c."""
    LEVELS: tl.constexpr = 6 if C == 64 else 5
    pairs += tl.where(i[:, None] == i[None, :], tl.sum(q * k, 1)[:, None], 0.0)
    for level in tl.range(LEVELS, num_stages=1):
        half = (C // 2) >> level
        is_late = (i & half) != 0
        middle = (i & -half) | half
        base = tl.load(of_sums + (middle - i)[:, None] * WK)
        decay = tl.exp(tl.where(is_late[:, None], c - base, base - c))
        keys = tl.trans(k * decay)
        is_pair = is_late[:, None] & (((i ^ half) & -half)[:, None] == (i & -half)[None, :])
        pairs += tl.where(is_pair, product(q * decay, keys, OF_PAIRS), 0.0)
        lower += tl.where(is_pair, product(k * decay, keys, PARTS), 0.0)
    return pairs, lower
