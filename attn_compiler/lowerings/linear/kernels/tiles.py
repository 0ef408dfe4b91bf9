"""Building blocks of the kernels of linear attention: products of parts, the inverse of a triangle, rows of tensors.

The models' own functions compute in float32; products of bfloat16 would lose two thirds of their bits. So a number in float32 becomes a
sum of numbers in bfloat16. Two hold 16 bits, enough for results in bfloat16; three hold all 24 bits, for results in float32. A number that
is bfloat16 in memory is its own first part.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(a, b, PARTS: tl.constexpr, to=None):
    """Return a @ b in float32, added to `to` if given. PARTS: bfloat16 parts of each float32 factor; 0: products of float32 (three of
    TF32).

    Factors in bfloat16 are taken unchanged.
    """
    if PARTS == 0:
        out = tl.dot(a.to(tl.float32), b.to(tl.float32), to, input_precision="tf32x3")
    elif PARTS == 1:
        out = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), to)
    elif b.dtype == tl.float32:
        first, second, third = _parts(b)
        out = _sum_with(a, first, second, third, PARTS, to)
    elif a.dtype == tl.float32:
        whole, more, least = _parts(a)
        if PARTS == 3:
            out = _added(tl.dot(whole, b, tl.dot(more, b, tl.dot(least, b))), to)
        else:
            out = tl.dot(more, b, tl.dot(whole, b, to))
    else:
        out = tl.dot(a, b, to)
    return out


@triton.jit
def _parts(x):
    """Split a float32 tile into a sum of three in bfloat16. By integers: conversions that are not of pairs take a GPU eight times as long.

    The first is rounded, which makes 0 of NaN; the second is cut off, and keeps NaN.
    """
    first = _cut(x, 0x8000)
    second = _cut(x - first, 0)
    return _half(first), _half(second), _half(x - first - second)


@triton.jit
def _cut(x, more: tl.constexpr):
    return ((x.to(tl.int32, bitcast=True) + more) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _half(x):
    return (x.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _sum_with(a, first, second, third, PARTS: tl.constexpr, to):
    """Return a @ (first + second + third), added to `to`. a: in float32 or bfloat16.

    With three parts the smallest products are added up first, and `to` last: tensor cores cut off bits that a sum does not hold, so each
    product that is added to a large sum loses a bit of it.
    """
    if a.dtype == tl.float32:
        whole, more, least = _parts(a)
        if PARTS == 3:
            out = tl.dot(whole, third)
            out = tl.dot(least, first, out)
            out = tl.dot(more, second, out)
            out = tl.dot(more, first, out)
            out = _added(tl.dot(whole, first, tl.dot(whole, second, out)), to)
        else:
            out = tl.dot(more, first, tl.dot(whole, second, tl.dot(whole, first, to)))
    elif PARTS == 3:
        out = _added(tl.dot(a, first, tl.dot(a, second, tl.dot(a, third))), to)
    else:
        out = tl.dot(a, second, tl.dot(a, first, to))
    return out


@triton.jit
def _added(out, to):
    return out if to is None else out + to


@triton.jit
def store_parts(X, at, plane, value, PARTS: tl.constexpr):
    """Store a tile for `load_parts`: in float32, or as its parts in bfloat16, each `plane` numbers after the one before."""
    if PARTS < 2:
        tl.store(X + at, value.to(X.dtype.element_ty))
    else:
        first, second, third = _parts(value)
        tl.store(X + at, first)
        tl.store(X + plane + at, second)
        if PARTS == 3:
            tl.store(X + 2 * plane + at, third)


@triton.jit
def load_parts(X, at, plane, PARTS: tl.constexpr):
    """Load a tile that was stored in parts, in float32."""
    value = tl.load(X + at).to(tl.float32)
    if PARTS > 1:
        value += tl.load(X + plane + at).to(tl.float32)
    if PARTS == 3:
        value += tl.load(X + 2 * plane + at).to(tl.float32)
    return value


@triton.jit
def stored_product(other, X, at, plane, TURNED: tl.constexpr, PARTS: tl.constexpr, to=None):
    """Return other @ x, or other @ xᵀ where TURNED, of a tile x that was stored in at least as many parts, which go to the tensor cores
    unchanged. to: as in `product`."""
    first = _stored(X + at, TURNED)
    if PARTS < 2:
        out = product(other, first, PARTS, to)
    else:
        second = _stored(X + plane + at, TURNED)
        third = _stored(X + 2 * plane + at, TURNED) if PARTS == 3 else second
        out = _sum_with(other, first, second, third, PARTS, to)
    return out


@triton.jit
def _stored(at, TURNED: tl.constexpr):
    x = tl.load(at)
    return tl.trans(x) if TURNED else x


@triton.jit
def has_bad(x):
    """Return whether a tile (C, D) holds a number that is not finite."""
    return tl.sum(tl.sum(x * 0.0, 1), 0) != 0.0


@triton.jit
def without_bad(x):
    """Replace numbers that are not finite by 0. A product multiplies the zeros of a triangle, too, and 0 times NaN is NaN."""
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def first_bad(x, i, C: tl.constexpr):
    """Return the first row of a tile (C, D) that is not finite in each column, or C."""
    return tl.min(tl.where(tl.abs(x) < float("inf"), C, i[:, None]), 0)


@triton.jit
def last_bad(x, i):
    """Return the last row of a tile (C, D) that is not finite in each column, or -1."""
    return tl.max(tl.where(tl.abs(x) < float("inf"), -1, i[:, None]), 0)


@triton.jit
def inverse(lower, Scratch, C: tl.constexpr, PARTS: tl.constexpr):
    """Return (1 + lower)⁻¹ of a strictly lower triangular tile (C, C) in float32; NaN from the first row on that is not finite.

    First the blocks of 16 on the diagonal, D, row by row: a series of powers would lose all bits where keys are equal, as those of padding
    are. Then 1 + lower = (1 + D)(1 + N), and N is nilpotent over C / 16 blocks. Scratch: memory of this program alone, at least 64 C bytes.
    """
    i = tl.arange(0, C)
    first = tl.min(tl.min(tl.where(tl.abs(lower) < float("inf"), C, i[:, None]), 1), 0)
    lower = without_bad(lower)
    is_block = (i[:, None] // 16) == (i[None, :] // 16)
    # Through memory each thread reads the numbers that it needs: from thread to thread a row would take two barriers.
    Scratch = Scratch.to(tl.pointer_type(tl.float32))
    tl.store(Scratch + i[:, None] * 16 + i[None, :] % 16, lower, mask=is_block)
    tl.debug_barrier()
    _store_inverses(Scratch, C)
    tl.debug_barrier()
    found = tl.load(Scratch + i[None, :] * 16 + i[:, None] % 16, mask=is_block, other=0.0)
    if C > 16:
        one = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
        rest = product(found, tl.where(is_block, 0.0, lower), PARTS)
        outer = one - rest
        if C > 32:
            outer = product(outer, product(rest, rest, PARTS), PARTS, outer)
        found = product(outer, found, PARTS)
    return tl.where(i[:, None] >= first, float("nan"), found)


@triton.jit
def _store_inverses(Blocks, C: tl.constexpr):
    """Replace blocks on the diagonal, (C, 16), by the `inverse` of each, turned. No sum over the last axis crosses warps."""
    n = tl.arange(0, C // 16)[:, None, None]
    row, column = tl.arange(0, 16)[None, None, :], tl.arange(0, 16)[None, :, None]
    found = tl.zeros([C // 16, 16, 16], tl.float32) + tl.where(row == column, 1.0, 0.0)
    for at in tl.static_range(1, 16):
        change = tl.sum(tl.load(Blocks + (n * 16 + at) * 16 + row) * found, 2)
        found = tl.where(row == at, found - change[:, :, None], found)
    tl.debug_barrier()
    tl.store(Blocks + (n * 16 + column) * 16 + row, found)


@triton.jit
def rows(X, token, length, stride, d, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Load rows of a tensor at tokens, (C, D); zeros from `length` on, and beyond DIM. X: of the first row. d: the columns."""
    is_in = token[:, None] < length
    if DIM != WIDTH:
        is_in = is_in & (d[None, :] < DIM)
    return tl.load(X + token.to(tl.int64)[:, None] * stride + d[None, :], mask=is_in, other=0.0)


@triton.jit
def store_rows(X, value, token, length, stride, d, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Store rows at tokens; the inverse of `rows`."""
    is_in = token[:, None] < length
    if DIM != WIDTH:
        is_in = is_in & (d[None, :] < DIM)
    at = X + token.to(tl.int64)[:, None] * stride + d[None, :]
    tl.store(at, value.to(X.dtype.element_ty), mask=is_in)


@triton.jit
def numbers(X, token, length, stride):
    """Load a number for each token, in float32; zeros from `length` on."""
    return tl.load(X + token.to(tl.int64) * stride, mask=token < length, other=0.0).to(tl.float32)


@triton.jit
def exact_sums(g):
    """Return the sum of g (C,) up to each token, and its rounding error in float32: sums may be large where their differences are small."""
    sums = tl.cumsum(g.to(tl.float64), 0)
    c = sums.to(tl.float32)
    return c, (sums - c.to(tl.float64)).to(tl.float32)


@triton.jit
def pairs_of(c, less):
    """Return the sum of g from each token to each other one, (C, C), from the results of `exact_sums`."""
    return (c[:, None] - c[None, :]) + (less[:, None] - less[None, :])


@triton.jit
def sums_of(Sums, i, C: tl.constexpr):
    """Return a chunk's sums of g up to each token, to the chunk's end, and from each token to the end. Sums: (2, C), of `exact_sums`."""
    c, end = tl.load(Sums + i), tl.load(Sums + C - 1)
    return c, end, (end - c) + (tl.load(Sums + 2 * C - 1) - tl.load(Sums + C + i))


@triton.jit
def norm_factor(x, eps, NORM: tl.constexpr):
    """Return the factors that normalise rows, (C,); 1 without NORM."""
    wide = x.to(tl.float32)
    squares = tl.sum(wide * wide, 1)
    return tl.rsqrt(squares + eps) if NORM else squares * 0.0 + 1.0


@triton.jit
def of_state(X, d, e, stride_k, stride_v, DK: tl.constexpr, WK: tl.constexpr, DV: tl.constexpr, WV: tl.constexpr):
    """Load a part of a state (K, V) in float32: rows d, columns e; zeros beyond its sizes."""
    at = X + d[:, None] * stride_k + e[None, :] * stride_v
    if DK == WK and DV == WV:
        found = tl.load(at).to(tl.float32)
    else:
        found = tl.load(at, mask=(d[:, None] < DK) & (e[None, :] < DV), other=0.0).to(tl.float32)
    return found


@triton.jit
def store_state(
    X, value, d, e, stride_k, stride_v, DK: tl.constexpr, WK: tl.constexpr, DV: tl.constexpr, WV: tl.constexpr
):
    """Store a part of a state; the inverse of `of_state`."""
    at = X + d[:, None] * stride_k + e[None, :] * stride_v
    if DK == WK and DV == WV:
        tl.store(at, value.to(X.dtype.element_ty))
    else:
        tl.store(at, value.to(X.dtype.element_ty), mask=(d[:, None] < DK) & (e[None, :] < DV))
