"""Results of queries without keys, computed after a kernel: the mean of v, and its gradients.

Such a row has an lse of -inf; or MARKED, inf: for those the kernel computed the mean itself (forward.py, MARKS_LOW). Most batches have
none, so every kernel here checks the lse first, and then reads nothing else. The sums of a head are made in CHUNKS parts, by a program
each, and always added up in their order. With n keys, a scale s, and g the gradient of a row i without keys:

    out_i = Σ_j v_j / n,    dv_j += Σ_i g_i / n,
    dq_i = s/n · g_i Σ_j (v_j - mean) k_jᵀ,    dk_j += s/n · (v_j - mean) Σ_i g_i q_iᵀ

q and k have a gradient there since the number that masks was added to the scores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_compiler.lowerings.shared.kernels.tile_parts import at_head

#: numbers that no kernel is specialised on
_ANY = ("group", "seqlen_q", "seqlen_kv", "scale")


@triton.jit
def _without_keys(of_head, rows, seqlen_q, MARKED: tl.constexpr):
    """Return which of these rows have no key. of_head: the lse of a head."""
    return tl.load(of_head + rows, mask=rows < seqlen_q, other=0.0) == (float("inf") if MARKED else float("-inf"))


@triton.jit
def _of_some_head(Lse, first_head, group, seqlen_q, SCAN: tl.constexpr, MARKED: tl.constexpr):
    """Return a number above 0 if any row of these heads has no key: the count of blocks of rows with one."""
    found = 0
    for member in range(group):
        of_head = Lse + (first_head + member).to(tl.int64) * seqlen_q
        for start in range(0, seqlen_q, SCAN):
            found += tl.max(_without_keys(of_head, start + tl.arange(0, SCAN), seqlen_q, MARKED).to(tl.int32), 0)
    return found


@triton.jit
def _rows_of(base, rows, end, stride, FIRST, PART: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Load (M, PART) elements of these rows; zeros beyond the end and the head dim."""
    dims = FIRST + tl.arange(0, PART)[None, :]
    at = base + rows.to(tl.int64)[:, None] * stride + dims
    return tl.load(at, mask=(rows < end)[:, None] & (dims < HEAD_DIM), other=0.0)


@triton.jit
def _product(rows, matrix):
    """Multiply rows by a float32 matrix. Beside half precision the matrix is split into its rounding and the remainder."""
    if rows.dtype == tl.float32:
        found = tl.dot(rows, matrix, input_precision="ieee")
    else:
        high = matrix.to(rows.dtype)
        low = (matrix - high.to(tl.float32)).to(rows.dtype)
        found = tl.dot(rows, low, tl.dot(rows, high))
    return found


@triton.jit
def _sum_of_parts(Parts, CHUNKS: tl.constexpr, SIZE: tl.constexpr):
    """Return (SIZE,): the sum of CHUNKS consecutive vectors."""
    total = tl.zeros([SIZE], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        total += tl.load(Parts + chunk * SIZE + tl.arange(0, SIZE))
    return total


@triton.jit(do_not_specialize=_ANY)
def attention_sum_values(
    V, Lse, Sums, stride_v, group, seqlen_q, seqlen_kv,
    SCAN: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, HEAD_DIM_V: tl.constexpr, V_ALL: tl.constexpr,
    MARKED: tl.constexpr,
):  # fmt: skip
    """Compute Sums: float32 (B, Hkv, CHUNKS, V_ALL), for heads that have a row without keys. Grid: (CHUNKS, Hkv, B)."""
    chunk, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    of_batch = batch * tl.num_programs(1) + head
    if _of_some_head(Lse, of_batch * group, group, seqlen_q, SCAN, MARKED) > 0:
        each = tl.cdiv(tl.cdiv(seqlen_kv, BLOCK), CHUNKS) * BLOCK
        V = at_head(V, batch, head, stride_v.b, stride_v.h, 1)
        total = tl.zeros([V_ALL], tl.float32)
        for start in range(chunk * each, tl.minimum(chunk * each + each, seqlen_kv), BLOCK):
            rows = start + tl.arange(0, BLOCK)
            total += tl.sum(_rows_of(V, rows, seqlen_kv, stride_v.s, 0, V_ALL, HEAD_DIM_V).to(tl.float32), 0)
        tl.store(Sums + (of_batch.to(tl.int64) * CHUNKS + chunk) * V_ALL + tl.arange(0, V_ALL), total)


@triton.jit(do_not_specialize=_ANY)
def attention_fill_rows(
    Out, Lse, Sums, stride_o, group, seqlen_q, seqlen_kv,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr, HEAD_DIM_V: tl.constexpr, V_ALL: tl.constexpr,
    MARKED: tl.constexpr,
):  # fmt: skip
    """Write the mean of v to rows without keys. Grid: (blocks of BLOCK queries, Hq, B). Sums: as above."""
    head, batch = tl.program_id(1), tl.program_id(2)
    heads_q = tl.num_programs(1)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    without = _without_keys(Lse + (batch * heads_q + head).to(tl.int64) * seqlen_q, rows, seqlen_q, MARKED)
    if tl.max(without.to(tl.int32), 0) > 0:
        of_batch = batch * (heads_q // group) + head // group
        mean = _sum_of_parts(Sums + of_batch.to(tl.int64) * CHUNKS * V_ALL, CHUNKS, V_ALL) / seqlen_kv
        dims = tl.arange(0, V_ALL)[None, :]
        at = at_head(Out, batch, head, stride_o.b, stride_o.h, 1) + rows.to(tl.int64)[:, None] * stride_o.s + dims
        filled = tl.zeros([BLOCK, V_ALL], tl.float32) + mean[None, :]
        tl.store(at, filled.to(Out.dtype.element_ty), mask=without[:, None] & (dims < HEAD_DIM_V))


@triton.jit(do_not_specialize=_ANY)
def attention_sum_rows(
    Q, GradOut, Lse, Found, Sums, Products, stride_q, stride_g, group, seqlen_q,
    SCAN: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
    HEAD_DIM_QK: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, HEAD_DIM_V: tl.constexpr, V_ALL: tl.constexpr,
    MARKED: tl.constexpr,
):  # fmt: skip
    """Sum over rows without keys. Grid: (CHUNKS, Hkv · PARTS, B).

    Found: int32 (B, Hkv, CHUNKS), whether there are any.
    Sums: float32 (B, Hkv, CHUNKS, V_ALL), Σ g_i, where there are.
    Products: float32 (B, Hkv, CHUNKS, PARTS, V_ALL, PART), Σ g_i q_iᵀ.
    """
    chunk, head, part, batch = tl.program_id(0), tl.program_id(1) // PARTS, tl.program_id(1) % PARTS, tl.program_id(2)
    of_batch = batch * (tl.num_programs(1) // PARTS) + head
    each = tl.cdiv(tl.cdiv(seqlen_q, SCAN), CHUNKS) * SCAN
    total = tl.zeros([V_ALL], tl.float32)
    product = tl.zeros([V_ALL, PART], tl.float32)
    found = 0
    for member in range(group):
        of_head = Lse + (of_batch * group + member).to(tl.int64) * seqlen_q
        grads = at_head(GradOut, batch, head * group + member, stride_g.b, stride_g.h, 1)
        for begin in range(chunk * each, tl.minimum(chunk * each + each, seqlen_q), SCAN):
            here = tl.max(_without_keys(of_head, begin + tl.arange(0, SCAN), seqlen_q, MARKED).to(tl.int32), 0)
            found += here
            if here > 0:
                for start in range(begin, tl.minimum(begin + SCAN, seqlen_q), BLOCK):
                    rows = start + tl.arange(0, BLOCK)
                    without = _without_keys(of_head, rows, seqlen_q, MARKED)
                    grad = _rows_of(grads, rows, seqlen_q, stride_g.s, 0, V_ALL, HEAD_DIM_V)
                    grad = tl.where(without[:, None], grad, 0.0).to(grad.dtype)
                    total += tl.sum(grad.to(tl.float32), 0)
                    queries = at_head(Q, batch, head * group + member, stride_q.b, stride_q.h, 1)
                    q = _rows_of(queries, rows, seqlen_q, stride_q.s, part * PART, PART, HEAD_DIM_QK)
                    q = tl.where(without[:, None], q, 0.0).to(q.dtype)
                    product = tl.dot(tl.trans(grad), q, product, input_precision="ieee")
    at = of_batch.to(tl.int64) * CHUNKS + chunk
    tl.store(Found + at, found)
    if found > 0:
        tl.store(Sums + at * V_ALL + tl.arange(0, V_ALL), total)
        here = tl.arange(0, V_ALL)[:, None] * PART + tl.arange(0, PART)[None, :]
        tl.store(Products + (at * PARTS + part) * V_ALL * PART + here, product)


@triton.jit(do_not_specialize=_ANY)
def attention_sum_keys(
    K, V, Found, Sums, Products, stride_k, stride_v, seqlen_kv,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
    HEAD_DIM_QK: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, HEAD_DIM_V: tl.constexpr, V_ALL: tl.constexpr,
):  # fmt: skip
    """Sum over the keys of heads in Found: Σ v_j in Sums and Σ v_j k_jᵀ in Products, as above, and Σ k_j after those: float32 (B, Hkv,
    CHUNKS, PARTS, V_ALL + 1, PART). Grid: (CHUNKS, Hkv · PARTS, B)."""
    chunk, head, part, batch = tl.program_id(0), tl.program_id(1) // PARTS, tl.program_id(1) % PARTS, tl.program_id(2)
    of_batch = (batch * (tl.num_programs(1) // PARTS) + head).to(tl.int64)
    if tl.max(tl.load(Found + of_batch * CHUNKS + tl.arange(0, CHUNKS)), 0) > 0:
        each = tl.cdiv(tl.cdiv(seqlen_kv, BLOCK), CHUNKS) * BLOCK
        K = at_head(K, batch, head, stride_k.b, stride_k.h, 1)
        V = at_head(V, batch, head, stride_v.b, stride_v.h, 1)
        total, of_keys = tl.zeros([V_ALL], tl.float32), tl.zeros([PART], tl.float32)
        product = tl.zeros([V_ALL, PART], tl.float32)
        for start in range(chunk * each, tl.minimum(chunk * each + each, seqlen_kv), BLOCK):
            rows = start + tl.arange(0, BLOCK)
            k = _rows_of(K, rows, seqlen_kv, stride_k.s, part * PART, PART, HEAD_DIM_QK)
            v = _rows_of(V, rows, seqlen_kv, stride_v.s, 0, V_ALL, HEAD_DIM_V)
            total += tl.sum(v.to(tl.float32), 0)
            of_keys += tl.sum(k.to(tl.float32), 0)
            product = tl.dot(tl.trans(v), k, product, input_precision="ieee")
        at = of_batch * CHUNKS + chunk
        tl.store(Sums + at * V_ALL + tl.arange(0, V_ALL), total)
        Products += (at * PARTS + part) * (V_ALL + 1) * PART
        tl.store(Products + tl.arange(0, V_ALL)[:, None] * PART + tl.arange(0, PART)[None, :], product)
        tl.store(Products + V_ALL * PART + tl.arange(0, PART), of_keys)


@triton.jit(do_not_specialize=_ANY)
def attention_rows_grad_q(
    GradOut, GradQ, Lse, Sums, Products, stride_g, stride_dq, group, seqlen_q, seqlen_kv, scale,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
    HEAD_DIM_QK: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, HEAD_DIM_V: tl.constexpr, V_ALL: tl.constexpr,
    MARKED: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of q in rows without keys. Sums, Products: of `attention_sum_keys`. Grid: (blocks of BLOCK queries, Hq, B)."""
    head, batch = tl.program_id(1), tl.program_id(2)
    heads_q = tl.num_programs(1)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    without = _without_keys(Lse + (batch * heads_q + head).to(tl.int64) * seqlen_q, rows, seqlen_q, MARKED)
    if tl.max(without.to(tl.int32), 0) > 0:
        of_batch = (batch * (heads_q // group) + head // group).to(tl.int64) * CHUNKS
        mean = _sum_of_parts(Sums + of_batch * V_ALL, CHUNKS, V_ALL) / seqlen_kv
        grads = at_head(GradOut, batch, head, stride_g.b, stride_g.h, 1)
        grad = _rows_of(grads, rows, seqlen_q, stride_g.s, 0, V_ALL, HEAD_DIM_V)
        grad = tl.where(without[:, None], grad, 0.0).to(grad.dtype)
        into = at_head(GradQ, batch, head, stride_dq.b, stride_dq.h, 1) + rows.to(tl.int64)[:, None] * stride_dq.s
        for part in range(PARTS):
            product, of_keys = tl.zeros([V_ALL, PART], tl.float32), tl.zeros([PART], tl.float32)
            for chunk in range(CHUNKS):
                at = Products + ((of_batch + chunk) * PARTS + part) * (V_ALL + 1) * PART
                product += tl.load(at + tl.arange(0, V_ALL)[:, None] * PART + tl.arange(0, PART)[None, :])
                of_keys += tl.load(at + V_ALL * PART + tl.arange(0, PART))
            found = _product(grad, (product - mean[:, None] * of_keys[None, :]) * (scale / seqlen_kv))
            dims = part * PART + tl.arange(0, PART)[None, :]
            tl.store(into + dims, found.to(GradQ.dtype.element_ty), mask=without[:, None] & (dims < HEAD_DIM_QK))


@triton.jit(do_not_specialize=_ANY)
def attention_rows_grad_kv(
    V, GradK, GradV, Found, OfRows, RowProducts, OfKeys, stride_v, stride_dk, stride_dv, seqlen_kv, scale,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
    HEAD_DIM_QK: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, HEAD_DIM_V: tl.constexpr, V_ALL: tl.constexpr,
):  # fmt: skip
    """Add the gradients through rows without keys to those of k and v. Grid: (blocks of BLOCK keys, Hkv, B).

    OfRows, RowProducts: Sums and Products of `attention_sum_rows`. OfKeys: Sums of `attention_sum_keys`.
    """
    head, batch = tl.program_id(1), tl.program_id(2)
    at = (batch * tl.num_programs(1) + head).to(tl.int64) * CHUNKS
    if tl.max(tl.load(Found + at + tl.arange(0, CHUNKS)), 0) > 0:
        rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros([V_ALL], tl.float32)
        for chunk in range(CHUNKS):
            if tl.load(Found + at + chunk) > 0:
                total += tl.load(OfRows + (at + chunk) * V_ALL + tl.arange(0, V_ALL))
        dims = tl.arange(0, V_ALL)[None, :]
        inside = (rows < seqlen_kv)[:, None] & (dims < HEAD_DIM_V)
        into = at_head(GradV, batch, head, stride_dv.b, stride_dv.h, 1) + rows.to(tl.int64)[:, None] * stride_dv.s
        known = tl.load(into + dims, mask=inside, other=0.0).to(tl.float32)
        tl.store(into + dims, (known + (total / seqlen_kv)[None, :]).to(GradV.dtype.element_ty), mask=inside)
        mean = _sum_of_parts(OfKeys + at * V_ALL, CHUNKS, V_ALL) / seqlen_kv
        values = at_head(V, batch, head, stride_v.b, stride_v.h, 1)
        v = _rows_of(values, rows, seqlen_kv, stride_v.s, 0, V_ALL, HEAD_DIM_V)
        into = at_head(GradK, batch, head, stride_dk.b, stride_dk.h, 1) + rows.to(tl.int64)[:, None] * stride_dk.s
        for part in range(PARTS):
            product = tl.zeros([V_ALL, PART], tl.float32)
            for chunk in range(CHUNKS):
                if tl.load(Found + at + chunk) > 0:
                    first = RowProducts + ((at + chunk) * PARTS + part) * V_ALL * PART
                    product += tl.load(first + tl.arange(0, V_ALL)[:, None] * PART + tl.arange(0, PART)[None, :])
            product *= scale / seqlen_kv
            added = _product(v, product) - tl.sum(mean[:, None] * product, 0)[None, :]
            of_part = part * PART + tl.arange(0, PART)[None, :]
            of_keys = (rows < seqlen_kv)[:, None] & (of_part < HEAD_DIM_QK)
            added += tl.load(into + of_part, mask=of_keys, other=0.0).to(tl.float32)
            tl.store(into + of_part, added.to(GradK.dtype.element_ty), mask=of_keys)
