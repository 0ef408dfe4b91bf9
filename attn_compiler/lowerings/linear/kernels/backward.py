"""Gradients of the recurrence by chunks: the pass backwards over the states' gradients, then each chunk by itself.

Words as in forward.py; D is the gradient of the state after a chunk, do that of o.

    du = Pᵀ do + r a k D;  dy = Tᵀ du;  dx = β dy
    dS = exp(c at the end) D + qᵀ (b e do) - kᵀ (a e dx)                                  from chunk to chunk, columns of v by themselves
    dP = do uᵀ;  dL = -stril(dy uᵀ), of L = β A;  dA = β decay dL                         sums over columns of v
    of b q:  e do Sᵀ + (decay dP) a k
    of a k:  (decay dP)ᵀ b q + r u Dᵀ - e dx Sᵀ + (dA + dAᵀ) a k
    dβ = rows(dy X) + rows(dL A);  dc = rows(dP P + dL L) - columns(dP P + dL L) + b q (e do Sᵀ) - dx (e a k S) - u (r a k D)
    dc at the end += sum(u (r a k D)) + exp(c at the end) sum(D S);  dg = dc summed from a chunk's end

Without the delta rule u = β v, dv = β du and dβ = rows(du v).
"""

from __future__ import annotations

import triton.language as tl

from attn_compiler.lowerings.linear.kernels.tiles import (
    has_bad,
    last_bad,
    load_parts,
    norm_factor,
    numbers,
    of_state,
    pairs_of,
    product,
    rows,
    store_rows,
    store_state,
    stored_product,
    sums_of,
    without_bad,
)
from attn_compiler.lowerings.shared.kernels.releases_assembler_sm90 import assembled_jit


@assembled_jit(do_not_specialize=["length", "chunks", "pieces", "of_piece"])
def reverse_pass(
    Q, K, Grad, Inverse, Pairs, Sums, Factors, Queries, Early, Later, Grad_last, Afters, Grad_values, Grad_first, Locals,
    heads, group, length, chunks, pieces, of_piece,
    q_b, q_s, q_h, k_b, k_s, k_h, last_b, last_h, last_k, last_v, last_p, first_b, first_h, first_k, first_v,
    C: tl.constexpr, DK: tl.constexpr, WK: tl.constexpr, DV: tl.constexpr, WV: tl.constexpr, BV: tl.constexpr,
    DELTA: tl.constexpr, CHANNEL: tl.constexpr, PARTS: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """Grid: (WV / BV pieces B H,). Grad: of o, (B, S, H, DV), contiguous. Grad_last: of the state after each piece. Afters: D of each
    chunk, (B, H, chunks, DK, DV) in float32. Grad_values: dy with DELTA, (B, H, chunks, C, DV) in float32. Grad_first: of the first state,
    or None. Locals: None, or the gradient of each piece's first state by itself, (B, H, pieces, WK, WV); then nothing else is stored.
    Others: as in forward.py."""
    columns: tl.constexpr = WV // BV
    row, piece = (tl.program_id(0) // columns // pieces).to(tl.int64), tl.program_id(0) // columns % pieces
    batch, head = row // heads, row % heads
    i, d, e = tl.arange(0, C), tl.arange(0, WK), tl.program_id(0) % columns * BV + tl.arange(0, BV)
    Q += batch * q_b + head // group * q_h
    K += batch * k_b + head // group * k_h
    Grad += batch * length * heads * DV + head * DV
    # Tiles are turned, as in forward.py.
    if Locals is not None:
        after = tl.zeros([BV, WK], tl.float32)
    else:
        at_last = Grad_last + batch * last_b + head * last_h + piece * last_p
        after = tl.trans(of_state(at_last, d, e, last_k, last_v, DK, WK, DV, WV))
    end_chunk = tl.minimum(piece * of_piece + of_piece, chunks)
    for step in tl.range(0, end_chunk - piece * of_piece):
        chunk = end_chunk - 1 - step
        at = row * chunks + chunk
        token = chunk * C + i
        if Locals is None:
            store_state(Afters + at * DK * DV, tl.trans(after), d, e, DV, 1, DK, WK, DV, WV)
        of_keys, of_all = at * PLANES * C * WK + i[:, None] * WK + d[None, :], C * WK
        factors = Factors + at * 5 * C + i
        do = tl.trans(rows(Grad, token, length, heads * DV, e, DV, WV))
        if CHANNEL:
            before = after * tl.exp(tl.load(Sums + at * C * WK + (C - 1) * WK + d))[None, :]
            before = stored_product(do, Queries, of_keys, of_all, False, PARTS, before)
        else:
            q = rows(Q, token, length, q_s, d, DK, WK)
            before = after * tl.exp(tl.load(Sums + at * 2 * C + C - 1))
            before = product(do.to(tl.float32) * tl.load(factors)[None, :], q, PARTS, before)
        if DELTA:
            of_pairs, plane = at * PLANES * C * C + i[:, None] * C + i[None, :], C * C
            # A gradient that is not finite reaches no token after its own.
            is_bad, last, clean = has_bad(do.to(tl.float32)), tl.zeros([BV], tl.int32) - 1, do
            if is_bad:
                last = last_bad(tl.trans(do).to(tl.float32), i)
                clean = without_bad(do.to(tl.float32)).to(do.dtype)
            du = stored_product(clean, Pairs, of_pairs, plane, False, PARTS)
            if CHANNEL:
                du = stored_product(after, Later, of_keys, of_all, True, PARTS, du)
            else:
                k = rows(K, token, length, k_s, d, DK, WK)
                du += product(after, tl.trans(k), PARTS) * tl.load(factors + 2 * C)[None, :]
            dx = stored_product(du, Inverse, of_pairs, plane, False, PARTS)
            if is_bad:
                dx = tl.where(i[None, :] <= last[:, None], float("nan"), dx)
            if Locals is None:
                store_rows(Grad_values + at * C * DV, tl.trans(dx), i, C, DV, e, DV, WV)
            dx *= tl.load(factors + 3 * C)[None, :]
            if CHANNEL:
                before -= stored_product(dx, Early, of_keys, of_all, False, PARTS)
            else:
                before -= product(dx * tl.load(factors + C)[None, :], k, PARTS)
        after = before
    if Locals is not None:
        at_local = Locals + (row * pieces + piece) * WK * WV
        store_state(at_local, tl.trans(after), d, e, WV, 1, WK, WK, WV, WV)
    if Grad_first is not None and piece == 0:
        at_first = Grad_first + batch * first_b + head * first_h
        store_state(at_first, tl.trans(after), d, e, first_k, first_v, DK, WK, DV, WV)


@assembled_jit(do_not_specialize=["length", "chunks"])
def value_gradients(
    K, V, Beta, Skip, Grad, Pairs, Factors, Afters, Grad_v, Grad_beta, Part_skip,
    heads, group, length, chunks, k_b, k_s, k_h, v_b, v_s, v_h, beta_b, beta_s, beta_h,
    C: tl.constexpr, DK: tl.constexpr, WK: tl.constexpr, DV: tl.constexpr, WV: tl.constexpr, BV: tl.constexpr,
    PARTS: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of v, beta and skip without the delta rule. Grid: (chunks B H,). Grad_v: (B, S, H, DV). Grad_beta: (B, S, H).
    Part_skip: (B, H, chunks). All contiguous. Others: as in `reverse_pass`."""
    at = tl.program_id(0).to(tl.int64)
    row, chunk = at // chunks, (at % chunks).to(tl.int32)
    batch, head = row // heads, row % heads
    i, d = tl.arange(0, C), tl.arange(0, WK)
    token = chunk * C + i
    k = rows(K + batch * k_b + head // group * k_h, token, length, k_s, d, DK, WK)
    of_pairs, plane = at * PLANES * C * C + i[:, None] * C + i[None, :], C * C
    late = tl.load(Factors + at * 5 * C + 2 * C + i)
    beta = numbers(Beta + batch * beta_b + head * beta_h, token, length, beta_s)
    dbeta, dskip = tl.zeros([C], tl.float32), 0.0
    to_v = batch * length * heads * DV + head * DV
    for column in tl.range(0, WV, BV):
        e = column + tl.arange(0, BV)
        after = of_state(Afters + at * DK * DV, d, e, DV, 1, DK, WK, DV, WV)
        do = rows(Grad + to_v, token, length, heads * DV, e, DV, WV)
        v = rows(V + batch * v_b + head * v_h, token, length, v_s, e, DV, WV).to(tl.float32)
        clean = without_bad(do.to(tl.float32)).to(do.dtype)
        dy = tl.trans(stored_product(tl.trans(clean), Pairs, of_pairs, plane, False, PARTS))
        dy = tl.where(i[:, None] <= last_bad(do.to(tl.float32), i)[None, :], float("nan"), dy)
        dy += product(k, after, PARTS) * late[:, None]
        dbeta += tl.sum(dy * v, 1)
        dv = dy * beta[:, None]
        if Skip is not None:
            dskip += tl.sum(tl.sum(do.to(tl.float32) * v, 1), 0)
            dv += do.to(tl.float32) * tl.load(Skip + head).to(tl.float32)
        store_rows(Grad_v + to_v, dv, token, length, heads * DV, e, DV, WV)
    to_number = (batch * length + token) * heads + head
    tl.store(Grad_beta + to_number, dbeta.to(Grad_beta.dtype.element_ty), mask=token < length)
    if Skip is not None:
        tl.store(Part_skip + at, dskip)


@assembled_jit(do_not_specialize=["length", "chunks"])
def head_gradients(
    Q, K, V, Beta, Grad, Pairs, Sums, Norms, States, Afters, Values, Grad_values, Part_q, Part_k, Grad_v, Part_g, Part_beta,
    heads, group, length, chunks, shares_g,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, beta_b, beta_s, beta_h,
    C: tl.constexpr, DK: tl.constexpr, WK: tl.constexpr, DV: tl.constexpr, WV: tl.constexpr, BV: tl.constexpr, DS: tl.constexpr,
    DELTA: tl.constexpr, PARTS: tl.constexpr, PLANES: tl.constexpr, OF_ROWS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a chunk with a decay a head, for DS channels of k. Grid: (WK / DS chunks B H,). Part_q, Part_k: of b q and
    a k, (B, S, H, DK) in float32. With DELTA, Grad_v: (B, S, H, DV), and Part_beta: as Part_g. Part_g: sums over DS channels, (WK / DS, B,
    S, H), each `shares_g` numbers after the one before. All contiguous. OF_ROWS: PARTS of products for the gradients of q and k alone.
    Others: as in `reverse_pass`."""
    share = tl.program_id(0) % (WK // DS)
    at = (tl.program_id(0) // (WK // DS)).to(tl.int64)
    row, chunk = at // chunks, (at % chunks).to(tl.int32)
    batch, head = row // heads, row % heads
    i, d = tl.arange(0, C), share * DS + tl.arange(0, DS)
    token = chunk * C + i
    is_seen, is_before = i[:, None] >= i[None, :], i[:, None] > i[None, :]
    # The first share adds the terms that are no sums over channels.
    once = tl.where(share == 0, 1.0, 0.0)
    q = rows(Q + batch * q_b + head // group * q_h, token, length, q_s, d, DK, WK)
    k = rows(K + batch * k_b + head // group * k_h, token, length, k_s, d, DK, WK)
    of_pairs, plane = at * PLANES * C * C + i[:, None] * C + i[None, :], C * C
    c, end, rest = sums_of(Sums + at * 2 * C, i, C)
    b, a = tl.load(Norms + at * 2 * C + i), tl.load(Norms + at * 2 * C + C + i)
    beta = numbers(Beta + batch * beta_b + head * beta_h, token, length, beta_s)
    early, late = tl.exp(c), tl.exp(rest)
    of_q, of_u, of_dy = tl.zeros([C, DS], tl.float32), tl.zeros([C, DS], tl.float32), tl.zeros([C, DS], tl.float32)
    dp, dl = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    dbeta, dend = tl.zeros([C], tl.float32), 0.0
    to_v = batch * length * heads * DV + head * DV
    for column in tl.range(0, WV, BV):
        e = column + tl.arange(0, BV)
        state = of_state(States + at * DK * DV, d, e, DV, 1, DK, WK, DV, WV)
        after = of_state(Afters + at * DK * DV, d, e, DV, 1, DK, WK, DV, WV)
        dend += tl.sum(tl.sum(after * state, 1), 0)
        do = rows(Grad + to_v, token, length, heads * DV, e, DV, WV)
        v = rows(V + batch * v_b + head * v_h, token, length, v_s, e, DV, WV)
        of_q = product(do, tl.trans(state), PARTS, of_q)
        if DELTA:
            u = rows(Values + at * C * DV, i, C, DV, e, DV, WV)
            dy = rows(Grad_values + at * C * DV, i, C, DV, e, DV, WV)
            dl = product(dy, tl.trans(u), PARTS, dl)
            dp = product(do, tl.trans(u), PARTS, dp)
            of_u = product(u, tl.trans(after), PARTS, of_u)
            of_dy = product(dy, tl.trans(state), PARTS, of_dy)
            dbeta += tl.sum(dy * v.to(tl.float32), 1) * once
            if share == 0:
                store_rows(Grad_v + to_v, dy * beta[:, None], token, length, heads * DV, e, DV, WV)
        else:
            dp = product(do, tl.trans(v), PARTS, dp)
            of_u = product(v, tl.trans(after), PARTS, of_u)
    if DELTA:
        # dy (e a k S), which beta's gradient lacks so far.
        lost = tl.sum(k.to(tl.float32) * of_dy, 1) * (early * a)
        dbeta -= lost
        dk = of_u * late[:, None] - of_dy * (early * beta)[:, None]
        kept = tl.sum(k.to(tl.float32) * of_u, 1) * (late * a)
        dc = -lost * beta
    else:
        dp *= beta[None, :]
        dk = of_u * (late * beta)[:, None]
        kept = tl.sum(k.to(tl.float32) * dk, 1) * a
        dc = tl.zeros([C], tl.float32)
    dq = of_q * early[:, None]
    dc += tl.sum(q.to(tl.float32) * dq, 1) * b
    less = tl.load(Sums + at * 2 * C + C + i)
    decay = tl.where(is_seen, tl.exp(tl.where(is_seen, pairs_of(c, less), 0.0)), 0.0)
    both = tl.where(is_before, dp * load_parts(Pairs, of_pairs, plane, PARTS), 0.0) * once
    dp = tl.where(is_seen, dp * decay, 0.0)
    dq = product(dp * a[None, :], k, OF_ROWS, dq)
    dk = product(tl.trans(dp * b[:, None]), q, OF_ROWS, dk)
    if DELTA:
        dl = tl.where(is_before, -dl * decay, 0.0)
        of_lower = dl * product(k, tl.trans(k), PARTS) * (a[:, None] * a[None, :])
        dbeta += tl.sum(of_lower, 1)
        both += of_lower * beta[:, None]
        dl *= beta[:, None]
        dk = product((dl + tl.trans(dl)) * a[None, :], k, OF_ROWS, dk)
    # A decay lies between all tokens before it and all others of the chunk. Nothing is added that would be subtracted again.
    between = tl.cumsum(both, 0, reverse=True) + kept[None, :]
    dg = tl.cumsum(dc, 0, reverse=True) + tl.sum(tl.where(is_before, between, 0.0), 1) + dend * tl.exp(end)
    to_number = share * shares_g + (batch * length + token) * heads + head
    tl.store(Part_g + to_number, dg.to(Part_g.dtype.element_ty), mask=token < length)
    if DELTA:
        tl.store(Part_beta + to_number, dbeta.to(Part_beta.dtype.element_ty), mask=token < length)
    to_part = batch * length * heads * DK + head * DK
    store_rows(Part_q + to_part, dq, token, length, heads * DK, d, DK, WK)
    store_rows(Part_k + to_part, dk, token, length, heads * DK, d, DK, WK)


@assembled_jit(do_not_specialize=["length", "chunks"])
def row_gradients(
    X, Part, Grad_x, groups, length, chunks, scale, eps, x_b, x_s, x_h,
    C: tl.constexpr, DK: tl.constexpr, WK: tl.constexpr, NORM: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of q or k from that of their normalised rows. Grid: (chunks B groups,). X: (B, S, groups, DK). Part: of the
    PIECES heads of each group, (B, S, groups PIECES, DK) in float32. Grad_x: (B, S, groups, DK), contiguous."""
    row = (tl.program_id(0) // chunks).to(tl.int64)
    batch, group = row // groups, row % groups
    token, d = tl.program_id(0) % chunks * C + tl.arange(0, C), tl.arange(0, WK)
    x = rows(X + batch * x_b + group * x_h, token, length, x_s, d, DK, WK).to(tl.float32)
    Part += (batch * length * groups + group) * PIECES * DK
    grad = rows(Part, token, length, groups * PIECES * DK, d, DK, WK)
    for piece in tl.range(1, PIECES):
        grad += rows(Part + piece * DK, token, length, groups * PIECES * DK, d, DK, WK)
    grad *= scale
    if NORM:
        factor = norm_factor(x, eps, NORM)
        x *= factor[:, None]
        grad = (grad - x * tl.sum(x * grad, 1)[:, None]) * factor[:, None]
    store_rows(Grad_x + (batch * length * groups + group) * DK, grad, token, length, groups * DK, d, DK, WK)
