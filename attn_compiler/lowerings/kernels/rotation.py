"""R = H / √D in kernels: products with Sylvester's H of ±1 on tensor cores, which take it exactly in any format; sums are in float32."""

from __future__ import annotations

import triton
import triton.language as tl

#: Of H's rows, as many as one product has: shared memory has room for those beside a tile. Wider ones are made of two.
_MOST_ROWS = tl.constexpr(128)
#: bit n: the parity of the bits of n
_PARITIES = tl.constexpr(0x6996)


@triton.jit
def signs_of(rows, columns, dtype: tl.constexpr):
    """H's numbers in those rows and columns: ±1, by the parity of the bits that both have. Up to 256 rows."""
    bits = rows & columns
    parity = (_PARITIES >> ((bits ^ (bits >> 4)) & 15)) & 1
    # Of 1.0 in float32, the sign.
    return ((parity << 31) | 0x3F800000).to(tl.float32, bitcast=True).to(dtype)


@triton.jit
def signs(HEAD_DIM: tl.constexpr, dtype: tl.constexpr):
    """H for `times_signs`: (D, D), or its first quarter."""
    ROWS: tl.constexpr = HEAD_DIM if HEAD_DIM < _MOST_ROWS else _MOST_ROWS
    at = tl.arange(0, ROWS)
    return signs_of(at[:, None], at[None, :], dtype)


@triton.jit
def times_signs(x, signs):
    """x H: (N, D) in float32. signs: as `signs` gives it in x's dtype."""
    N: tl.constexpr = x.shape[0]
    HEAD_DIM: tl.constexpr = x.shape[1]
    ROWS: tl.constexpr = signs.shape[0]
    if HEAD_DIM == ROWS:
        product = tl.dot(x, signs)
    else:
        # H of twice the rows is [[H, H], [H, -H]].
        tl.static_assert(HEAD_DIM == 2 * ROWS)
        one, other = tl.split(tl.permute(tl.reshape(x, (N, 2, ROWS)), (0, 2, 1)))
        one, other = tl.dot(one, signs), tl.dot(other, signs)
        product = tl.reshape(tl.permute(tl.join(one + other, one - other), (0, 2, 1)), (N, HEAD_DIM))
    return product
