"""Gradients where each channel of k has a decay: of a chunk and its states, of its pairs by blocks of 16 rows, and of sums of decays.

Words as in backward.py; e, r and c are of each channel, and Σ is a sum over tokens.

    of b q: e (do Sᵀ) + Σⱼ dPᵢⱼ aⱼ kⱼ exp(cᵢ - cⱼ);  of a k, as the later of a pair: β Σⱼ dLᵢⱼ aⱼ kⱼ exp(cᵢ - cⱼ) - e (dx Sᵀ)
    of a k, as the earlier of a pair: Σᵢ (dPᵢⱼ bᵢ qᵢ + βᵢ dLᵢⱼ aᵢ kᵢ) exp(cᵢ - cⱼ) + r (u Dᵀ)
    dc = b q (of b q) + a k (as the later - as the earlier);  at the end + Σ a k r (u Dᵀ) + exp(c at the end) rows(D S)
    dβ = rows(dy X) + a k Σⱼ dLᵢⱼ aⱼ kⱼ exp(cᵢ - cⱼ)
"""

from __future__ import annotations

import triton.language as tl

from attn_compiler.lowerings.linear.kernels.channel import WEAK
from attn_compiler.lowerings.linear.kernels.tiles import (
    first_bad,
    numbers,
    of_state,
    product,
    rows,
    store_rows,
    without_bad,
)
from attn_compiler.lowerings.shared.kernels.releases_assembler_sm90 import assembled_jit


@assembled_jit(do_not_specialize=["length", "chunks"])
def channel_gradients(
    K, V, Beta, Grad, Sums, Norms, States, Afters, Values, Grad_values,
    Part_q, Part_k, Part_late, Ends, Grad_pairs, Grad_lower, Grad_v, Part_beta, Spoiled,
    heads, group, length, chunks, shares_g, k_b, k_s, k_h, v_b, v_s, v_h, beta_b, beta_s, beta_h,
    C: tl.constexpr, DK: tl.constexpr, WK: tl.constexpr, DV: tl.constexpr, WV: tl.constexpr, BV: tl.constexpr, DS: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients through the states, for DS channels of k. Grid: (WK / DS chunks B H,). Part_q, Part_k, Part_late: of b q, of a
    k as the later, as the earlier of a pair, (B, S, H, DK). Ends: of c at the end, (B, H, chunks, WK). Grad_pairs, Grad_lower: dP and dL,
    (B, H, chunks, C, C). Part_beta: as Part_g in backward.py. All in float32. Grad_v: (B, S, H, DV). Spoiled: the first token of a chunk
    whose u is not finite, or C, in int32, (B, H, chunks): its terms of dc cancel in the gradients of decays before it, and are left out."""
    share = tl.program_id(0) % (WK // DS)
    at = (tl.program_id(0) // (WK // DS)).to(tl.int64)
    row, chunk = at // chunks, (at % chunks).to(tl.int32)
    batch, head = row // heads, row % heads
    i, d = tl.arange(0, C), share * DS + tl.arange(0, DS)
    token = chunk * C + i
    K += batch * k_b + head // group * k_h
    V += batch * v_b + head * v_h
    of_sums = at * C * WK + i[:, None] * WK + d[None, :]
    end = tl.load(Sums + at * C * WK + (C - 1) * WK + d)
    beta = numbers(Beta + batch * beta_b + head * beta_h, token, length, beta_s)
    of_q, of_u, of_dy = tl.zeros([C, DS], tl.float32), tl.zeros([C, DS], tl.float32), tl.zeros([C, DS], tl.float32)
    dp, dl = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    dbeta, dend = tl.zeros([C], tl.float32), tl.zeros([DS], tl.float32)
    spoiled = tl.full([], C, tl.int32)
    to_v = batch * length * heads * DV + head * DV
    for column in tl.range(0, WV, BV):
        e = column + tl.arange(0, BV)
        state = of_state(States + at * DK * DV, d, e, DV, 1, DK, WK, DV, WV)
        after = of_state(Afters + at * DK * DV, d, e, DV, 1, DK, WK, DV, WV)
        do = rows(Grad + to_v, token, length, heads * DV, e, DV, WV)
        u = rows(Values + at * C * DV, i, C, DV, e, DV, WV)
        spoiled = tl.minimum(spoiled, tl.min(first_bad(u, i, C), 0))
        u = without_bad(u)
        dy = rows(Grad_values + at * C * DV, i, C, DV, e, DV, WV)
        dend += tl.sum(after * state, 1)
        # The first share adds the terms that are no sums over channels.
        if share == 0:
            store_rows(Grad_v + to_v, dy * beta[:, None], token, length, heads * DV, e, DV, WV)
            dbeta += tl.sum(dy * rows(V, token, length, v_s, e, DV, WV).to(tl.float32), 1)
            dp = product(do, tl.trans(u), PARTS, dp)
            dl = product(dy, tl.trans(u), PARTS, dl)
        of_q = product(do, tl.trans(state), PARTS, of_q)
        of_dy = product(dy, tl.trans(state), PARTS, of_dy)
        of_u = product(u, tl.trans(after), PARTS, of_u)
    k = rows(K, token, length, k_s, d, DK, WK).to(tl.float32) * tl.load(Norms + at * 2 * C + C + i)[:, None]
    c = tl.load(Sums + of_sums)
    earlier, later = of_u * tl.exp(end[None, :] - c), of_dy * tl.exp(c)
    dbeta -= tl.sum(k * later, 1)
    dq = of_q * tl.exp(c)
    later *= -beta[:, None]
    tl.store(Ends + at * WK + d, tl.sum(k * earlier, 0) + tl.exp(end) * dend)
    to_part = batch * length * heads * DK + head * DK
    store_rows(Part_q + to_part, dq, token, length, heads * DK, d, DK, WK)
    store_rows(Part_k + to_part, later, token, length, heads * DK, d, DK, WK)
    store_rows(Part_late + to_part, earlier, token, length, heads * DK, d, DK, WK)
    of_pairs = at * C * C + i[:, None] * C + i[None, :]
    if share == 0:
        tl.store(Spoiled + at, spoiled)
        tl.store(Grad_pairs + of_pairs, tl.where(i[:, None] >= i[None, :], dp, 0.0))
        tl.store(Grad_lower + of_pairs, tl.where(i[:, None] > i[None, :], -dl, 0.0))
    to_number = share * shares_g + (batch * length + token) * heads + head
    tl.store(Part_beta + to_number, dbeta, mask=token < length)


@assembled_jit(do_not_specialize=["length", "chunks"])
def channel_pair_gradients(
    Q, K, Beta, Sums, Norms, Part_q, Part_k, Part_late, Grad_pairs, Grad_lower, Grad_sums, Grad_beta, Part_beta, Spoiled,
    heads, group, length, chunks, shares_g, q_b, q_s, q_h, k_b, k_s, k_h, beta_b, beta_s, beta_h,
    C: tl.constexpr, DK: tl.constexpr, WK: tl.constexpr, DS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Add the gradients through the pairs of 16 rows of a chunk. Grid: (C / 16 chunks B H,). Part_q, Part_k: become the whole gradients of
    b q and of a k. Grad_sums: dc but for the end, (B, H, chunks, C, WK). Grad_beta: (B, S, H). Others: as in `channel_gradients`."""
    blocks: tl.constexpr = C // 16
    first = tl.program_id(0) % blocks * 16
    at = (tl.program_id(0) // blocks).to(tl.int64)
    row, chunk = at // chunks, (at % chunks).to(tl.int32)
    batch, head = row // heads, row % heads
    i, d, own = tl.arange(0, C), tl.arange(0, WK), first + tl.arange(0, 16)
    Q += batch * q_b + head // group * q_h
    K += batch * k_b + head // group * k_h
    Beta += batch * beta_b + head * beta_h
    Sums += at * C * WK
    Norms += at * 2 * C
    Grad_pairs += at * C * C
    Grad_lower += at * C * C
    token = chunk * C + own
    c, c_own = tl.load(Sums + i[:, None] * WK + d[None, :]), tl.load(Sums + own[:, None] * WK + d[None, :])
    k = rows(K, chunk * C + i, length, k_s, d, DK, WK).to(tl.float32) * tl.load(Norms + C + i)[:, None]
    # As the later of pairs with tokens before the block, and within it if its decays may be divided by each other, around its first row.
    base = tl.load(Sums + first * WK + d)
    is_weak = tl.max(tl.max(tl.abs(c_own - base[None, :]), 1), 0) < WEAK
    is_before = (i < tl.where(is_weak, first + 16, first))[:, None]
    keys = tl.where(is_before, k * tl.exp(tl.where(is_before, base[None, :] - c, 0.0)), 0.0)
    of_rows = own[:, None] * C + i[None, :]
    grown = tl.exp(c_own - base[None, :])
    dq = product(tl.load(Grad_pairs + of_rows), keys, PARTS) * grown
    later = product(tl.load(Grad_lower + of_rows), keys, PARTS) * grown
    # As the earlier of pairs with tokens after the block or within it, around its last row.
    base = tl.load(Sums + (first + 15) * WK + d)
    is_after = (i > tl.where(is_weak, first - 1, first + 15))[:, None]
    shrunk = tl.where(is_after, tl.exp(tl.where(is_after, c - base[None, :], 0.0)), 0.0)
    of_columns = i[None, :] * C + own[:, None]
    q = rows(Q, chunk * C + i, length, q_s, d, DK, WK).to(tl.float32) * tl.load(Norms + i)[:, None]
    earlier = product(tl.load(Grad_pairs + of_columns), q * shrunk, PARTS)
    k *= numbers(Beta, chunk * C + i, length, beta_s)[:, None]
    earlier = product(tl.load(Grad_lower + of_columns), k * shrunk, PARTS, earlier)
    earlier *= tl.exp(base[None, :] - c_own)
    # Elsewhere within the block, token by token: as an earlier one, then as a later one.
    for one in tl.range(tl.where(is_weak, 16, 0), 16):
        j = first + one
        is_one = (d < DK) & (chunk * C + j < length)
        of_one = (chunk * C + j).to(tl.int64)
        c_one = tl.load(Sums + j * WK + d)[None, :]
        key = tl.load(K + of_one * k_s + d, mask=is_one, other=0.0).to(tl.float32) * tl.load(Norms + C + j)
        query = tl.load(Q + of_one * q_s + d, mask=is_one, other=0.0).to(tl.float32) * tl.load(Norms + j)
        is_later, is_earlier = (own >= j)[:, None], (own <= j)[:, None]
        seen = key[None, :] * tl.exp(tl.where(is_later, c_own - c_one, 0.0))
        dq += tl.load(Grad_pairs + own * C + j)[:, None] * seen
        later += tl.load(Grad_lower + own * C + j)[:, None] * seen
        beta = tl.load(Beta + of_one * beta_s, mask=chunk * C + j < length, other=0.0).to(tl.float32)
        both = tl.load(Grad_pairs + j * C + own)[:, None] * query[None, :]
        both += tl.load(Grad_lower + j * C + own)[:, None] * (key * beta)[None, :]
        earlier += both * tl.exp(tl.where(is_earlier, c_one - c_own, 0.0))
    q = rows(Q, token, length, q_s, d, DK, WK).to(tl.float32) * tl.load(Norms + own)[:, None]
    k = rows(K, token, length, k_s, d, DK, WK).to(tl.float32) * tl.load(Norms + C + own)[:, None]
    to_beta = (batch * length + token) * heads + head
    dbeta = tl.sum(k * later, 1)
    for share in tl.static_range(WK // DS):
        dbeta += tl.load(Part_beta + share * shares_g + to_beta, mask=token < length, other=0.0)
    lost = tl.where(own >= tl.load(Spoiled + at), float("nan"), 0.0)
    tl.store(Grad_beta + to_beta, (dbeta + lost).to(Grad_beta.dtype.element_ty), mask=token < length)
    later *= numbers(Beta, token, length, beta_s)[:, None]
    to_part = batch * length * heads * DK + head * DK
    dq += rows(Part_q + to_part, token, length, heads * DK, d, DK, WK)
    later += rows(Part_k + to_part, token, length, heads * DK, d, DK, WK)
    earlier += rows(Part_late + to_part, token, length, heads * DK, d, DK, WK)
    store_rows(Part_q + to_part, dq + lost[:, None], token, length, heads * DK, d, DK, WK)
    store_rows(Part_k + to_part, later + earlier + lost[:, None], token, length, heads * DK, d, DK, WK)
    tl.store(Grad_sums + at * C * WK + own[:, None] * WK + d[None, :], q * dq + k * (later - earlier))


@assembled_jit(do_not_specialize=["length", "chunks"])
def decay_gradients(
    Grad_sums, Ends, Grad_g, Spoiled, heads, length, chunks, C: tl.constexpr, DK: tl.constexpr, WK: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of g from dc. Grid: (chunks B H,). Grad_g: (B, S, H, DK), contiguous."""
    at = tl.program_id(0).to(tl.int64)
    row, chunk = at // chunks, (at % chunks).to(tl.int32)
    i, d = tl.arange(0, C), tl.arange(0, WK)
    dc = tl.load(Grad_sums + at * C * WK + i[:, None] * WK + d[None, :])
    dg = tl.cumsum(dc, 0, reverse=True) + tl.load(Ends + at * WK + d)[None, :]
    dg = tl.where((i > tl.load(Spoiled + at))[:, None], float("nan"), dg)
    to_g = row // heads * length * heads * DK + row % heads * DK
    store_rows(Grad_g + to_g, dg, chunk * C + i, length, heads * DK, d, DK, WK)
