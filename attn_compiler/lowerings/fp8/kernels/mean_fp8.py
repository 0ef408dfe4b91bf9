"""The mean of k over its positions, in two launches: sums of parts, then the sum of those, always in the same order."""

from __future__ import annotations

import triton
import triton.language as tl

from attn_compiler.lowerings.fp8.kernels.rotation import signs_of
from attn_compiler.lowerings.shared.kernels.optional import at_index

#: columns of H at once
_COLUMNS = tl.constexpr(32)


@triton.jit
def sums_fp8(
    X, Seen, Sums, stride_b, stride_h, stride_s, seen_b, heads, length, parts,
    PARTS: tl.constexpr, PART: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid: (parts · H · B,). X: (B, H, S, D). Seen: bytes (B|1, S), the positions that count; or None. Sums: float32 (B, H, parts, D), of
    finite elements of PARTS · PART positions."""
    place = tl.program_id(0)
    part, row = place % parts, place // parts
    X += (row // heads).to(tl.int64) * stride_b + (row % heads).to(tl.int64) * stride_h
    Seen = at_index(Seen, row // heads, seen_b)
    dims = tl.arange(0, WIDTH)[None, :]
    total = tl.zeros((PART, WIDTH), tl.float32)
    for i in tl.static_range(PARTS):
        rows = (part * PARTS + i) * PART + tl.arange(0, PART)[:, None]
        inside = rows < length
        if Seen is not None:
            inside = inside & (tl.load(Seen + rows, mask=inside, other=0) != 0)
        if WIDTH > HEAD_DIM:
            inside = inside & (dims < HEAD_DIM)
        x = tl.load(X + rows.to(tl.int64) * stride_s + dims, mask=inside, other=0.0).to(tl.float32)
        total += tl.where(tl.abs(x) < float("inf"), x, 0.0)
    at = tl.arange(0, WIDTH)
    tl.store(Sums + place.to(tl.int64) * HEAD_DIM + at, tl.sum(total, 0), mask=at < HEAD_DIM)


@triton.jit
def mean_fp8(
    Sums, Mean, length, parts, AT_ONCE: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, ROTATED: tl.constexpr
):  # fmt: skip
    """Grid: (H · B,). Sums: of `sums_fp8`. Mean: float32 (B, H, 1, D), or ROTATED (B, H, 2, D), as in fp8_rounding.mean_fp8."""
    row = tl.program_id(0)
    dims = tl.arange(0, WIDTH)
    inside = dims < HEAD_DIM
    total = tl.zeros((AT_ONCE, WIDTH), tl.float32)
    for first in range(0, parts, AT_ONCE):
        at = first + tl.arange(0, AT_ONCE)
        places = (row.to(tl.int64) * parts + at)[:, None] * HEAD_DIM + dims[None, :]
        total += tl.load(Sums + places, mask=(at < parts)[:, None] & inside[None, :], other=0.0)
    mean = tl.sum(total, 0) / length
    mean = tl.where(tl.abs(mean) < float("inf"), mean, 0.0)
    if not ROTATED:
        tl.store(Mean + row.to(tl.int64) * HEAD_DIM + dims, mean, mask=inside)
    else:
        Mean += row.to(tl.int64) * 2 * HEAD_DIM
        tl.store(Mean + dims, mean, mask=inside)
        scale = 1.0 / tl.sqrt(HEAD_DIM * 1.0)
        AT: tl.constexpr = _COLUMNS if HEAD_DIM > _COLUMNS else HEAD_DIM
        for first in range(0, HEAD_DIM, AT):
            columns = first + tl.arange(0, AT)
            signs = signs_of(dims[:, None], columns[None, :], tl.float32)
            tl.store(Mean + HEAD_DIM + columns, tl.sum(mean[:, None] * signs, 0) * scale)
