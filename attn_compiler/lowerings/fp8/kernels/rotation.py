"""R = H / √D in kernels: products with Sylvester's H of ±1 on tensor cores, which take it exactly in any format; sums are in float32."""

from __future__ import annotations

import triton
import triton.language as tl

#: From this many rows on, H is computed from its quarter: half the work, and a quarter of the shared memory.
_HALVED = tl.constexpr(128)
#: bit n: the parity of the bits of n
_PARITIES = tl.constexpr(0x6996)


@triton.jit
def signs_of(rows, columns, dtype: tl.constexpr):
    """Return H's numbers in those rows and columns: ±1, by the parity of the bits that both have. Up to 256 rows."""
    bits = rows & columns
    parity = (_PARITIES >> ((bits ^ (bits >> 4)) & 15)) & 1
    # The sign bit of 1.0 in float32.
    return ((parity << 31) | 0x3F800000).to(tl.float32, bitcast=True).to(dtype)


@triton.jit
def signs(HEAD_DIM: tl.constexpr, dtype: tl.constexpr):
    """Return H for the functions below: (D, D), or its first quarter."""
    ROWS: tl.constexpr = HEAD_DIM if HEAD_DIM < _HALVED else HEAD_DIM // 2
    at = tl.arange(0, ROWS)
    return signs_of(at[:, None], at[None, :], dtype)


@triton.jit
def _products(one, other, signs):
    """Multiply both halves of some rows by H, which is [[H', H'], [H', -H']], side by side in float32."""
    one, other = tl.dot(one, signs), tl.dot(other, signs)
    N: tl.constexpr = one.shape[0]
    both = tl.permute(tl.join(one + other, one - other), (0, 2, 1))
    return tl.reshape(both, (N, 2 * signs.shape[0]))


@triton.jit
def load_rotated(X, mean, Seen, signs, first, length, stride, PART: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Load PART rows of X H / √D - mean in float32; rows from `length` on are finite, with no other meaning. X: of a head. mean: (1, D),
    or None. Seen: bytes (length,), the rows that count: the others are 0, whatever they hold; or None."""
    ROWS: tl.constexpr = signs.shape[0]
    rows = first + tl.arange(0, PART)[:, None]
    places = X + rows.to(tl.int64) * stride + tl.arange(0, ROWS)[None, :]
    inside = rows < length
    if Seen is not None:
        inside = inside & (tl.load(Seen + rows, mask=inside, other=0) != 0)
    one = tl.load(places, mask=inside, other=0.0)
    if HEAD_DIM == ROWS:
        product = tl.dot(one, signs)
    else:
        product = _products(one, tl.load(places + ROWS, mask=inside, other=0.0), signs)
    product *= HEAD_DIM**-0.5
    if mean is not None:
        product -= mean
        if Seen is not None:
            product = tl.where(inside, product, 0.0)
    return product


@triton.jit
def finite_rows(x, first, length, instead):
    """Return x, with `instead` in rows that are not finite, and the largest magnitude of the others. One element that is not finite makes
    all of a rotated row so: each row is tested once."""
    largest = tl.max(tl.abs(x), 1)
    largest = tl.where(first + tl.arange(0, x.shape[0]) < length, largest, 0.0)
    # A maximum may drop NaN.
    found = tl.max(tl.where(largest < float("inf"), largest, float("inf")), 0)
    if found < float("inf"):
        pass
    else:
        is_finite = largest < float("inf")
        found = tl.max(tl.where(is_finite, largest, 0.0), 0)
        x = tl.where(is_finite[:, None], x, instead)
    return x, found
