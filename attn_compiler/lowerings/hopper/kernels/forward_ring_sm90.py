"""A ring of shared memory buffers for parts of tiles of keys and values, in Gluon: its loads and its barriers.

The parts of all passes of all blocks of a program are numbered in their order: a tile's keys, then the values of the tile before.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attn_compiler.lowerings.hopper.kernels.forward_fetching_sm90 import (
    list_of_block,
    nth_block,
    place_of_queries,
    tiles_to_visit,
)
from attn_compiler.lowerings.hopper.kernels.tuples import RingBarriers, Visits
from attn_compiler.lowerings.hopper.kernels.visiting import nth_tile
from attn_compiler.lowerings.shared.kernels.releases_sm90 import async_load
from attn_compiler.lowerings.shared.kernels.tiles_sm90 import ROWS


@gluon.constexpr_function
def passes_in(HEAD_DIM, ALL):
    """Return the number of passes over the keys for a head dim, of ALL dims each."""
    return (HEAD_DIM + ALL - 1) // ALL


@gluon.jit
def barriers_of_ring(QUERIES: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Make barriers of QUERIES tiles of queries, each for one warpgroup, and of STAGES parts, each for all CONSUMERS."""
    q_full = gl.allocate_shared_memory(gl.int64, [QUERIES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [QUERIES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(QUERIES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    fence_async_shared()
    return RingBarriers(q_full=q_full, q_empty=q_empty, full=full, empty=empty)


@gluon.jit
def part_at(n, tiles, barriers, how: gl.constexpr):
    """Wait for the n-th part, and return it as (keys, dims)."""
    place = n % how.STAGES
    mbarrier.wait(barriers.full.index(place), (n // how.STAGES) & 1)
    return tiles.k.index(place).reshape([how.TILE, how.PART])


@gluon.jit
def let_go(n, barriers, how: gl.constexpr):
    """Free the n-th part, which a warpgroup has multiplied."""
    mbarrier.arrive(barriers.empty.index(n % how.STAGES))


@gluon.jit
def scores_in_parts(q, at, peak, tiles, barriers, QK_LAYOUT: gl.constexpr, how: gl.constexpr):
    """Start q kᵀ of a tile of keys: the last part's product is still in flight. Returns the rows' maxima unchanged. q: its parts; at: the
    tile's first part."""
    PARTS: gl.constexpr = how.QK_ALL // how.PART
    qk = gl.zeros([ROWS, how.TILE], gl.float32, layout=QK_LAYOUT)
    for n in gl.static_range(PARTS):
        k = part_at(at + n, tiles, barriers, how).permute([1, 0])
        qk = warpgroup_mma(q[n], k, qk, use_acc=n > 0, is_async=True)
        if n > 0:
            # The sums stay in flight, so another value is passed through.
            peak = warpgroup_mma_wait(1, deps=(peak,))
            let_go(at + n - 1, barriers, how)
    return qk, peak


@gluon.jit
def add_outputs(weights, at, out, tiles, barriers, how: gl.constexpr):
    """Start adding the outputs of a tile: a product for each part of the values. at: the first one."""
    found = ()
    for n in gl.static_range(how.V_ALL // how.PART):
        found += (warpgroup_mma(weights, part_at(at + n, tiles, barriers, how), out[n], is_async=True),)
    return found


@gluon.jit
def outputs_that_came(at, out, barriers, how: gl.constexpr):
    """Wait for the products of `add_outputs`."""
    PARTS: gl.constexpr = how.V_ALL // how.PART
    found = ()
    for n in gl.static_range(PARTS):
        found += (warpgroup_mma_wait(PARTS - 1 - n, deps=(out[n],)),)
        let_go(at + n, barriers, how)
    return found


@gluon.jit
def fetch_tile_in_parts(of, batch, head, key, dim, n, tiles, barriers, PARTS: gl.constexpr, how: gl.constexpr):
    """Load the parts of a tile from a key and a dim on, each as soon as all warpgroups have freed its buffer. n: the first part. Returns
    the number of the next part."""
    for part in gl.static_range(PARTS):
        place = (n + part) % how.STAGES
        mbarrier.wait(barriers.empty.index(place), (((n + part) // how.STAGES) & 1) ^ 1)
        mbarrier.expect(barriers.full.index(place), of.block_type.nbytes)
        async_load(
            of, [batch, head, key, dim + part * how.PART], barriers.full.index(place), tiles.k.index(place)
        )  # fmt: skip
    return n + PARTS


@gluon.jit
def fetch_rows_in_parts(of, batch, head, start, nth, tiles, barriers, how: gl.constexpr):
    """Load the rows of every warpgroup of the nth block, in parts."""
    PARTS: gl.constexpr = how.QK_ALL // how.PART
    for consumer in gl.static_range(how.CONSUMERS):
        place, phase = place_of_queries(consumer, nth, how)
        mbarrier.wait(barriers.q_empty.index(place), phase ^ 1)
        mbarrier.expect(barriers.q_full.index(place), of.block_type.nbytes * PARTS)
        for part in gl.static_range(PARTS):
            at = [batch, head, start + consumer * ROWS, part * how.PART]
            async_load(of, at, barriers.q_full.index(place), tiles.q.index(place * PARTS + part))


@gluon.jit
def fetch_parts_in_turn(of_q, of_k, of_v, tiles, barriers, work, rounds, how: gl.constexpr):
    """Load the queries of each block, and in each pass over its keys the parts of all tiles. Runs ahead into the next pass and block."""
    K_PARTS: gl.constexpr = how.QK_ALL // how.PART
    V_PARTS: gl.constexpr = how.V_ALL // how.PART
    n = 0
    for nth in range(rounds):
        is_one, block, batch, head, _row = nth_block(nth, work, how)
        if is_one:
            start = block * how.BLOCK_M
            List = list_of_block(work, batch, head, block)
            partial, first, second, full_first, full_last = tiles_to_visit(List, block, work.sizes, how)
            visits = Visits(
                List=List, partial=partial, first=first, second=second, full_first=full_first, full_last=full_last
            )  # fmt: skip
            count = partial + full_last - full_first
            head_kv = head // work.sizes.group
            fetch_rows_in_parts(of_q, batch, head, start, nth, tiles, barriers, how)
            for turn in range(passes_in(how.HEAD_DIM_V, how.V_ALL)):
                dim = turn * how.V_ALL
                key = nth_tile(0, visits) * how.BLOCK_N
                n = fetch_tile_in_parts(of_k, batch, head_kv, key, 0, n, tiles, barriers, K_PARTS, how)
                for i in range(1, count):
                    next_key = nth_tile(i, visits) * how.BLOCK_N
                    n = fetch_tile_in_parts(of_k, batch, head_kv, next_key, 0, n, tiles, barriers, K_PARTS, how)
                    n = fetch_tile_in_parts(of_v, batch, head_kv, key, dim, n, tiles, barriers, V_PARTS, how)
                    key = next_key
                n = fetch_tile_in_parts(of_v, batch, head_kv, key, dim, n, tiles, barriers, V_PARTS, how)
