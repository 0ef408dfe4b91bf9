"""What the kernels of linear attention are made of: products that hold 16 bits, the inverse of a triangle, rows of tensors.

A product of bfloat16 alone loses half of the bits that the models' own functions hold, which compute in float32. So a number in float32
is taken as the sum of two in bfloat16. A number that is bfloat16 in memory is the first of the two.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(a, b, PARTS: tl.constexpr, to=None):
    """a @ b in float32, added to `to` if there is one. PARTS: of each factor in float32, numbers in half precision; 0: by products of
    float32 (three of TF32).

    Factors in half precision are taken as they are. All of those have one dtype.
    """
    if PARTS == 0:
        out = tl.dot(a.to(tl.float32), b.to(tl.float32), to, input_precision="tf32x3")
    elif a.dtype == tl.float32 and b.dtype == tl.float32:
        first, second = a.to(tl.bfloat16), b.to(tl.bfloat16)
        out = tl.dot(first, second, to)
        if PARTS == 2:
            out = tl.dot((a - first.to(tl.float32)).to(tl.bfloat16), second, out)
            out = tl.dot(first, (b - second.to(tl.float32)).to(tl.bfloat16), out)
    elif a.dtype == tl.float32:
        first = a.to(b.dtype)
        out = tl.dot(first, b, to)
        if PARTS == 2:
            out = tl.dot((a - first.to(tl.float32)).to(b.dtype), b, out)
    elif b.dtype == tl.float32:
        second = b.to(a.dtype)
        out = tl.dot(a, second, to)
        if PARTS == 2:
            out = tl.dot(a, (b - second.to(tl.float32)).to(a.dtype), out)
    else:
        out = tl.dot(a, b, to)
    return out


@triton.jit
def store_parts(X, at, plane, value, PARTS: tl.constexpr):
    """What `load_parts` gives again: in float32, or in its parts in bfloat16, the second ones `plane` numbers further."""
    if PARTS == 0:
        tl.store(X + at, value)
    else:
        first = value.to(tl.bfloat16)
        tl.store(X + at, first)
        tl.store(X + plane + at, (value - first.to(tl.float32)).to(tl.bfloat16))


@triton.jit
def load_parts(X, at, plane, PARTS: tl.constexpr):
    """A tile of what was stored in parts, in float32."""
    value = tl.load(X + at).to(tl.float32)
    if PARTS == 2:
        value += tl.load(X + plane + at).to(tl.float32)
    return value


@triton.jit
def stored_product(X, at, plane, other, TURNED: tl.constexpr, PARTS: tl.constexpr, to=None):
    """x @ other, or xᵀ @ other where TURNED, of a tile x that was stored in parts: those go to the tensor cores as they are.
    to: as of `product`."""
    first = tl.load(X + at)
    if TURNED:
        first = tl.trans(first)
    out = product(first, other, PARTS, to)
    if PARTS == 2:
        second = tl.load(X + plane + at)
        if TURNED:
            second = tl.trans(second)
        out = tl.dot(second, other.to(tl.bfloat16), out)
    return out


@triton.jit
def inverse(lower, C: tl.constexpr, PARTS: tl.constexpr):
    """(1 + lower)⁻¹ of a strictly lower triangular tile (C, C) in float32.

    First of the blocks of 16 on the diagonal, D, row by row: a series of powers would lose all bits where keys are equal, as those of
    padding are. Then 1 + lower = (1 + D)(1 + N), and N is nilpotent over C / 16 blocks.
    """
    i = tl.arange(0, C)
    is_block = (i[:, None] // 16) == (i[None, :] // 16)
    found = _of_blocks(tl.where(is_block, lower, 0.0), C)
    if C > 16:
        one = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
        rest = product(found, tl.where(is_block, 0.0, lower), PARTS)
        outer = one - rest
        if C > 32:
            outer = product(outer, product(rest, rest, PARTS), PARTS, outer)
        found = product(outer, found, PARTS)
    return found


@triton.jit
def _of_blocks(blocks, C: tl.constexpr):
    """As `inverse`, of a tile that is 0 but for its blocks of 16 on the diagonal."""
    many: tl.constexpr = C // 16
    n = tl.arange(0, many)
    is_own = (n[:, None] == n[None, :])[:, None, :, None]
    lower = tl.sum(tl.reshape(blocks, [many, 16, many, 16]), 2)
    row, column = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    found = tl.zeros([many, 16, 16], tl.float32) + tl.where(row == column, 1.0, 0.0)
    for at in tl.static_range(1, 16):
        of_row = tl.sum(tl.where(row == at, lower, 0.0), 1)
        change = tl.sum(of_row[:, :, None] * found, 1)
        found = tl.where(row == at, found - change[:, None, :], found)
    return tl.reshape(tl.where(is_own, found[:, :, None, :], 0.0), [C, C])


@triton.jit
def rows(X, token, length, stride, d, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of a tensor at tokens, (C, D); zeros from `length` on, and beyond DIM. X: of the first row. d: the columns."""
    is_in = token[:, None] < length
    if DIM != WIDTH:
        is_in = is_in & (d[None, :] < DIM)
    return tl.load(X + token.to(tl.int64)[:, None] * stride + d[None, :], mask=is_in, other=0.0)


@triton.jit
def store_rows(X, value, token, length, stride, d, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Inverse of `rows`."""
    is_in = token[:, None] < length
    if DIM != WIDTH:
        is_in = is_in & (d[None, :] < DIM)
    at = X + token.to(tl.int64)[:, None] * stride + d[None, :]
    tl.store(at, value.to(X.dtype.element_ty), mask=is_in)


@triton.jit
def numbers(X, token, length, stride):
    """A number for each token, in float32; zeros from `length` on."""
    return tl.load(X + token.to(tl.int64) * stride, mask=token < length, other=0.0).to(tl.float32)


@triton.jit
def norm_factor(x, eps, NORM: tl.constexpr):
    """What rows are multiplied by to be normalised, (C,); 1 where they are taken as they are."""
    wide = x.to(tl.float32)
    squares = tl.sum(wide * wide, 1)
    return tl.rsqrt(squares + eps) if NORM else squares * 0.0 + 1.0


@triton.jit
def of_state(X, d, e, stride_k, stride_v, DK: tl.constexpr, WK: tl.constexpr, DV: tl.constexpr, WV: tl.constexpr):
    """A part of a state (K, V) in float32: rows d, columns e; zeros beyond its sizes."""
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
    """Inverse of `of_state`."""
    at = X + d[:, None] * stride_k + e[None, :] * stride_v
    if DK == WK and DV == WV:
        tl.store(at, value.to(X.dtype.element_ty))
    else:
        tl.store(at, value.to(X.dtype.element_ty), mask=(d[:, None] < DK) & (e[None, :] < DV))
