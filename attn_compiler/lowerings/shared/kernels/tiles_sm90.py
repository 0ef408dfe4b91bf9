"""Operations of a Hopper warpgroup on a tile of 64 queries and 128 keys in registers, in Gluon: masks, sums, rounding."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

#: queries of a warpgroup, which its tensor cores take at once
ROWS = gl.constexpr(64)
#: keys of a tile
KEYS = gl.constexpr(128)
#: The maximum of no scores. It is finite, so that differences are finite.
NOTHING = gl.constexpr(-1e30)
#: registers of a thread that only loads
FEW = gl.constexpr(24)


def _scores(keys: int) -> gl.constexpr:
    """Return the layout of a tile's scores as (ROWS, keys // 8, 4, 2). The axes of keys are: eight keys, a thread of four, its two."""
    eights = [[0, 2**i, 0, 0] for i in range((keys // 8).bit_length() - 1)]
    return gl.constexpr(
        gl.DistributedLinearLayout(
            reg_bases=[[0, 0, 0, 1], [8, 0, 0, 0], *eights],
            lane_bases=[[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
            warp_bases=[[16, 0, 0, 0], [32, 0, 0, 0]],
            block_bases=[],
            shape=[64, keys // 8, 4, 2],
        )
    )


def _words(keys: int) -> gl.constexpr:
    """Return the layout of scores as (ROWS, keys // 32, 4, 4, 2). 32 keys have their bits in one number, the first axis of keys."""
    words = [[0, 2**i, 0, 0, 0] for i in range((keys // 32).bit_length() - 1)]
    return gl.constexpr(
        gl.DistributedLinearLayout(
            reg_bases=[[0, 0, 0, 0, 1], [8, 0, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 2, 0, 0], *words],
            lane_bases=[[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [1, 0, 0, 0, 0], [2, 0, 0, 0, 0], [4, 0, 0, 0, 0]],
            warp_bases=[[16, 0, 0, 0, 0], [32, 0, 0, 0, 0]],
            block_bases=[],
            shape=[64, keys // 32, 4, 4, 2],
        )
    )


#: of tiles of 128, of 64 and of 32 keys
SCORES_128, SCORES_64, SCORES_32 = _scores(128), _scores(64), _scores(32)
WORDS_128, WORDS_64, WORDS_32 = _words(128), _words(64), _words(32)


def _loaded(keys: int) -> gl.constexpr:
    """Return the layout in which threads load those numbers of a row, (ROWS, keys // 32), all at once."""
    words = [[0, 2**i] for i in range((keys // 32).bit_length() - 1)]
    return gl.constexpr(
        gl.DistributedLinearLayout(
            reg_bases=[*words, [8, 0]],
            lane_bases=[[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
            warp_bases=[[16, 0], [32, 0]],
            block_bases=[],
            shape=[64, keys // 32],
        )
    )


LOADED_128, LOADED_64, LOADED_32 = _loaded(128), _loaded(64), _loaded(32)
#: layout of (ROWS, 4): two rows of one column a thread, as many threads a row as share it in the tensor cores' layouts
SHARES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[8, 0]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 4],
    )
)


@gluon.jit
def tanh(x):
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def as_numbers(sums):
    """Convert sums of the tensor cores to float32, exactly.

    Sums of int8 are below 2^22. Added to the bits of 1.5 · 2^23, such a sum gives the bits of 1.5 · 2^23 plus itself, which is subtracted
    again. A conversion instruction would use the units that compute exponentials.
    """
    numbers = sums
    if sums.dtype == gl.int32:
        asm: gl.constexpr = "mov.b32 $0, $1;"
        moved = gl.inline_asm_elementwise(asm, "=f,r", [sums + 0x4B400000], dtype=gl.float32, is_pure=True, pack=1)
        numbers = moved - 12582912.0
    return numbers


@gluon.jit
def quotient(a, b):
    """Divide to some 22 bits, in two instructions."""
    asm: gl.constexpr = "div.approx.ftz.f32 $0, $1, $2;"
    return gl.inline_asm_elementwise(asm, "=f,f,f", [a, b], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def rounded(x, as_what):
    """Round to the FP8 of a tensor in shared memory. Four at once: otherwise the compiler moves halves of registers."""
    KIND: gl.constexpr = "e4m3x2" if as_what.dtype == gl.float8e4nv else "e5m2x2"
    CVT: gl.constexpr = "cvt.rn.satfinite." + KIND + ".f32"
    ASM: gl.constexpr = "{ .reg .b16 a, b; " + CVT + " a, $2, $1; " + CVT + " b, $4, $3; mov.b32 $0, {a, b}; }"
    bits = gl.inline_asm_elementwise(ASM, "=r,f,f,f,f", [x], dtype=gl.int8, is_pure=True, pack=4)
    return bits.to(as_what.dtype, bitcast=True)


@gluon.jit
def narrowed(x, as_what):
    """Round float32 to the half precision of a tensor in shared memory. Two at once: otherwise the compiler packs halves."""
    KIND: gl.constexpr = "bf16x2" if as_what.dtype == gl.bfloat16 else "f16x2"
    ASM: gl.constexpr = "cvt.rn." + KIND + ".f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(ASM, "=r,f,f", [x], dtype=as_what.dtype, is_pure=True, pack=2)


@gluon.jit
def up_to(most, QK_LAYOUT: gl.constexpr, SIZE: gl.constexpr = 128):
    """Return (ROWS, SIZE): whether a key is at most `most`, of each row. Comparisons are with constants: everything but the start of a
    thread's keys is known at compile time. Key numbers in registers took so many that scores were spilled."""
    SCORES: gl.constexpr = SCORES_128 if SIZE == 128 else SCORES_64 if SIZE == 64 else SCORES_32
    LANES: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, SCORES))
    lane = gl.arange(0, 4, layout=gl.SliceLayout(0, LANES))[None, :]
    most = gl.convert_layout(most, gl.SliceLayout(1, LANES), assert_trivial=True)[:, None] - 2 * lane
    EIGHTS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, SCORES)))
    TWOS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, SCORES)))
    own = (
        8 * gl.arange(0, SIZE // 8, layout=EIGHTS)[None, :, None, None]
        + gl.arange(0, 2, layout=TWOS)[None, None, None, :]
    )
    allowed = own <= most[:, None, :, None]
    return gl.convert_layout(allowed.reshape([ROWS, SIZE]), QK_LAYOUT, assert_trivial=True)


@gluon.jit
def bits_of(address, left):
    """Return int32: a bit for each of 32 bytes from an address on, set where the byte is not 0 and fewer than `left` bytes come before it.

    Each thread of a warp loads one byte, and all of them get all bits. address: int64, the same in all threads; left is the same in all,
    too.
    """
    BYTE: gl.constexpr = "@inside ld.global.u8 found, [place]; setp.ne.u32 set, found, 0; "
    ASM: gl.constexpr = (
        "{ .reg .u32 lane, found; .reg .u64 place; .reg .pred inside, set; "
        "mov.u32 lane, %laneid; setp.lt.s32 inside, lane, $2; cvt.u64.u32 place, lane; add.u64 place, place, $1; mov.u32 found, 0; "
        + BYTE
        + "vote.sync.ballot.b32 $0, set, 0xffffffff; }"
    )
    return gl.inline_asm_elementwise(ASM, "=r,l,r", [address, left], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def bits_set(Words, of_rows, first, QK_LAYOUT: gl.constexpr, SIZE: gl.constexpr = 128):
    """Return (ROWS, SIZE): whether the bit of a pair is set. Words: int32, 32 keys each. of_rows: start of each row's words, counted from
    there; first: of them the tile's first one."""
    WORDS: gl.constexpr = WORDS_128 if SIZE == 128 else WORDS_64 if SIZE == 64 else WORDS_32
    OF_WORDS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(2, gl.SliceLayout(4, WORDS)))
    LOADED: gl.constexpr = LOADED_128 if SIZE == 128 else LOADED_64 if SIZE == 64 else LOADED_32
    rows = gl.convert_layout(of_rows, gl.SliceLayout(1, LOADED), assert_trivial=True)
    words = gl.arange(0, SIZE // 32, layout=gl.SliceLayout(0, LOADED))
    # Triton's knowledge of arguments, such as divisibility, is lost in warp partitions.
    rows = gl.multiple_of(rows, [16])
    loaded = gl.load(gl.multiple_of(Words, 16) + (rows[:, None] + (first + words)[None, :]))
    found = gl.convert_layout(loaded, OF_WORDS, assert_trivial=True)
    return _spread(found[:, :, None], QK_LAYOUT, SIZE)


@gluon.jit
def _spread(words, QK_LAYOUT: gl.constexpr, SIZE: gl.constexpr):
    """Return (ROWS, SIZE): the bits of words, which are (ROWS | 1, SIZE // 32, 1)."""
    WORDS: gl.constexpr = WORDS_128 if SIZE == 128 else WORDS_64 if SIZE == 64 else WORDS_32
    OF_LANES: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(4, WORDS))
    LANE: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, OF_LANES))
    EIGHT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, gl.SliceLayout(4, WORDS))))
    TWO: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, WORDS))))
    moved = words >> (2 * gl.arange(0, 4, layout=LANE))[None, None, :]
    eights = 8 * gl.arange(0, 4, layout=EIGHT)
    own = 1 << (eights[None, None, :, None, None] + gl.arange(0, 2, layout=TWO)[None, None, None, None, :])
    found = (moved[:, :, None, :, None] & own) != 0
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, WORDS)))))
    found = found & (rows >= 0)[:, None, None, None, None]
    return gl.convert_layout(found.reshape([ROWS, SIZE]), QK_LAYOUT, assert_trivial=True)


@gluon.jit
def bytes_set(Bytes, start, length, QK_LAYOUT: gl.constexpr, SIZE: gl.constexpr = 128):
    """Return (ROWS, SIZE): whether the byte of a key is not 0, of SIZE keys from `start` on; none from `length` on. Bytes: one a key."""
    WORDS: gl.constexpr = WORDS_128 if SIZE == 128 else WORDS_64 if SIZE == 64 else WORDS_32
    WORD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(2, gl.SliceLayout(4, WORDS))))
    first = start + 32 * gl.arange(0, SIZE // 32, layout=WORD)
    words = bits_of(Bytes.to(gl.int64) + first, length - first)
    return _spread(words[None, :, None], QK_LAYOUT, SIZE)


@gluon.jit
def shares(weights, SIZE: gl.constexpr = 128):
    """Return (ROWS, 4): the partial sums of each row in its four threads, which are combined last of all."""
    mine = gl.sum(gl.sum(weights.reshape([ROWS, SIZE // 8, 4, 2]), 3), 1)
    return gl.convert_layout(mine, SHARES, assert_trivial=True)


@gluon.jit
def distances_to(scores, from_start, slope, QK_LAYOUT: gl.constexpr, SIZE: gl.constexpr = 128):
    """Return (ROWS, SIZE) scores plus slope · (k - q). from_start: that of each row at the tile's first key. Keys are constants, as in
    `up_to`."""
    SCORES: gl.constexpr = SCORES_128 if SIZE == 128 else SCORES_64 if SIZE == 64 else SCORES_32
    LANES: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, SCORES))
    lane = gl.arange(0, 4, layout=gl.SliceLayout(0, LANES))[None, :].to(gl.float32)
    row = gl.convert_layout(from_start, gl.SliceLayout(1, LANES), assert_trivial=True)[:, None] + lane * (2.0 * slope)
    EIGHTS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, SCORES)))
    TWOS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, SCORES)))
    own = (
        8 * gl.arange(0, SIZE // 8, layout=EIGHTS)[None, :, None, None]
        + gl.arange(0, 2, layout=TWOS)[None, None, None, :]
    )
    added = row[:, None, :, None] + own.to(gl.float32) * slope
    return scores + gl.convert_layout(added.reshape([ROWS, SIZE]), QK_LAYOUT, assert_trivial=True)


@gluon.jit
def descriptor(X, batch, heads, length, strides, SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, ALL: gl.constexpr):
    """Describe a tensor of logical BHSD, for tiles of SIZE positions of one head. Beyond it, loads give 0 and stores do nothing."""
    TILE: gl.constexpr = [1, 1, SIZE, ALL]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(TILE, X.dtype.element_ty)
    shape = [batch, heads, length, HEAD_DIM]
    return tma.make_tensor_descriptor(X, shape, [strides.b, strides.h, strides.s, 1], TILE, LAYOUT)
