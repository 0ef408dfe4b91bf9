"""Hopper's producer warpgroup of the backward, in Gluon: it takes blocks of keys from a counter, loads their tiles of queries, and tells
the other warpgroups their work."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attn_compiler.lowerings.hopper.kernels.in_order_sm90 import await_turn, give_turn, last_first, place_in_order, rank
from attn_compiler.lowerings.hopper.kernels.tuples import GradBarriers, Visits
from attn_compiler.lowerings.hopper.kernels.visiting import nth_shortest, nth_tile
from attn_compiler.lowerings.shared.kernels.optional import list_of
from attn_compiler.lowerings.shared.kernels.releases_sm90 import async_load
from attn_compiler.lowerings.shared.kernels.scheduling_sm90 import place
from attn_compiler.lowerings.shared.kernels.tile_visits import queries_to_visit
from attn_compiler.lowerings.shared.kernels.tiles_sm90 import ROWS


@gluon.jit
def _key_block(item, work, how: gl.constexpr):
    """Split an item of work into a block of keys, a batch row and a head of queries."""
    if how.IN_ORDER:
        nth, row = place_in_order(item, work)
        block = work.blocks - 1 - nth
    else:
        block, row = place(item, work.section, work.blocks, work.heads_of_all)
    batch, head = row // work.sizes.heads_q, row % work.sizes.heads_q
    if how.ORDERED:
        block = nth_shortest(block, work, batch, head)
    else:
        # A block's length grows with its number for queries. For keys the first ones are the long ones.
        block = work.blocks - 1 - block
    return block, batch, head


@gluon.jit
def told_block(number, work):
    """Split the number that `fetch` told, as `_key_block`."""
    row = number // work.blocks
    return number % work.blocks, row // work.sizes.heads_q, row % work.sizes.heads_q


@gluon.jit
def _visits(work, batch, head, block, how: gl.constexpr):
    """Return partial, first, second, full_first and full_last of `Visits` of a block of keys in one head of queries, and the number of
    tiles to mask: all, where keys end within the block."""
    start = block * how.BLOCK_N
    List = list_of(work.Lists, batch, head, block, work.lists)
    partial, first, second, full_first, full_last = queries_to_visit(List, start, work.sizes, how)
    masked = gl.where(start + how.BLOCK_N > work.sizes.seqlen_kv, partial + full_last - full_first, partial)
    return partial, first, second, full_first, full_last, masked


@gluon.jit
def _tell(tiles, at, number):
    """Write a number to shared memory, for the warpgroups that compute."""
    NUMBER: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    tiles.index(at).store(gl.full([1], number, gl.int32, layout=NUMBER))


@gluon.jit
def told(tiles, at):
    """Read a number that `_tell` wrote."""
    NUMBER: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(tiles.index(at).load(NUMBER), 0)


@gluon.jit
def _fetch_tile(X, at, full, stage, tiles):
    """Load a tile."""
    mbarrier.expect(full.index(stage), X.block_type.nbytes)
    async_load(X, at, full.index(stage), tiles.index(stage))


@gluon.jit
def _fetch_with_bias(Q, at, full, stage, tiles, added, key):
    """Load a tile of queries, and the bias of these and each warpgroup's keys. key: the first of the block."""
    batch, head, query = at[0], at[1], at[2]
    mbarrier.expect(full, Q.block_type.nbytes + 2 * added.of.block_type.nbytes)
    async_load(Q, [batch, head, query, 0], full, tiles.q.index(stage))
    batch, head = gl.minimum(batch, added.at.batches - 1), gl.minimum(head, added.at.heads - 1)
    for half in gl.static_range(2):
        async_load(
            added.of, [batch, head, query, key + half * ROWS], full, added.tiles.index(2 * stage + half)
        )  # fmt: skip


@gluon.jit
def _fetch_keys(K, V, batch, head, start, loaded, tiles, barriers):
    """Load the keys and values of a block, half for each warpgroup, as soon as both have freed those of the block before."""
    mbarrier.wait(barriers.kv_empty, (loaded & 1) ^ 1)
    mbarrier.expect(barriers.kv_full, 2 * K.block_type.nbytes + 2 * V.block_type.nbytes)
    for half in gl.static_range(2):
        at = [batch, head, start + half * ROWS, 0]
        async_load(K, at, barriers.kv_full, tiles.k.index(half))
        async_load(V, at, barriers.kv_full, tiles.v.index(half))


@gluon.jit
def _let_add(Turns, n, tiles, how: gl.constexpr):
    """Wait until it is this block's turn at the n-th tile, and tell so."""
    ROOM: gl.constexpr = 2 * how.STAGES
    await_turn(Turns + told(tiles.turns, n % ROOM), told(tiles.turns, ROOM + n % ROOM))
    mbarrier.arrive(tiles.turn_full.index(n % ROOM))


@gluon.jit
def _give_last(Turns, n, count, tiles, how: gl.constexpr):
    """Pass on the turns of the last of n tiles, once they are added."""
    for i in range(count):
        give_turn(Turns + told(tiles.turns, (n - count + i) % (2 * how.STAGES)))


@gluon.jit
def fetch(
    Q, K, V, GradOut, added, RowStats, Counter, Turns, Ranks, stats_rows, tiles, barriers, work, how: gl.constexpr
):
    """Load each block's keys and values, and tiles of queries, of the output's gradient and of row stats: those that need their mask first.
    A counter that all programs share gives the next block, so none is done long before the others.

    Where blocks take turns, a program takes none before it is about to begin it: those of later ones would wait for it.
    """
    NUMBERS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    offsets = gl.arange(0, 2 * how.BLOCK_M, layout=NUMBERS)
    ROOM: gl.constexpr = 2 * how.STAGES
    # -lse of a tile's rows, and then delta.
    within = offsets % how.BLOCK_M + (offsets // how.BLOCK_M) * stats_rows
    sizes = work.sizes
    item, nth, loaded, done = gl.program_id(0), 0, 0, 0
    # Tiles of the block before that others were not yet told of: they can be as soon as its keys may be written over.
    given = item * 0
    if how.IN_ORDER:
        item = gl.atomic_add(Counter, 1)
    while item < work.blocks * work.heads_of_all:
        next_item = item
        if not how.IN_ORDER:
            next_item = gl.atomic_add(Counter, 1) + gl.num_programs(0)
        block, batch, head = _key_block(item, work, how)
        partial, first, second, full_first, full_last, masked = _visits(work, batch, head, block, how)
        visits = Visits(
            List=list_of(work.Lists, batch, head, block, work.lists), partial=partial, first=first, second=second,
            full_first=full_first, full_last=full_last,
        )  # fmt: skip
        count = partial + full_last - full_first
        half, phase_of_half = nth % 2, (nth // 2) & 1
        mbarrier.wait(barriers.work_empty.index(half), phase_of_half ^ 1)
        _tell(tiles.work, half * 3, (batch * sizes.heads_q + head) * work.blocks + block)
        _tell(tiles.work, half * 3 + 1, count)
        _tell(tiles.work, half * 3 + 2, masked)
        mbarrier.arrive(barriers.work_full.index(half))
        stats = RowStats + (batch * sizes.heads_q + head).to(gl.int64) * (2 * stats_rows)
        ahead = count * 0
        for i in range(count):
            if how.IN_ORDER:
                tile, ahead = last_first(i, visits, ahead)
                before = rank(Ranks, work, batch, head, block, tile, how)
                query = tile * how.BLOCK_M
            else:
                query = nth_tile(i, visits) * how.BLOCK_M
            found = gl.load(stats + query + within)
            stage, phase = (done + i) % how.STAGES, ((done + i) // how.STAGES) & 1
            at = [batch, head, query, 0]
            mbarrier.wait(barriers.q_empty.index(stage), phase ^ 1)
            if how.IN_ORDER:
                if i > how.STAGES:
                    give_turn(Turns + told(tiles.turns, (done + i - how.STAGES - 1) % ROOM))
            if how.ADDED:
                _fetch_with_bias(Q, at, barriers.q_full.index(stage), stage, tiles, added, block * how.BLOCK_N)
            else:
                _fetch_tile(Q, at, barriers.q_full, stage, tiles.q)
            _fetch_tile(GradOut, at, barriers.g_full, stage, tiles.g)
            # Later than the first tile, which has room before the block before is done.
            if i == 0:
                if how.IN_ORDER:
                    mbarrier.wait(barriers.kv_empty, (loaded & 1) ^ 1)
                    _give_last(Turns, done, given, tiles, how)
                _fetch_keys(K, V, batch, head // sizes.group, block * how.BLOCK_N, loaded, tiles, barriers)
            tiles.stats.index(stage).store(found)
            _tell(tiles.first, stage, query)
            mbarrier.arrive(barriers.stats_full.index(stage))
            if how.IN_ORDER:
                if i > 0:
                    _let_add(Turns, done + i - 1, tiles, how)
                slot = (done + i) % ROOM
                counter = (batch * sizes.heads_q + head) * (stats_rows // how.BLOCK_M) + tile
                _tell(tiles.turns, slot, counter)
                _tell(tiles.turns, ROOM + slot, before)
        if how.IN_ORDER:
            if count > 0:
                _let_add(Turns, done + count - 1, tiles, how)
                given = gl.minimum(count, how.STAGES + 1)
        done += count
        loaded += gl.where(count > 0, 1, 0)
        if how.IN_ORDER:
            next_item = gl.atomic_add(Counter, 1)
        item = next_item
        nth += 1
    if how.IN_ORDER:
        mbarrier.wait(barriers.kv_empty, (loaded & 1) ^ 1)
        _give_last(Turns, done, given, tiles, how)
    half = nth % 2
    mbarrier.wait(barriers.work_empty.index(half), ((nth // 2) & 1) ^ 1)
    _tell(tiles.work, half * 3, -1)
    mbarrier.arrive(barriers.work_full.index(half))


@gluon.jit
def rooms_for_barriers(NUMBER: gl.constexpr, SHAPE: gl.constexpr):
    """Allocate shared memory for barriers of a shape, so many times. They have to be initialised."""
    found = ()
    for _ in gl.static_range(NUMBER):
        found += (gl.allocate_shared_memory(gl.int64, SHAPE, mbarrier.MBarrierLayout()),)
    return found


@gluon.jit
def grad_barriers_of(STAGES: gl.constexpr):
    kv_full, kv_empty = rooms_for_barriers(2, [1])
    q_full, q_empty, g_full, stats_full, grads_full = rooms_for_barriers(5, [STAGES, 1])
    work_full, work_empty = rooms_for_barriers(2, [2, 1])
    for i in gl.static_range(2):
        mbarrier.init(work_full.index(i), count=1)
        mbarrier.init(work_empty.index(i), count=2)
    mbarrier.init(kv_full, count=1)
    mbarrier.init(kv_empty, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(g_full.index(i), count=1)
        mbarrier.init(stats_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
        mbarrier.init(grads_full.index(i), count=2)
    fence_async_shared()
    return GradBarriers(
        kv_full=kv_full, kv_empty=kv_empty, q_full=q_full, q_empty=q_empty, g_full=g_full,
        stats_full=stats_full, grads_full=grads_full, work_full=work_full, work_empty=work_empty,
    )  # fmt: skip
