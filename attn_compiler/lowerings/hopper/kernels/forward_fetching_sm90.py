"""The forward's producer warpgroup, which has the copy engine load tiles, and the order of its blocks and tiles."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attn_compiler.lowerings.hopper.kernels.forward_added_sm90 import fetch_added
from attn_compiler.lowerings.hopper.kernels.head_parts_sm90 import fetch_parts
from attn_compiler.lowerings.hopper.kernels.tuples import Visits
from attn_compiler.lowerings.hopper.kernels.visiting import nth_shortest, nth_tile
from attn_compiler.lowerings.shared.kernels.optional import list_of
from attn_compiler.lowerings.shared.kernels.scheduling_sm90 import turn
from attn_compiler.lowerings.shared.kernels.tile_visits import keys_to_visit
from attn_compiler.lowerings.shared.kernels.tiles_sm90 import ROWS


@gluon.jit
def nth_block(nth, work, how: gl.constexpr):
    """Return whether this program has an nth block of queries, then its number, batch row, head, and row of the lse."""
    is_one, block, row = turn(nth, work.section, work.blocks, work.heads_of_all)
    # Without an nth block, the first one's list is read.
    block, row = gl.where(is_one, block, 0), gl.where(is_one, row, 0)
    batch, head = row // work.sizes.heads_q, row % work.sizes.heads_q
    if how.BATCH_LAST:
        batches = work.heads_of_all // work.sizes.heads_q
        batch, head = row % batches, row // batches
        row = batch * work.sizes.heads_q + head
    if how.ORDERED:
        block = nth_shortest(block, work, batch, head)
    return is_one, block, batch, head, row


@gluon.jit
def list_of_block(work, batch, head, block):
    """Return the address of a block's list, or None."""
    return list_of(work.Lists, batch, head, block, work.lists)


@gluon.jit
def tiles_to_visit(List, block, sizes, how: gl.constexpr):
    """Return partial, first, second, full_first and full_last of `Visits`: one tile at least, even if none of its keys is allowed."""
    partial, first, second, full_first, full_last = keys_to_visit(List, block * how.BLOCK_M, sizes, how)
    is_none = partial + full_last <= full_first
    return gl.where(is_none, 1, partial), gl.where(is_none, 0, first), second, full_first, full_last


@gluon.jit
def _fetch_tile(X, batch, head, position, stage, phase, full, empty, tiles, ALL: gl.constexpr):
    """Load a tile as soon as all warpgroups have freed its buffer."""
    mbarrier.wait(empty.index(stage), phase ^ 1)
    fetch_parts(X, batch, head, position, full.index(stage), tiles, stage, ALL)


@gluon.jit
def place_of_queries(consumer: gl.constexpr, nth, how: gl.constexpr):
    """Return the buffer of a warpgroup's queries of the nth block, and the parity of its uses before (the barrier's phase)."""
    return consumer + how.CONSUMERS * (nth % how.QUERY_STAGES), (nth // how.QUERY_STAGES) & 1


@gluon.jit
def fetch(Q, K, V, tiles, added, barriers, work, rounds, how: gl.constexpr):
    """Load the queries of every warpgroup for each block, then tiles of keys and values, keys a tile ahead. Runs ahead into the next block.

    The added tile comes last: its buffer is free later than that of the values before.
    """
    done = 0
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
            for consumer in gl.static_range(how.CONSUMERS):
                place, phase = place_of_queries(consumer, nth, how)
                position = start + consumer * ROWS
                _fetch_tile(
                    Q, batch, head, position, place, phase, barriers.q_full, barriers.q_empty, tiles.q, how.QK_ALL
                )  # fmt: skip
            key = nth_tile(0, visits) * how.BLOCK_N
            stage, phase = done % how.STAGES, (done // how.STAGES) & 1
            _fetch_tile(
                K, batch, head_kv, key, stage, phase, barriers.k_full, barriers.k_empty, tiles.k, how.QK_ALL
            )  # fmt: skip
            if how.ADDED_STAGES > 0:
                fetch_added(batch, head, start, key, done, added, how)
            for i in range(1, count):
                next_stage, next_phase = (done + i) % how.STAGES, ((done + i) // how.STAGES) & 1
                next_key = nth_tile(i, visits) * how.BLOCK_N
                _fetch_tile(
                    K, batch, head_kv, next_key, next_stage, next_phase, barriers.k_full, barriers.k_empty, tiles.k, how.QK_ALL
                )  # fmt: skip
                _fetch_tile(
                    V, batch, head_kv, key, stage, phase, barriers.v_full, barriers.v_empty, tiles.v, how.V_ALL
                )  # fmt: skip
                if how.ADDED_STAGES > 0:
                    fetch_added(batch, head, start, next_key, done + i, added, how)
                key, stage, phase = next_key, next_stage, next_phase
            _fetch_tile(
                V, batch, head_kv, key, stage, phase, barriers.v_full, barriers.v_empty, tiles.v, how.V_ALL
            )  # fmt: skip
            done += count
