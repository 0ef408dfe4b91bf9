"""The recurrence by chunks of C tokens, in two kernels: what does not depend on the state, and the pass over the states.

Of a chunk: c = cumsum(g), e = exp(c), r = exp(c at the end - c), decay(i, j) = exp(cᵢ - cⱼ) for i ≥ j, S the state before it. a and b are
what rows of k and q are multiplied by: their norms, and the scale. k and q stand for themselves here, as they lie in memory.

    A = stril(aᵢ aⱼ decay kᵢ·kⱼ);  T = (1 + β A)⁻¹;  P = tril(bᵢ aⱼ decay qᵢ·kⱼ)            `head_chunks`: a chunk, a head
    X = v - e a k S;  U = T β X, or β v;  o = e b q S + P U;  S ← exp(c at the end) S + kᵀ r a U    `state_pass`: a head, columns of v

W and U of the WY form do not go through memory. The state of each chunk goes to memory for gradients alone.
"""

from __future__ import annotations

import triton.language as tl

from attn_compiler.lowerings.linear.kernels.tiles import (
    exact_sums,
    first_bad,
    has_bad,
    inverse,
    norm_factor,
    numbers,
    of_state,
    pairs_of,
    product,
    rows,
    store_parts,
    store_rows,
    store_state,
    stored_product,
    without_bad,
)
from attn_compiler.lowerings.shared.kernels.releases_assembler_sm90 import assembled_jit


@assembled_jit(do_not_specialize=["length", "chunks"])
def head_chunks(
    Q, K, V, G, Beta, Inverse, Pairs, Sums, Norms, Factors,
    heads, group, length, chunks, scale, eps,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, g_b, g_s, g_h, beta_b, beta_s, beta_h,
    C: tl.constexpr, DK: tl.constexpr, WK: tl.constexpr, DV: tl.constexpr, WV: tl.constexpr, DELTA: tl.constexpr, NORM: tl.constexpr,
    PARTS: tl.constexpr, PLANES: tl.constexpr, OF_PAIRS: tl.constexpr,
):  # fmt: skip
    """Grid: (chunks B H,). Q, K: (B, S, H / group, DK). V: (B, S, H, DV). G, Beta: (B, S, H). Inverse (of DELTA), Pairs (or None): T, P,
    (B, H, chunks, C, C). Sums: c in two parts, (B, H, chunks, 2, C). Norms: b and a, (B, H, chunks, 2, C). Factors: e b, e a, r a, β, and
    exp(c at the end), but first 1 if β v or T holds a number that is not finite, else 0; (B, H, chunks, 5, C). All results in float32."""
    at = tl.program_id(0).to(tl.int64)
    row, chunk = at // chunks, (at % chunks).to(tl.int32)
    batch, head = row // heads, row % heads
    i, d = tl.arange(0, C), tl.arange(0, WK)
    token = chunk * C + i
    # All are loaded before any is used.
    g = numbers(G + batch * g_b + head * g_h, token, length, g_s)
    beta = numbers(Beta + batch * beta_b + head * beta_h, token, length, beta_s)
    if Pairs is not None:
        k = rows(K + batch * k_b + head // group * k_h, token, length, k_s, d, DK, WK)
        q = rows(Q + batch * q_b + head // group * q_h, token, length, q_s, d, DK, WK)
    v = rows(V + batch * v_b + head * v_h, token, length, v_s, tl.arange(0, WV), DV, WV)
    is_bad = has_bad(v.to(tl.float32) * beta[:, None])
    c, less = exact_sums(g)
    tl.store(Sums + at * 2 * C + i, c)
    tl.store(Sums + at * 2 * C + C + i, less)
    a, b = i * 0.0 + 1.0, i * 0.0 + scale
    if Pairs is not None:
        a, b = norm_factor(k, eps, NORM), norm_factor(q, eps, NORM) * scale
        tl.store(Norms + at * 2 * C + i, b)
        tl.store(Norms + at * 2 * C + C + i, a)
    end = tl.sum(tl.where(i == C - 1, c, 0.0), 0)
    rest = (end - c) + (tl.sum(tl.where(i == C - 1, less, 0.0), 0) - less)
    Factors += at * 5 * C + i
    tl.store(Factors, tl.exp(c) * b)
    tl.store(Factors + C, tl.exp(c) * a)
    tl.store(Factors + 2 * C, tl.exp(rest) * a)
    tl.store(Factors + 3 * C, beta)
    if Pairs is not None:
        is_seen = i[:, None] >= i[None, :]
        decay = tl.where(is_seen, tl.exp(tl.where(is_seen, pairs_of(c, less), 0.0)), 0.0) * a[None, :]
        pairs = tl.where(is_seen, product(q, tl.trans(k), PARTS) * decay * b[:, None], 0.0)
        of_pairs, plane = at * PLANES * C * C + i[:, None] * C + i[None, :], C * C
        store_parts(Pairs, of_pairs, plane, pairs, OF_PAIRS)
    if DELTA:
        lower = product(k, tl.trans(k), PARTS) * decay * (beta * a)[:, None]
        lower = tl.where(i[:, None] > i[None, :], lower, 0.0)
        found = inverse(lower, Inverse + at * PLANES * C * C, C, PARTS)
        store_parts(Inverse, of_pairs, plane, found, PARTS)
        is_bad = is_bad | has_bad(found)
    tl.store(Factors + 4 * C, tl.where(i == 0, tl.where(is_bad, 1.0, 0.0), tl.exp(end)))


@assembled_jit(do_not_specialize=["length", "chunks", "pieces", "of_piece"])
def state_pass(
    Q, K, V, Skip, Inverse, Pairs, Sums, Factors, Queries, Early, Later, First, Out, Last, States, Values, Locals,
    heads, group, length, chunks, pieces, of_piece,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, first_b, first_h, first_k, first_v, first_p,
    last_k, last_v,
    C: tl.constexpr, DK: tl.constexpr, WK: tl.constexpr, DV: tl.constexpr, WV: tl.constexpr, BV: tl.constexpr, WIDE: tl.constexpr,
    DELTA: tl.constexpr, CHANNEL: tl.constexpr, PARTS: tl.constexpr, PLANES: tl.constexpr, OF_OUT: tl.constexpr,
):  # fmt: skip
    """Grid: (WIDE / BV pieces B H,); a sequence has `pieces` of `of_piece` chunks. V: (B, S, H, DV). Out: the same, contiguous, or None.
    Sums: with CHANNEL (B, H, chunks, C, WK). Skip: (H,), the factor of v that is added to the result, or None. First: the state before
    each piece, or None. Last: (B, H, ...), contiguous, or None. States: the state before each chunk, (B, H, chunks, DK, DV) in float32, or
    None. Values: u with DELTA, (B, H, chunks, C, DV) in float32, or None. Queries, Early, Later: of CHANNEL, as in channel.py. Locals: the
    operand of pieces.py, or None: (B, H, pieces, WK, WIDE), each piece's last state by itself, and in columns from WV on its matrix M.
    OF_OUT: PARTS of products for the result alone. Others: as in `head_chunks`."""
    columns: tl.constexpr = WIDE // BV
    row, piece = (tl.program_id(0) // columns // pieces).to(tl.int64), tl.program_id(0) // columns % pieces
    batch, head = row // heads, row % heads
    i, d, e = tl.arange(0, C), tl.arange(0, WK), tl.program_id(0) % columns * BV + tl.arange(0, BV)
    Q += batch * q_b + head // group * q_h
    K += batch * k_b + head // group * k_h
    V += batch * v_b + head * v_h
    # Tiles are turned: what is computed is rows of a product with keys from memory, and goes from product to product in registers.
    if Locals is not None:
        state = tl.where(e[:, None] - WV == d[None, :], 1.0, 0.0)
    elif First is not None:
        at_first = First + batch * first_b + head * first_h + piece * first_p
        state = tl.trans(of_state(at_first, d, e, first_k, first_v, DK, WK, DV, WV))
    else:
        state = tl.zeros([BV, WK], tl.float32)
    for chunk in tl.range(piece * of_piece, tl.minimum(piece * of_piece + of_piece, chunks)):
        at = row * chunks + chunk
        token = chunk * C + i
        if States is not None:
            store_state(States + at * DK * DV, tl.trans(state), d, e, DV, 1, DK, WK, DV, WV)
        of_pairs, plane = at * PLANES * C * C + i[:, None] * C + i[None, :], C * C
        of_keys, of_all = at * PLANES * C * WK + i[:, None] * WK + d[None, :], C * WK
        # What is needed later is loaded later: registers are scarce.
        factors = Factors + at * 5 * C + i
        if CHANNEL:
            seen = stored_product(state, Early, of_keys, of_all, True, PARTS)
            if Out is not None:
                out = stored_product(state, Queries, of_keys, of_all, True, OF_OUT)
        else:
            # Of no product, so not prefetched: they arrive while others are computed.
            grown, end = tl.load(factors), tl.load(Sums + at * 2 * C + C - 1)
            k = rows(K, token, length, k_s, d, DK, WK)
            if DELTA:
                seen = product(state, tl.trans(k), PARTS) * tl.load(factors + C)[None, :]
            if Out is not None:
                q = rows(Q, token, length, q_s, d, DK, WK)
                out = product(state, tl.trans(q), OF_OUT) * grown[None, :]
        v = tl.trans(rows(V, token, length, v_s, e, DV, WIDE)).to(tl.float32)
        u = (v - seen if DELTA else v) * tl.load(factors + 3 * C)[None, :]
        # A number that is not finite reaches no token before its own.
        is_bad, first = tl.load(Factors + at * 5 * C + 4 * C) != 0.0, tl.zeros([BV], tl.int32) + C
        if DELTA:
            if is_bad:
                first = first_bad(tl.trans(u), i, C)
                u = without_bad(u)
            u = stored_product(u, Inverse, of_pairs, plane, True, PARTS)
            if is_bad:
                u = tl.where(i[None, :] >= first[:, None], float("nan"), u)
            if Values is not None:
                store_rows(Values + at * C * DV, tl.trans(u), i, C, DV, e, DV, WV)
        clean = u
        if is_bad:
            first = first_bad(tl.trans(u), i, C)
            clean = without_bad(u)
        if Out is not None:
            out = stored_product(clean, Pairs, of_pairs, plane, True, OF_OUT, out)
            if is_bad:
                out = tl.where(i[None, :] >= first[:, None], float("nan"), out)
            if Skip is not None:
                out += v * tl.load(Skip + head).to(tl.float32)
            to_out = batch * length * heads * DV + head * DV
            store_rows(Out + to_out, tl.trans(out), token, length, heads * DV, e, DV, WV)
        if CHANNEL:
            kept = state * tl.exp(tl.load(Sums + at * C * WK + (C - 1) * WK + d))[None, :]
            state = stored_product(u, Later, of_keys, of_all, False, PARTS, kept)
        else:
            kept = state * tl.exp(end)
            state = product(u * tl.load(factors + 2 * C)[None, :], k, PARTS, kept)
    if Locals is not None:
        at_local = Locals + (row * pieces + piece) * WK * WIDE
        store_state(at_local, tl.trans(state), d, e, WIDE, 1, WK, WK, WIDE, WIDE)
    if Last is not None and piece == pieces - 1:
        store_state(Last + row * DK * DV, tl.trans(state), d, e, last_k, last_v, DK, WK, DV, WV)


@assembled_jit
def one_token(
    Q, K, V, G, Beta, Skip, First, Out, Last,
    heads, group, scale, eps,
    q_b, q_h, k_b, k_h, v_b, v_h, g_b, g_h, beta_b, beta_h, first_b, first_h, first_k, first_v, last_k, last_v,
    DK: tl.constexpr, WK: tl.constexpr, DV: tl.constexpr, WV: tl.constexpr, BV: tl.constexpr,
    DELTA: tl.constexpr, CHANNEL: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Compute one token. Grid: (WV / BV B H,). Tensors: as in `state_pass`, of one token."""
    columns: tl.constexpr = WV // BV
    row = (tl.program_id(0) // columns).to(tl.int64)
    batch, head = row // heads, row % heads
    d, e = tl.arange(0, WK), tl.program_id(0) % columns * BV + tl.arange(0, BV)
    if First is not None:
        state = of_state(First + batch * first_b + head * first_h, d, e, first_k, first_v, DK, WK, DV, WV)
    else:
        state = tl.zeros([WK, BV], tl.float32)
    q = tl.load(Q + batch * q_b + head // group * q_h + d, mask=d < DK, other=0.0).to(tl.float32)
    k = tl.load(K + batch * k_b + head // group * k_h + d, mask=d < DK, other=0.0).to(tl.float32)
    v = tl.load(V + batch * v_b + head * v_h + e, mask=e < DV, other=0.0).to(tl.float32)
    beta = tl.load(Beta + batch * beta_b + head * beta_h).to(tl.float32)
    if NORM:
        q *= tl.rsqrt(tl.sum(q * q, 0) + eps)
        k *= tl.rsqrt(tl.sum(k * k, 0) + eps)
    if CHANNEL:
        g = tl.load(G + batch * g_b + head * g_h + d, mask=d < DK, other=0.0).to(tl.float32)
        state *= tl.exp(g)[:, None]
    else:
        state *= tl.exp(tl.load(G + batch * g_b + head * g_h).to(tl.float32))
    u = v - tl.sum(state * k[:, None], 0) if DELTA else v
    state += k[:, None] * (u * beta)[None, :]
    out = tl.sum(state * q[:, None], 0) * scale
    if Skip is not None:
        out += v * tl.load(Skip + head).to(tl.float32)
    tl.store(Out + row * DV + e, out.to(Out.dtype.element_ty), mask=e < DV)
    store_state(Last + row * DK * DV, state, d, e, last_k, last_v, DK, WK, DV, WV)
