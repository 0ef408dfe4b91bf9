"""Building blocks of linear attention's kernels for Hopper, in Gluon: products of parts (tiles.py), and tiles in shared memory."""

from __future__ import annotations

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attn_compiler.lowerings.shared.kernels.releases_sm90 import async_load, async_store, barrier_of_threads
from attn_compiler.lowerings.shared.kernels.tile_parts import LOG2E

#: Constants, as in forward.py and backward.py. STAGES: chunks, or slices of one, in shared memory. KEEPS: of a backward, states and u are
#: stored, and no outputs. REVERSED: from the last chunk to the first, of the state space's gradients of states.
Switches = namedtuple("Switches", "C WK WV PARTS OF_OUT OF_ROWS DELTA CHANNEL STAGES KEEPS REVERSED")


@gluon.constexpr_function
def _pair(left, right, n):
    """Return which parts are multiplied nth, i and j as 4 i + j, or -1: those of `tiles.product`, of three the smallest first."""
    most = max(left, right)
    found = [(i, j) for i in range(left) for j in range(right) if i + j < most]
    if most == 3:
        found.sort(key=lambda pair: -sum(pair))
    return 4 * found[n][0] + found[n][1] if n < len(found) else -1


@gluon.jit
def _product(left, right, to, AT: gl.constexpr, ADDS: gl.constexpr):
    if AT >= 0:
        to = warpgroup_mma(left[AT // 4], right[AT % 4], to, use_acc=ADDS, is_async=True)
    return to


@gluon.jit
def times(left, right, to, LEFT: gl.constexpr, RIGHT: gl.constexpr, ADDS: gl.constexpr):
    """Start a product of parts; ADDS: on top of `to`."""
    for n in gl.static_range(6):
        to = _product(left, right, to, _pair(LEFT, RIGHT, n), ADDS or n > 0)
    return to


@gluon.jit
def add(left, right, to, LEFT: gl.constexpr, RIGHT: gl.constexpr, PARTS: gl.constexpr):
    """Add a product to a sum: of three parts by itself, since tensor cores would cut off bits of a large sum."""
    found = warpgroup_mma_wait(0, deps=(times(left, right, to, LEFT, RIGHT, PARTS < 3),))
    return found + to if PARTS == 3 else found


@gluon.jit
def split(x, PARTS: gl.constexpr):
    """Split a float32 tile into a sum of bfloat16. Two numbers at once: the compiler would take pairs apart again."""
    SPLIT: gl.constexpr = (
        "{ .reg .b32 low, high; cvt.rn.bf16x2.f32 $0, $4, $3; shl.b32 low, $0, 16; and.b32 high, $0, 0xffff0000; "
        "sub.f32 $1, $3, low; sub.f32 $2, $4, high; }"
    )
    found = ()
    for _ in gl.static_range(PARTS):
        part, x = gl.inline_asm_elementwise(
            SPLIT, "=r,=f,=f,f,f", [x], dtype=(gl.bfloat16, gl.float32), is_pure=True, pack=2
        )
        found += (part,)
    return found


@gluon.jit
def parts_of(x, LAYOUT: gl.constexpr, PARTS: gl.constexpr):
    """Return the parts of a float32 tile as left factors."""
    parts, found = split(x, PARTS), ()
    for n in gl.static_range(PARTS):
        found += (gl.convert_layout(parts[n], gl.DotOperandLayout(0, LAYOUT, k_width=2), assert_trivial=True),)
    return found


@gluon.jit
def tiles_of(tiles, stage, COUNT: gl.constexpr, TURNED: gl.constexpr):
    """Return the parts of a tile in shared memory."""
    found = ()
    for n in gl.static_range(COUNT):
        tile = tiles.index(stage * COUNT + n)
        found += (tile.permute([1, 0]) if TURNED else tile,)
    return found


@gluon.jit
def number_of(tile, WARPS: gl.constexpr = 4):
    """Load one number."""
    return gl.max(tile.load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def copied(tile, LAYOUT: gl.constexpr):
    """Load what the copy engine wrote. None of it may be under way at `hand_on`: the engine could write over it."""
    return tile.load(LAYOUT)


@gluon.jit
def decays(sums, is_seen, ROW: gl.constexpr, COLUMN: gl.constexpr, C: gl.constexpr):
    """Return the decays between tokens of a chunk. sums: of decays from its first token on, in two parts."""
    c, less = sums.slice(0, C), sums.slice(C, C)
    between = (c.load(ROW)[:, None] - c.load(COLUMN)[None, :]) + (less.load(ROW)[:, None] - less.load(COLUMN)[None, :])
    return gl.exp2(gl.where(is_seen, between, 0.0) * LOG2E)


@gluon.jit
def hand_on(barrier):
    """Let another warpgroup go on: this one has written or read tiles in shared memory."""
    fence_async_shared()
    barrier_of_threads()
    mbarrier.arrive(barrier)


@gluon.jit
def leave(parts, tiles, at, COUNT: gl.constexpr):
    """Leave parts in shared memory, from tile `at` on."""
    for n in gl.static_range(COUNT):
        tiles.index(at + n).store(parts[n])


@gluon.jit
def store_parts(x, memory, tiles, chunk, column, SIZE: gl.constexpr, PARTS: gl.constexpr):
    """Have the copy engine store the parts of a tile, (columns, SIZE), turned, once those of the chunk before are read."""
    tma.store_wait(0)
    barrier_of_threads()
    parts = split(x, PARTS)
    for n in gl.static_range(PARTS):
        tiles.index(n).permute([1, 0]).store(parts[n])
    fence_async_shared()
    barrier_of_threads()
    for n in gl.static_range(PARTS):
        async_store(memory, [(chunk * PARTS + n) * SIZE, column], tiles.index(n))


@gluon.jit
def load_parts(
    memory, chunk, barrier, tiles, stage, COUNT: gl.constexpr, PARTS: gl.constexpr, C: gl.constexpr, column=0
):
    """Load the first parts of a tile of a chunk, which has PARTS of them in memory."""
    for n in gl.static_range(COUNT):
        async_load(memory, [(chunk * PARTS + n) * C, column], barrier, tiles.index(stage * COUNT + n))


@gluon.jit
def rows_of(X, length, stride, SIZE: gl.constexpr, DIMS, TILE: gl.constexpr):
    """Describe rows of one head. Reads beyond them are 0, and writes do nothing."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SIZE, TILE], X.dtype.element_ty)
    return tma.make_tensor_descriptor(X, [length, DIMS], [stride, 1], [SIZE, TILE], LAYOUT)


@gluon.jit
def room(of, COUNT: gl.constexpr, SIZE: gl.constexpr, WIDTH: gl.constexpr):
    """Allocate tiles of a descriptor."""
    return gl.allocate_shared_memory(of.dtype, [COUNT, SIZE, WIDTH], of.layout)


@gluon.jit
def ring(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Make barriers."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(COUNT):
        mbarrier.init(barriers.index(n), count=ARRIVALS)
    return barriers
