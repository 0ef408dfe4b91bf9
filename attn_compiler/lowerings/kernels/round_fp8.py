"""Rounds one tensor to FP8 or int8 in one pass: the largest magnitude of a block, its scale, the numbers, and what they stand for.

Nodes that Inductor fuses need two passes for the same, and write v's turned tiles a byte at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Added and taken away again, it leaves a whole number, the nearest and of two the even one.
_WHOLE = tl.constexpr(12582912.0)


@triton.jit
def _load(X, Mean, rows, dims, length, stride, factor, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr):
    """(SIZE, WIDTH) in float32, 0 beyond the tensor; and where numbers are finite."""
    inside = rows < length
    if PADDED:
        inside = inside & (dims < HEAD_DIM)
    x = tl.load(X + rows.to(tl.int64) * stride + dims, mask=inside, other=0.0).to(tl.float32) * factor
    if Mean is not None:
        mean = tl.load(Mean + dims, mask=dims < HEAD_DIM, other=0.0)
        x = tl.where(inside, x - mean, 0.0)
    return x, tl.abs(x) < float("inf")


@triton.jit
def round_fp8(
    X, Mean, Scale, Rounded, Descale, Restored,
    stride_xb, stride_xh, stride_xs, stride_rb, stride_rh, stride_rs, scale_b, scale_h,
    heads, length, padded, blocks, factor, largest, fits,
    BLOCK: tl.constexpr, PART: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    TURNED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of BLOCK positions, H, B). See fp8_rounding.round_fp8; X is (B, H, S, D), so is Restored.

    Mean: float32 (B, H, 1, D), contiguous, or None. Scale: float32, or None: from the block's largest magnitude, which becomes `fits`.
    Rounded: (B, H, S, D), or TURNED: (B, H, D, padded). WIDTH: D up to a power of two. WHOLE: to int8.
    """
    block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = batch.to(tl.int64) * heads + head
    X += batch.to(tl.int64) * stride_xb + head.to(tl.int64) * stride_xh
    if Mean is not None:
        Mean += row * HEAD_DIM
    dims = tl.arange(0, WIDTH)[None, :]
    local = tl.arange(0, PART)[:, None]
    first = block * BLOCK
    if Scale is None:
        largest_here = 0.0
        for part in tl.static_range(BLOCK // PART):
            x, finite = _load(
                X, Mean, first + part * PART + local, dims, length, stride_xs, factor, HEAD_DIM, WIDTH > HEAD_DIM
            )
            largest_here = tl.maximum(largest_here, tl.max(tl.max(tl.where(finite, tl.abs(x), 0.0), 1), 0))
        scale = fits / largest_here
        # 0, or so small that the quotient overflows: any scale does.
        scale = tl.where((largest_here > 0.0) & (scale < float("inf")), scale, 1.0)
        tl.store(Descale + row * blocks + block, 1.0 / scale)
    else:
        scale = tl.load(Scale + batch * scale_b + head * scale_h)
    for part in tl.static_range(BLOCK // PART):
        rows = first + part * PART + local
        x, finite = _load(X, Mean, rows, dims, length, stride_xs, factor, HEAD_DIM, WIDTH > HEAD_DIM)
        y = tl.minimum(tl.maximum(x * scale, -largest), largest)
        if WHOLE:
            rounded = (tl.where(finite, y, 0.0) + _WHOLE - _WHOLE).to(Rounded.dtype.element_ty)
        else:
            rounded = tl.where(finite, y, float("nan")).to(Rounded.dtype.element_ty)
        inside = (rows < length) & (dims < HEAD_DIM)
        if TURNED:
            # Kernels want positions last, in the order of fp8_rounding.in_order.
            groups = tl.reshape(tl.trans(rounded), (WIDTH, PART // 16, 2, 4, 2))
            lying = tl.reshape(tl.permute(groups, (0, 1, 3, 2, 4)), (WIDTH, PART))
            positions = first + part * PART + tl.arange(0, PART)[None, :]
            turned_dims = tl.arange(0, WIDTH)[:, None]
            pointers = Rounded + row * HEAD_DIM * padded + turned_dims * padded + positions
            tl.store(pointers, lying, mask=(positions < padded) & (turned_dims < HEAD_DIM))
        else:
            tl.store(Rounded + (row * length + rows) * HEAD_DIM + dims, rounded, mask=inside)
        if Restored is not None:
            back = rounded.to(tl.float32) / scale
            if not WHOLE:
                back = tl.where(finite, back, float("nan"))
            if Mean is not None:
                back += tl.load(Mean + dims, mask=dims < HEAD_DIM, other=0.0)
            pointers = Restored + batch.to(tl.int64) * stride_rb + head.to(tl.int64) * stride_rh
            pointers += rows.to(tl.int64) * stride_rs + dims
            tl.store(pointers, back.to(Restored.dtype.element_ty), mask=inside)
