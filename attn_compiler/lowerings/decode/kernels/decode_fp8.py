"""Products of the decode kernel with an FP8 cache: in float16, which holds every FP8 number.

Not in bfloat16: sm90 converts FP8 to it one number at a time, by way of float16 (https://docs.nvidia.com/cuda/parallel-thread-execution,
cvt). Two neighbours of a head travel as one number of 16 bits, so that tensor cores' layouts are those of float16: tiles of single bytes
would be transposed byte by byte. So the even dims of a head make one tile, and the odd ones another.

float16 has the range: weights are at most 1, and multiplied by 2**14; each row of queries is scaled near 2**14 by a power of two, which is
exact. Both factors are undone in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: log2 of the weights' factor: weights down to 2**-28 of a row's largest stay normal numbers of float16
WEIGHT = tl.constexpr(14.0)


# Splits four bytes of a register into the first and third, and the second and fourth: each as the high byte of a float16, low byte 0; or
# side by side, to be converted together.
_E5M2 = tl.constexpr("prmt.b32 $0, $2, 0, 0x2404; prmt.b32 $1, $2, 0, 0x3414;")
_E4M3 = tl.constexpr("""{ .reg .b32 t, u; .reg .b16 first, second, none;
    prmt.b32 t, $2, 0, 0x4420; mov.b32 {first, none}, t; cvt.rn.f16x2.e4m3x2 $0, first;
    prmt.b32 u, $2, 0, 0x4431; mov.b32 {second, none}, u; cvt.rn.f16x2.e4m3x2 $1, second; }""")


@triton.jit
def halves(pairs, FP8: tl.constexpr, COMPILED: tl.constexpr):
    """Return both numbers of each pair, as float16; the first is in the lower byte. FP8: their dtype. COMPILED: not in Triton's
    interpreter, which knows no PTX."""
    if COMPILED:
        asm: tl.constexpr = _E5M2 if tl.float8e5 == FP8 else _E4M3
        first, second = tl.inline_asm_elementwise(
            asm, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    elif tl.float8e5 == FP8:
        first = (pairs << 8).to(tl.float16, bitcast=True)
        second = (pairs & -256).to(tl.float16, bitcast=True)
    else:
        first = (pairs & 255).to(tl.uint8).to(FP8, bitcast=True).to(tl.float16)
        second = ((pairs >> 8) & 255).to(tl.uint8).to(FP8, bitcast=True).to(tl.float16)
    return first, second


@triton.jit
def near_the_top(q_0, q_1, PARTS: tl.constexpr):
    """Scale rows (M, …) of q, in PARTS parts, by a power of two each, in float16. Also return (M, 1) float32 that undo it."""
    largest = tl.max(tl.abs(q_0.to(tl.float32)), 1)
    if PARTS > 1:
        largest = tl.maximum(largest, tl.max(tl.abs(q_1.to(tl.float32)), 1))
    # The exponent of float32, above its lowest 23 bits; clamped so that it has a reciprocal.
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 15)[:, None]
    times = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    back = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    return (q_0 * times).to(tl.float16), (q_1 * times).to(tl.float16), back
