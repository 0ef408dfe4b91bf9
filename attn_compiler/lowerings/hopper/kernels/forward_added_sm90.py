"""Tiles of a dense bias or of biases by distance, added to the scores of Hopper's forward, which the copy engine loads for each warpgroup.

Biases by distance lie in memory once for each of 64 queries, each copy shifted by one. A tile of them is read like any other: it begins
at the distance between its first query and its first key.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from attn_compiler.lowerings.shared.kernels.releases_sm90 import async_load, barrier_of_threads
from attn_compiler.lowerings.shared.kernels.tiles_sm90 import ROWS


@gluon.jit
def descriptor_of_added(Added, adding, SIZE: gl.constexpr, KEYS: gl.constexpr):
    """Make a descriptor of tiles of SIZE queries and KEYS keys. adding: `Adding`."""
    TILE: gl.constexpr = [1, 1, SIZE, KEYS]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(TILE, Added.dtype.element_ty)
    shape = [adding.batches, adding.heads, adding.rows, adding.columns]
    return tma.make_tensor_descriptor(
        Added, shape, [adding.stride_b, adding.stride_h, adding.stride_q, 1], TILE, LAYOUT
    )  # fmt: skip


@gluon.jit
def room_for_added(of, ELEMENT: gl.constexpr, how: gl.constexpr):
    """Allocate shared memory and barriers (full, empty) for ADDED_STAGES tiles of each warpgroup. of: their descriptor."""
    COUNT: gl.constexpr = how.ADDED_STAGES * how.CONSUMERS
    tiles = gl.allocate_shared_memory(ELEMENT, [COUNT, 1, 1, ROWS, how.BLOCK_N], of.layout)
    full = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    return tiles, full, empty


@gluon.jit
def fetch_added(batch, head, start, key, n, added, how: gl.constexpr):
    """Load every warpgroup's added tile, the n-th of the program. start: the block's first query; key: the tile's first one."""
    BYTES: gl.constexpr = added.of.block_type.nbytes
    adding = added.at
    own_batch, own_head = gl.minimum(batch, adding.batches - 1), gl.minimum(head, adding.heads - 1)
    for consumer in gl.static_range(how.CONSUMERS):
        place = n % how.ADDED_STAGES * how.CONSUMERS + consumer
        row, column = start + consumer * ROWS, key
        if how.BY_DISTANCE:
            row, column = start * 0, key - row + adding.zero
        mbarrier.wait(added.empty.index(place), ((n // how.ADDED_STAGES) & 1) ^ 1)
        mbarrier.expect(added.full.index(place), BYTES)
        async_load(
            added.of, [own_batch, own_head, row, column], added.full.index(place), added.tiles.index(place)
        )  # fmt: skip


@gluon.jit
def added_of(consumer: gl.constexpr, n, added, QK_LAYOUT: gl.constexpr, how: gl.constexpr):
    """Wait for a warpgroup's n-th added tile, and return it in its own dtype."""
    place = n % how.ADDED_STAGES * how.CONSUMERS + consumer
    mbarrier.wait(added.full.index(place), (n // how.ADDED_STAGES) & 1)
    return added.tiles.index(place).reshape([ROWS, how.BLOCK_N]).load(QK_LAYOUT)


@gluon.jit
def let_go_of_added(consumer: gl.constexpr, n, added, how: gl.constexpr):
    """Free the n-th tile's buffer for the copy engine. Call it once its elements were used.

    Until then ptxas may leave loads in flight, which no barrier waits for: on an H100 the copy engine wrote the next tile over them.
    """
    place = n % how.ADDED_STAGES * how.CONSUMERS + consumer
    fence_async_shared()
    barrier_of_threads()
    mbarrier.arrive(added.empty.index(place))
