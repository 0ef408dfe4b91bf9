"""Rounds up to three tensors to FP8 or int8 in one launch and one pass, and finds their largest magnitudes in another.

Inductor's kernels for such nodes take a launch for each tensor, two where scales come from the data, and write v's turned tiles a byte at
a time. Arithmetic costs as much here as memory: numbers that are not finite are searched only where the largest magnitude shows that there
are some, and become NaN by a product with 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_compiler.lowerings.fp8.kernels.rotation import finite_rows, load_rotated, signs
from attn_compiler.lowerings.fp8.kernels.tuples_round import RoundTensors
from attn_compiler.lowerings.shared.kernels.optional import at_index
from attn_compiler.lowerings.shared.kernels.releases import members

#: Added and subtracted again, it rounds to the nearest whole number, ties to even.
_WHOLE = tl.constexpr(12582912.0)


@triton.jit
def _rows(first, length, PART: tl.constexpr):
    rows = first + tl.arange(0, PART)[:, None]
    return rows, rows < length


@triton.jit
def _load(X, mean, Seen, first, dims, length, stride, PART: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Load (PART, WIDTH) in float32, 0 beyond the tensor and at unseen positions. X: of one head. mean: subtracted, (1, WIDTH), or None."""
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
    """Return the largest finite magnitude of PARTS · PART positions, from memory again."""
    found = 0.0
    for part in range(PARTS):
        x = _load(X, mean, Seen, first + part * PART, dims, length, stride, PART, HEAD_DIM)
        found = tl.maximum(found, _largest_of(tl.where(tl.abs(x) < float("inf"), x, 0.0)))
    return found


@triton.jit
def _largest(
    x, X, mean, Seen, first, dims, length, stride, PARTS: tl.constexpr, PART: tl.constexpr, HEAD_DIM: tl.constexpr
):  # fmt: skip
    """Return the largest finite magnitude of PARTS · PART positions, whose first PART are x."""
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
    """Return the same for rotated positions."""
    found = 0.0
    for part in range(PARTS):
        at = first + part * PART
        x = load_rotated(X, mean, Seen, signs, at, length, stride, PART, HEAD_DIM)
        _, more = finite_rows(x, at, length, 0.0)
        found = tl.maximum(found, more)
    return found


@triton.jit
def _keep_largest(Place, found):
    """Take the maximum in memory. Bits of numbers that are not negative are ordered like the numbers, so the result is the same in any
    order."""
    tl.atomic_max(Place, found.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def _write(
    x, scale, descale, mean, to, first, dims, of, how: tl.constexpr, each: tl.constexpr, FITS: tl.constexpr
):  # fmt: skip
    """Write one part: rounded, restored, and its products with the mean, which go to Shift. FITS: x · scale fits the format, and elements
    that were not finite are 0 or NaN already. to: `RoundTensors` of a head."""
    rows, inside = _rows(first, of.length, how.PART)
    WIDTH: tl.constexpr = dims.shape[1]
    y = x * scale
    if each.WHOLE:
        if not FITS:
            y = tl.where(tl.abs(x) < float("inf"), tl.minimum(tl.maximum(y, -of.largest), of.largest), 0.0)
        # The sum's last byte is the whole number, since conversions have few units.
        moved = y + _WHOLE
        bits = moved.to(tl.int32, bitcast=True)
        rounded = bits.to(tl.int8)
        numbers = moved - _WHOLE
    else:
        # Conversion saturates, which would make a number of what is infinite.
        rounded = (y if FITS else y + x * 0.0).to(to.Rounded.dtype.element_ty)
        numbers = rounded.to(tl.float32)
    if each.TURNED:
        # Kernels want positions last, in the order of fp8_rounding.in_order.
        groups = tl.reshape(tl.trans(rounded), (WIDTH, how.PART // 16, 2, 4, 2))
        lying = tl.reshape(tl.permute(groups, (0, 1, 3, 2, 4)), (WIDTH, how.PART))
        positions = first + tl.arange(0, how.PART)[None, :]
        turned_dims = tl.arange(0, WIDTH)[:, None]
        mask = (positions < tl.cdiv(of.length, 16) * 16) & (turned_dims < each.HEAD_DIM)
        tl.store(to.Rounded + turned_dims.to(tl.int64) * of.stride_ys + positions, lying, mask=mask)
    elif each.WHOLE and FITS:
        # By twos, which tensor cores leave side by side in a thread.
        one, other = tl.split(tl.reshape(bits, (how.PART, WIDTH // 2, 2)))
        places = to.Rounded.to(tl.pointer_type(tl.int16), bitcast=True) + rows.to(tl.int64) * (of.stride_ys // 2)
        tl.store(places + tl.arange(0, WIDTH // 2)[None, :], ((one & 0xFF) | (other << 8)).to(tl.int16), mask=inside)
    else:
        tl.store(to.Rounded + rows.to(tl.int64) * of.stride_ys + dims, rounded, mask=inside & (dims < each.HEAD_DIM))
    if not each.WHOLE and not each.TURNED and (to.Shift is not None or to.Restored is not None):
        # ptxas 12.8 takes registers apart that it has not packed yet, where a thread does both: so they come from memory.
        tl.debug_barrier()
        again = tl.load(
            to.Rounded + rows.to(tl.int64) * of.stride_ys + dims, mask=inside & (dims < each.HEAD_DIM), other=0.0
        )
        numbers = again.to(tl.float32)
    if to.Shift is not None:
        at = first + tl.arange(0, how.PART)
        tl.store(to.Shift + at, tl.sum(numbers * mean, 1) * descale, mask=at < of.length)
    if to.Restored is not None:
        back = numbers * descale
        pointers = to.Restored + rows.to(tl.int64) * of.stride_rs + dims
        tl.store(pointers, back.to(to.Restored.dtype.element_ty), mask=inside & (dims < each.HEAD_DIM))


@triton.jit
def _round_block(
    block, row, head, batch, to, mean, signs, of, shared, how: tl.constexpr, each: tl.constexpr
):  # fmt: skip
    """Round BLOCK positions of one head of one tensor. to: `RoundTensors` of that head, except Largest, Newest and Descale; Seen is the
    batch row's. mean: subtracted from x, or multiplied by it for Shift."""
    dims = tl.arange(0, each.WIDTH)[None, :]
    first = block * how.BLOCK
    PARTS: tl.constexpr = how.BLOCK // how.PART
    OF_BLOCKS: tl.constexpr = to.Largest is None and not how.KNOWN
    ROTATED: tl.constexpr = signs is not None
    FITS: tl.constexpr = ROTATED and OF_BLOCKS
    lost = mean if to.Shift is None else None
    if ROTATED:
        instead: tl.constexpr = 0.0 if each.WHOLE else float("nan")
        if PARTS == 1:
            x = load_rotated(to.X, lost, to.Seen, signs, first, of.length, of.stride_xs, how.PART, each.HEAD_DIM)
            x, found = finite_rows(x, first, of.length, instead)
        else:
            found = _largest_rotated(
                to.X, lost, to.Seen, signs, first, of.length, of.stride_xs, PARTS, how.PART, each.HEAD_DIM
            )
    else:
        x = _load(to.X, lost, to.Seen, first, dims, of.length, of.stride_xs, how.PART, each.HEAD_DIM)
        if OF_BLOCKS or to.Newest is not None:
            found = _largest(
                x, to.X, lost, to.Seen, first, dims, of.length, of.stride_xs, PARTS, how.PART, each.HEAD_DIM
            )
    if to.Newest is not None:
        _keep_largest(to.Newest + (row - head) * shared.newest_b + head * shared.newest_h, found)
    if how.KNOWN:
        magnitude = of.known
    elif to.Largest is None:
        magnitude = found
    else:
        magnitude = tl.load(to.Largest + batch * of.largest_b + head * of.largest_h)
    scale = of.fits / magnitude
    # 0, or so small that the quotient overflows: any scale does.
    scale = tl.where((magnitude > 0.0) & (scale < float("inf")), scale, 1.0)
    descale = 1.0 / scale
    if OF_BLOCKS:
        tl.store(to.Descale + row.to(tl.int64) * tl.cdiv(of.length, how.BLOCK) + block, descale)
    else:
        # The first program of those that share the descale stores it.
        is_first = (block == 0) & ((of.largest_h != 0) | (head == 0)) & ((of.largest_b != 0) | (batch == 0))
        tl.store(to.Descale + batch * of.largest_b + head * of.largest_h, descale, mask=is_first)
    if PARTS == 1 or not ROTATED:
        _write(x, scale, descale, mean, to, first, dims, of, how, each, FITS)
        for part in tl.static_range(1, PARTS):
            at = first + part * how.PART
            x = _load(to.X, lost, to.Seen, at, dims, of.length, of.stride_xs, how.PART, each.HEAD_DIM)
            _write(x, scale, descale, mean, to, at, dims, of, how, each, FITS)
    else:
        for part in range(PARTS):
            at = first + part * how.PART
            x = load_rotated(to.X, lost, to.Seen, signs, at, of.length, of.stride_xs, how.PART, each.HEAD_DIM)
            x, _ = finite_rows(x, at, of.length, instead)
            _write(x, scale, descale, mean, to, at, dims, of, how, each, FITS)


@triton.jit
def _round(place, given, of, shared, how: tl.constexpr, each: tl.constexpr):
    """Round BLOCK positions of one head of one tensor, or ROTATED RUN times as many: `place` counts those, then heads, then batch rows.
    given: `RoundTensors`; of: `Numbers`; shared: `Shared`; how: `RoundSwitches`; each: `Each`."""
    blocks = tl.cdiv(of.length, how.BLOCK)
    of_a_head = tl.cdiv(of.length, how.BLOCK * how.RUN) if each.ROTATED else blocks
    block, row = place % of_a_head, place // of_a_head
    head, batch = row % of.heads, (row // of.heads).to(tl.int64)
    X = given.X + (batch * of.stride_xb + head.to(tl.int64) * of.stride_xh)
    Rounded = given.Rounded + (batch * of.stride_yb + head.to(tl.int64) * of.stride_yh)
    Restored = given.Restored
    if Restored is not None:
        Restored += batch * of.stride_rb + head.to(tl.int64) * of.stride_rh
    mean = None
    if given.Mean is not None:
        of_kv = row if given.Shift is None else batch * (of.heads // shared.group) + head // shared.group
        Mean = given.Mean + of_kv.to(tl.int64) * ((2 if each.ROTATED else 1) * each.HEAD_DIM)
        dims = tl.arange(0, each.WIDTH)[None, :]
        mean = tl.load(Mean + (each.HEAD_DIM if each.ROTATED else 0) + dims, mask=dims < each.HEAD_DIM, other=0.0)
    Shift = given.Shift
    if Shift is not None:
        Shift += row.to(tl.int64) * of.length
    to = RoundTensors(
        X=X, Mean=None, Seen=at_index(given.Seen, batch, shared.seen_b), Shift=Shift, Largest=given.Largest,
        Newest=given.Newest, Rounded=Rounded, Descale=given.Descale, Restored=Restored,
    )  # fmt: skip
    if each.ROTATED:
        turning = signs(each.HEAD_DIM, X.dtype.element_ty)
        for at in range(block * how.RUN, tl.minimum(block * how.RUN + how.RUN, blocks)):
            _round_block(at, row, head, batch, to, mean, turning, of, shared, how, each)
    else:
        _round_block(block, row, head, batch, to, mean, None, of, shared, how, each)


@triton.jit
def round_fp8(
    X0, X1, X2, Mean, Seen, Shift, Largest0, Largest1, Largest2, Newest,
    Rounded0, Rounded1, Rounded2, Descale0, Descale1, Descale2, Restored0, Restored1, Restored2,
    of_0, of_1, of_2, shared, HOW: tl.constexpr, EACH0: tl.constexpr, EACH1: tl.constexpr, EACH2: tl.constexpr,
):  # fmt: skip
    """Grid: (all programs of of_0, of_1 and of_2,). See fp8_rounding.round_fp8; tuples: tuples_round.py. X: (B, H, S, D), as is Restored;
    X1, X2 may be None.

    Mean: float32 (B, H, n, D), contiguous, subtracted from the tensor MEAN_OF, or None; Shift: (B, H, S), of the tensor SHIFT_OF, whose
    heads share `group` by `group` one of the mean's. Seen: bytes (B|1, S), the visible positions of tensors with OF_KEYS: the others count
    as 0, whatever they hold; or None. Largest: float32, or None: each block's own, which becomes `fits`, or KNOWN: `known`. Newest: the
    bits of float32, where the largest magnitudes are kept, of the second tensor from newest1 on. Rounded: (B, H, S, D), or TURNED: (B, H,
    D, S').
    """
    how: tl.constexpr = members(HOW)
    each_0: tl.constexpr = members(EACH0)
    each_1: tl.constexpr = members(EACH1)
    each_2: tl.constexpr = members(EACH2)
    # The tiles that an earlier pass read last are still in the cache. Each branch's tuple has a name of its own: Triton would merge them.
    place = tl.num_programs(0) - 1 - tl.program_id(0)
    if place < of_0.programs:
        first = RoundTensors(
            X=X0, Mean=Mean if how.MEAN_OF == 0 or how.SHIFT_OF == 0 else None, Seen=Seen if each_0.OF_KEYS else None,
            Shift=Shift if how.SHIFT_OF == 0 else None, Largest=Largest0, Newest=Newest,
            Rounded=Rounded0, Descale=Descale0, Restored=Restored0,
        )  # fmt: skip
        _round(place, first, of_0, shared, how, each_0)
    elif X1 is not None:
        if place < of_0.programs + of_1.programs:
            second = RoundTensors(
                X=X1, Mean=Mean if how.MEAN_OF == 1 or how.SHIFT_OF == 1 else None, Seen=Seen if each_1.OF_KEYS else None,
                Shift=Shift if how.SHIFT_OF == 1 else None, Largest=Largest1,
                Newest=None if Newest is None else Newest + shared.newest1,
                Rounded=Rounded1, Descale=Descale1, Restored=Restored1,
            )  # fmt: skip
            _round(place - of_0.programs, second, of_1, shared, how, each_1)
        elif X2 is not None:
            third = RoundTensors(
                X=X2, Mean=Mean if how.MEAN_OF == 2 or how.SHIFT_OF == 2 else None, Seen=Seen if each_2.OF_KEYS else None,
                Shift=Shift if how.SHIFT_OF == 2 else None, Largest=Largest2,
                Newest=None if Newest is None else Newest + shared.newest2,
                Rounded=Rounded2, Descale=Descale2, Restored=Restored2,
            )  # fmt: skip
            _round(place - of_0.programs - of_1.programs, third, of_2, shared, how, each_2)


@triton.jit
def _keep_largest_of(place, X, Mean, Seen, Kept, of, seen_b, how: tl.constexpr, each: tl.constexpr):
    """Look at PARTS · PART positions of one head of one tensor. of: `LookNumbers`; how: `LookSwitches`; each: `Each`."""
    blocks = tl.cdiv(of.length, how.PARTS * how.PART)
    block, row = place % blocks, place // blocks
    head, batch = row % of.heads, row // of.heads
    X += batch.to(tl.int64) * of.stride_xb + head.to(tl.int64) * of.stride_xh
    Seen = at_index(Seen, batch, seen_b)
    dims = tl.arange(0, each.WIDTH)[None, :]
    mean = None
    if Mean is not None:
        Mean += row.to(tl.int64) * ((2 if each.ROTATED else 1) * each.HEAD_DIM) + (each.HEAD_DIM if each.ROTATED else 0)
        mean = tl.load(Mean + dims, mask=dims < each.HEAD_DIM, other=0.0)
    first = block * (how.PARTS * how.PART)
    if each.ROTATED:
        turning = signs(each.HEAD_DIM, X.dtype.element_ty)
        found = _largest_rotated(
            X, mean, Seen, turning, first, of.length, of.stride_xs, how.PARTS, how.PART, each.HEAD_DIM
        )
    else:
        most = tl.zeros((how.PART, each.WIDTH), tl.float32)
        for part in tl.static_range(how.PARTS):
            at = first + part * how.PART
            x = _load(X, mean, Seen, at, dims, of.length, of.stride_xs, how.PART, each.HEAD_DIM)
            most = tl.maximum(most, tl.abs(x))
        found = _largest_of(most)
        if found < float("inf"):
            pass
        else:
            found = _largest_finite(
                X, mean, Seen, first, dims, of.length, of.stride_xs, how.PARTS, how.PART, each.HEAD_DIM
            )
    _keep_largest(Kept + batch * of.kept_b + head * of.kept_h, found)


@triton.jit
def largest_fp8(
    X0, X1, X2, Mean, Seen, Kept, of_0, of_1, of_2, kept1, kept2, seen_b,
    HOW: tl.constexpr, EACH0: tl.constexpr, EACH1: tl.constexpr, EACH2: tl.constexpr,
):  # fmt: skip
    """Grid: (all programs of of_0, of_1 and of_2,). See fp8_rounding.largest_fp8; tuples: tuples_round.py. Kept: the bits of float32, 0
    before; of the second tensor from kept1 on. The rest as in `round_fp8`."""
    how: tl.constexpr = members(HOW)
    each_0: tl.constexpr = members(EACH0)
    each_1: tl.constexpr = members(EACH1)
    each_2: tl.constexpr = members(EACH2)
    place = tl.program_id(0)
    if place < of_0.programs:
        _keep_largest_of(
            place, X0, Mean if how.MEAN_OF == 0 else None, Seen if each_0.OF_KEYS else None, Kept, of_0, seen_b, how, each_0
        )  # fmt: skip
    elif X1 is not None:
        if place < of_0.programs + of_1.programs:
            _keep_largest_of(
                place - of_0.programs, X1, Mean if how.MEAN_OF == 1 else None, Seen if each_1.OF_KEYS else None,
                Kept + kept1, of_1, seen_b, how, each_1,
            )  # fmt: skip
        elif X2 is not None:
            _keep_largest_of(
                place - of_0.programs - of_1.programs, X2, Mean if how.MEAN_OF == 2 else None, Seen if each_2.OF_KEYS else None,
                Kept + kept2, of_2, seen_b, how, each_2,
            )  # fmt: skip
