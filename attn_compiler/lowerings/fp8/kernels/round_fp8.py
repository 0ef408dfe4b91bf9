"""Rounds up to three tensors to FP8 or int8 in one launch and one pass, and finds their largest magnitudes in another.

Nodes that Inductor makes kernels of need a launch for each tensor, two where scales come from the numbers themselves, and write v's
turned tiles a byte at a time. What a number costs counts here as much as its bytes: a number that is not finite is looked for only where
the largest magnitude says that there is one, and becomes NaN by being multiplied by 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_compiler.lowerings.fp8.kernels.rotation import finite_rows, load_rotated, signs
from attn_compiler.lowerings.shared.kernels.optional import at_index

#: Added and taken away again, it leaves a whole number, the nearest and of two the even one.
_WHOLE = tl.constexpr(12582912.0)


@triton.jit
def _rows(first, length, PART: tl.constexpr):
    rows = first + tl.arange(0, PART)[:, None]
    return rows, rows < length


@triton.jit
def _load(X, mean, Seen, first, dims, length, stride, PART: tl.constexpr, HEAD_DIM: tl.constexpr):
    """(PART, WIDTH) in float32, 0 beyond the tensor, and at positions that nobody sees. X: of a head. mean: what it loses, (1, WIDTH), or
    None."""
    rows, inside = _rows(first, length, PART)
    if Seen is not None:
        inside = inside & (tl.load(Seen + rows, mask=inside, other=0) != 0)
    if dims.shape[1] > HEAD_DIM:
        inside = inside & (dims < HEAD_DIM)
    x = tl.load(X + rows.to(tl.int64) * stride + dims, mask=inside, other=0.0).to(tl.float32)
    if mean is not None:
        x = tl.where(inside, x - mean, 0.0)
    return x


@triton.jit
def _largest_of(x):
    return tl.max(tl.max(tl.abs(x), 1), 0)


@triton.jit
def _largest_finite(
    X, mean, Seen, first, dims, length, stride, PARTS: tl.constexpr, PART: tl.constexpr, HEAD_DIM: tl.constexpr
):  # fmt: skip
    """Of PARTS · PART positions, from memory again."""
    found = 0.0
    for part in range(PARTS):
        x = _load(X, mean, Seen, first + part * PART, dims, length, stride, PART, HEAD_DIM)
        found = tl.maximum(found, _largest_of(tl.where(tl.abs(x) < float("inf"), x, 0.0)))
    return found


@triton.jit
def _largest(
    x, X, mean, Seen, first, dims, length, stride, PARTS: tl.constexpr, PART: tl.constexpr, HEAD_DIM: tl.constexpr
):  # fmt: skip
    """The largest finite magnitude of PARTS · PART positions, whose first PART are x."""
    found = _largest_of(x)
    for part in tl.static_range(1, PARTS):
        further = _load(X, mean, Seen, first + part * PART, dims, length, stride, PART, HEAD_DIM)
        found = tl.maximum(found, _largest_of(further))
    # Not so for NaN, which a maximum may or may not pass on.
    if found < float("inf"):
        pass
    else:
        found = _largest_finite(X, mean, Seen, first, dims, length, stride, PARTS, PART, HEAD_DIM)
    return found


@triton.jit
def _largest_rotated(
    X, mean, Seen, signs, first, length, stride, PARTS: tl.constexpr, PART: tl.constexpr, HEAD_DIM: tl.constexpr
):  # fmt: skip
    """The same of rotated positions."""
    found = 0.0
    for part in range(PARTS):
        at = first + part * PART
        x = load_rotated(X, mean, Seen, signs, at, length, stride, PART, HEAD_DIM)
        _, more = finite_rows(x, at, length, 0.0)
        found = tl.maximum(found, more)
    return found


@triton.jit
def _keep_largest(Place, found):
    """Of numbers that are not negative, bits are in the order of the numbers: the result is the same in any order."""
    tl.atomic_max(Place, found.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def _write(
    x, scale, descale, mean, Shift, Rounded, Restored, first, dims, length, stride, stride_restored, largest,
    HEAD_DIM: tl.constexpr, PART: tl.constexpr, TURNED: tl.constexpr, WHOLE: tl.constexpr, FITS: tl.constexpr,
):  # fmt: skip
    """One part: rounded, and what that stands for; and its products with the mean, which go to Shift. FITS: x · scale does, and what was
    not finite is 0 or NaN already."""
    rows, inside = _rows(first, length, PART)
    WIDTH: tl.constexpr = dims.shape[1]
    y = x * scale
    if WHOLE:
        if not FITS:
            y = tl.where(tl.abs(x) < float("inf"), tl.minimum(tl.maximum(y, -largest), largest), 0.0)
        # The sum's last byte is the whole number, since conversions have few units.
        moved = y + _WHOLE
        bits = moved.to(tl.int32, bitcast=True)
        rounded = bits.to(tl.int8)
        numbers = moved - _WHOLE
    else:
        # Conversion saturates, which would make a number of what is infinite.
        rounded = (y if FITS else y + x * 0.0).to(Rounded.dtype.element_ty)
        numbers = rounded.to(tl.float32)
    if TURNED:
        # Kernels want positions last, in the order of fp8_rounding.in_order.
        groups = tl.reshape(tl.trans(rounded), (WIDTH, PART // 16, 2, 4, 2))
        lying = tl.reshape(tl.permute(groups, (0, 1, 3, 2, 4)), (WIDTH, PART))
        positions = first + tl.arange(0, PART)[None, :]
        turned_dims = tl.arange(0, WIDTH)[:, None]
        mask = (positions < tl.cdiv(length, 16) * 16) & (turned_dims < HEAD_DIM)
        tl.store(Rounded + turned_dims.to(tl.int64) * stride + positions, lying, mask=mask)
    elif WHOLE and FITS:
        # By twos, which tensor cores leave side by side in a thread.
        one, other = tl.split(tl.reshape(bits, (PART, WIDTH // 2, 2)))
        places = Rounded.to(tl.pointer_type(tl.int16), bitcast=True) + rows.to(tl.int64) * (stride // 2)
        tl.store(places + tl.arange(0, WIDTH // 2)[None, :], ((one & 0xFF) | (other << 8)).to(tl.int16), mask=inside)
    else:
        tl.store(Rounded + rows.to(tl.int64) * stride + dims, rounded, mask=inside & (dims < HEAD_DIM))
    if not WHOLE and not TURNED and (Shift is not None or Restored is not None):
        # ptxas 12.8 takes registers apart that it has not packed yet, where a thread does both: so they come from memory.
        tl.debug_barrier()
        again = tl.load(Rounded + rows.to(tl.int64) * stride + dims, mask=inside & (dims < HEAD_DIM), other=0.0)
        numbers = again.to(tl.float32)
    if Shift is not None:
        at = first + tl.arange(0, PART)
        tl.store(Shift + at, tl.sum(numbers * mean, 1) * descale, mask=at < length)
    if Restored is not None:
        back = numbers * descale
        pointers = Restored + rows.to(tl.int64) * stride_restored + dims
        tl.store(pointers, back.to(Restored.dtype.element_ty), mask=inside & (dims < HEAD_DIM))


@triton.jit
def _round_block(
    block, row, head, batch, X, mean, Seen, Shift, signs, Largest, Newest, Rounded, Descale, Restored,
    stride_xs, stride_ys, stride_rs, largest_b, largest_h, newest_b, newest_h, length, largest, fits, known,
    BLOCK: tl.constexpr, PART: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, TURNED: tl.constexpr,
    WHOLE: tl.constexpr, KNOWN: tl.constexpr,
):  # fmt: skip
    """BLOCK positions of one head of one tensor; tensors: of that head, but Largest, Newest and Descale. mean: what x loses, or what
    its products go to Shift with. Seen: of the batch row, or None."""
    dims = tl.arange(0, WIDTH)[None, :]
    first = block * BLOCK
    PARTS: tl.constexpr = BLOCK // PART
    OF_BLOCKS: tl.constexpr = Largest is None and not KNOWN
    ROTATED: tl.constexpr = signs is not None
    FITS: tl.constexpr = ROTATED and OF_BLOCKS
    lost = mean if Shift is None else None
    if ROTATED:
        instead: tl.constexpr = 0.0 if WHOLE else float("nan")
        if PARTS == 1:
            x = load_rotated(X, lost, Seen, signs, first, length, stride_xs, PART, HEAD_DIM)
            x, found = finite_rows(x, first, length, instead)
        else:
            found = _largest_rotated(X, lost, Seen, signs, first, length, stride_xs, PARTS, PART, HEAD_DIM)
    else:
        x = _load(X, lost, Seen, first, dims, length, stride_xs, PART, HEAD_DIM)
        if OF_BLOCKS or Newest is not None:
            found = _largest(x, X, lost, Seen, first, dims, length, stride_xs, PARTS, PART, HEAD_DIM)
    if Newest is not None:
        _keep_largest(Newest + (row - head) * newest_b + head * newest_h, found)
    if KNOWN:
        magnitude = known
    elif Largest is None:
        magnitude = found
    else:
        magnitude = tl.load(Largest + batch * largest_b + head * largest_h)
    scale = fits / magnitude
    # 0, or so small that the quotient overflows: any scale does.
    scale = tl.where((magnitude > 0.0) & (scale < float("inf")), scale, 1.0)
    descale = 1.0 / scale
    if OF_BLOCKS:
        tl.store(Descale + row.to(tl.int64) * tl.cdiv(length, BLOCK) + block, descale)
    else:
        # Of those that share it the first one.
        is_first = (block == 0) & ((largest_h != 0) | (head == 0)) & ((largest_b != 0) | (batch == 0))
        tl.store(Descale + batch * largest_b + head * largest_h, descale, mask=is_first)
    if PARTS == 1 or not ROTATED:
        _write(
            x, scale, descale, mean, Shift, Rounded, Restored, first, dims, length, stride_ys, stride_rs, largest,
            HEAD_DIM, PART, TURNED, WHOLE, FITS,
        )  # fmt: skip
        for part in tl.static_range(1, PARTS):
            at = first + part * PART
            x = _load(X, lost, Seen, at, dims, length, stride_xs, PART, HEAD_DIM)
            _write(
                x, scale, descale, mean, Shift, Rounded, Restored, at, dims, length, stride_ys, stride_rs, largest,
                HEAD_DIM, PART, TURNED, WHOLE, FITS,
            )  # fmt: skip
    else:
        for part in range(PARTS):
            at = first + part * PART
            x = load_rotated(X, lost, Seen, signs, at, length, stride_xs, PART, HEAD_DIM)
            x, _ = finite_rows(x, at, length, instead)
            _write(
                x, scale, descale, mean, Shift, Rounded, Restored, at, dims, length, stride_ys, stride_rs, largest,
                HEAD_DIM, PART, TURNED, WHOLE, FITS,
            )  # fmt: skip


@triton.jit
def _round(
    place, X, Mean, Seen, Shift, Largest, Newest, Rounded, Descale, Restored,
    stride_xb, stride_xh, stride_xs, stride_yb, stride_yh, stride_ys, stride_rb, stride_rh, stride_rs,
    largest_b, largest_h, newest_b, newest_h, seen_b, heads, length,
    largest, fits, known, group, BLOCK: tl.constexpr, PART: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    TURNED: tl.constexpr, WHOLE: tl.constexpr, KNOWN: tl.constexpr, ROTATED: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    """BLOCK positions of one head of one tensor, or ROTATED RUN times as many: `place` counts those, then heads, then batch rows."""
    blocks = tl.cdiv(length, BLOCK)
    of_a_head = tl.cdiv(length, BLOCK * RUN) if ROTATED else blocks
    block, row = place % of_a_head, place // of_a_head
    head, batch = row % heads, (row // heads).to(tl.int64)
    X += batch * stride_xb + head.to(tl.int64) * stride_xh
    Rounded += batch * stride_yb + head.to(tl.int64) * stride_yh
    Seen = at_index(Seen, batch, seen_b)
    if Restored is not None:
        Restored += batch * stride_rb + head.to(tl.int64) * stride_rh
    mean = None
    if Mean is not None:
        of_kv = row if Shift is None else batch * (heads // group) + head // group
        Mean += of_kv.to(tl.int64) * ((2 if ROTATED else 1) * HEAD_DIM)
        dims = tl.arange(0, WIDTH)[None, :]
        mean = tl.load(Mean + (HEAD_DIM if ROTATED else 0) + dims, mask=dims < HEAD_DIM, other=0.0)
    if Shift is not None:
        Shift += row.to(tl.int64) * length
    if ROTATED:
        turning = signs(HEAD_DIM, X.dtype.element_ty)
        for at in range(block * RUN, tl.minimum(block * RUN + RUN, blocks)):
            _round_block(
                at, row, head, batch, X, mean, Seen, Shift, turning, Largest, Newest, Rounded, Descale, Restored,
                stride_xs, stride_ys, stride_rs, largest_b, largest_h, newest_b, newest_h, length, largest, fits, known,
                BLOCK, PART, HEAD_DIM, WIDTH, TURNED, WHOLE, KNOWN,
            )  # fmt: skip
    else:
        _round_block(
            block, row, head, batch, X, mean, Seen, Shift, None, Largest, Newest, Rounded, Descale, Restored,
            stride_xs, stride_ys, stride_rs, largest_b, largest_h, newest_b, newest_h, length, largest, fits, known,
            BLOCK, PART, HEAD_DIM, WIDTH, TURNED, WHOLE, KNOWN,
        )  # fmt: skip


@triton.jit
def round_fp8(
    X0, X1, X2, Mean, Seen, Shift, Largest0, Largest1, Largest2, Newest,
    Rounded0, Rounded1, Rounded2, Descale0, Descale1, Descale2, Restored0, Restored1, Restored2,
    stride_xb0, stride_xh0, stride_xs0, stride_yb0, stride_yh0, stride_ys0, stride_rb0, stride_rh0, stride_rs0, largest_b0, largest_h0,
    heads0, length0, programs0, largest0, fits0, known0,
    stride_xb1, stride_xh1, stride_xs1, stride_yb1, stride_yh1, stride_ys1, stride_rb1, stride_rh1, stride_rs1, largest_b1, largest_h1,
    heads1, length1, programs1, largest1, fits1, known1,
    stride_xb2, stride_xh2, stride_xs2, stride_yb2, stride_yh2, stride_ys2, stride_rb2, stride_rh2, stride_rs2, largest_b2, largest_h2,
    heads2, length2, programs2, largest2, fits2, known2,
    newest_b, newest_h, newest1, newest2, seen_b, group,
    BLOCK: tl.constexpr, PART: tl.constexpr, MEAN_OF: tl.constexpr, SHIFT_OF: tl.constexpr, KNOWN: tl.constexpr,
    RUN: tl.constexpr,
    HEAD_DIM0: tl.constexpr, WIDTH0: tl.constexpr, TURNED0: tl.constexpr, WHOLE0: tl.constexpr, ROTATED0: tl.constexpr,
    OF_KEYS0: tl.constexpr,
    HEAD_DIM1: tl.constexpr, WIDTH1: tl.constexpr, TURNED1: tl.constexpr, WHOLE1: tl.constexpr, ROTATED1: tl.constexpr,
    OF_KEYS1: tl.constexpr,
    HEAD_DIM2: tl.constexpr, WIDTH2: tl.constexpr, TURNED2: tl.constexpr, WHOLE2: tl.constexpr, ROTATED2: tl.constexpr,
    OF_KEYS2: tl.constexpr,
):  # fmt: skip
    """Grid: (programs0 + programs1 + programs2,). See fp8_rounding.round_fp8; X: (B, H, S, D), as is Restored; X1, X2 may be None.

    Mean: float32 (B, H, n, D), contiguous, which the tensor MEAN_OF loses, or None; Shift: (B, H, S), of the tensor SHIFT_OF, whose heads
    share `group` by `group` one of the mean's. Seen: bytes (B|1, S), which positions of tensors with OF_KEYS anybody may see: the
    others count as 0, whatever they hold; or None. Largest: float32, or None: each block's own, which becomes `fits`, or KNOWN: `known`.
    Newest: the bits of float32, where the largest magnitudes are kept, of the second tensor from newest1 on. Rounded: (B, H, S, D), or
    TURNED: (B, H, D, S'). WIDTH: D up to a power of two. WHOLE: to int8. ROTATED: times H / √D, RUN blocks to a
    program.
    """
    # What a pass before this one read last is still in the cache.
    place = tl.num_programs(0) - 1 - tl.program_id(0)
    if place < programs0:
        _round(
            place, X0, Mean if MEAN_OF == 0 or SHIFT_OF == 0 else None, Seen if OF_KEYS0 else None,
            Shift if SHIFT_OF == 0 else None, Largest0, Newest, Rounded0, Descale0, Restored0,
            stride_xb0, stride_xh0, stride_xs0, stride_yb0, stride_yh0, stride_ys0, stride_rb0, stride_rh0, stride_rs0,
            largest_b0, largest_h0, newest_b, newest_h, seen_b, heads0, length0,
            largest0, fits0, known0, group, BLOCK, PART, HEAD_DIM0, WIDTH0, TURNED0, WHOLE0, KNOWN, ROTATED0, RUN,
        )  # fmt: skip
    elif X1 is not None:
        if place < programs0 + programs1:
            _round(
                place - programs0, X1, Mean if MEAN_OF == 1 or SHIFT_OF == 1 else None, Seen if OF_KEYS1 else None,
                Shift if SHIFT_OF == 1 else None, Largest1,
                None if Newest is None else Newest + newest1, Rounded1, Descale1, Restored1,
                stride_xb1, stride_xh1, stride_xs1, stride_yb1, stride_yh1, stride_ys1, stride_rb1, stride_rh1, stride_rs1,
                largest_b1, largest_h1, newest_b, newest_h, seen_b, heads1, length1,
                largest1, fits1, known1, group, BLOCK, PART, HEAD_DIM1, WIDTH1, TURNED1, WHOLE1, KNOWN, ROTATED1, RUN,
            )  # fmt: skip
        elif X2 is not None:
            _round(
                place - programs0 - programs1, X2, Mean if MEAN_OF == 2 or SHIFT_OF == 2 else None, Seen if OF_KEYS2 else None,
                Shift if SHIFT_OF == 2 else None, Largest2,
                None if Newest is None else Newest + newest2, Rounded2, Descale2, Restored2,
                stride_xb2, stride_xh2, stride_xs2, stride_yb2, stride_yh2, stride_ys2, stride_rb2, stride_rh2, stride_rs2,
                largest_b2, largest_h2, newest_b, newest_h, seen_b, heads2, length2,
                largest2, fits2, known2, group, BLOCK, PART, HEAD_DIM2, WIDTH2, TURNED2, WHOLE2, KNOWN, ROTATED2, RUN,
            )  # fmt: skip


@triton.jit
def _keep_largest_of(
    place, X, Mean, Seen, Kept, stride_xb, stride_xh, stride_xs, seen_b, kept_b, kept_h, heads, length,
    PARTS: tl.constexpr, PART: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """PARTS · PART positions of one head of one tensor."""
    blocks = tl.cdiv(length, PARTS * PART)
    block, row = place % blocks, place // blocks
    head, batch = row % heads, row // heads
    X += batch.to(tl.int64) * stride_xb + head.to(tl.int64) * stride_xh
    Seen = at_index(Seen, batch, seen_b)
    dims = tl.arange(0, WIDTH)[None, :]
    mean = None
    if Mean is not None:
        Mean += row.to(tl.int64) * ((2 if ROTATED else 1) * HEAD_DIM) + (HEAD_DIM if ROTATED else 0)
        mean = tl.load(Mean + dims, mask=dims < HEAD_DIM, other=0.0)
    first = block * (PARTS * PART)
    if ROTATED:
        turning = signs(HEAD_DIM, X.dtype.element_ty)
        found = _largest_rotated(X, mean, Seen, turning, first, length, stride_xs, PARTS, PART, HEAD_DIM)
    else:
        most = tl.zeros((PART, WIDTH), tl.float32)
        for part in tl.static_range(PARTS):
            x = _load(X, mean, Seen, first + part * PART, dims, length, stride_xs, PART, HEAD_DIM)
            most = tl.maximum(most, tl.abs(x))
        found = _largest_of(most)
        if found < float("inf"):
            pass
        else:
            found = _largest_finite(X, mean, Seen, first, dims, length, stride_xs, PARTS, PART, HEAD_DIM)
    _keep_largest(Kept + batch * kept_b + head * kept_h, found)


@triton.jit
def largest_fp8(
    X0, X1, X2, Mean, Seen, Kept,
    stride_xb0, stride_xh0, stride_xs0, kept_b0, kept_h0, heads0, length0, programs0,
    stride_xb1, stride_xh1, stride_xs1, kept_b1, kept_h1, heads1, length1, programs1,
    stride_xb2, stride_xh2, stride_xs2, kept_b2, kept_h2, heads2, length2, programs2,
    kept1, kept2, seen_b,
    PARTS: tl.constexpr, PART: tl.constexpr, MEAN_OF: tl.constexpr,
    HEAD_DIM0: tl.constexpr, WIDTH0: tl.constexpr, ROTATED0: tl.constexpr, OF_KEYS0: tl.constexpr,
    HEAD_DIM1: tl.constexpr, WIDTH1: tl.constexpr, ROTATED1: tl.constexpr, OF_KEYS1: tl.constexpr,
    HEAD_DIM2: tl.constexpr, WIDTH2: tl.constexpr, ROTATED2: tl.constexpr, OF_KEYS2: tl.constexpr,
):  # fmt: skip
    """Grid: (programs0 + programs1 + programs2,). See fp8_rounding.largest_fp8. Kept: the bits of float32, 0 before; of the second tensor
    from kept1 on. The rest as in `round_fp8`."""
    place = tl.program_id(0)
    if place < programs0:
        _keep_largest_of(
            place, X0, Mean if MEAN_OF == 0 else None, Seen if OF_KEYS0 else None, Kept, stride_xb0, stride_xh0, stride_xs0, seen_b,
            kept_b0, kept_h0, heads0, length0, PARTS, PART, HEAD_DIM0, WIDTH0, ROTATED0,
        )  # fmt: skip
    elif X1 is not None:
        if place < programs0 + programs1:
            _keep_largest_of(
                place - programs0, X1, Mean if MEAN_OF == 1 else None, Seen if OF_KEYS1 else None, Kept + kept1,
                stride_xb1, stride_xh1, stride_xs1, seen_b, kept_b1, kept_h1, heads1, length1, PARTS, PART, HEAD_DIM1, WIDTH1, ROTATED1,
            )  # fmt: skip
        elif X2 is not None:
            _keep_largest_of(
                place - programs0 - programs1, X2, Mean if MEAN_OF == 2 else None, Seen if OF_KEYS2 else None, Kept + kept2,
                stride_xb2, stride_xh2, stride_xs2, seen_b, kept_b2, kept_h2, heads2, length2, PARTS, PART, HEAD_DIM2, WIDTH2, ROTATED2,
            )  # fmt: skip
