"""The producer warpgroup of the backward for wide heads, which has the copy engine load parts of tiles, and the barriers of dq and dk. In
Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attn_compiler.lowerings.hopper.kernels.forward_ring_sm90 import fetch_rows_in_parts, fetch_tile_in_parts, passes_in
from attn_compiler.lowerings.hopper.kernels.grad_fetching_sm90 import rooms_for_barriers
from attn_compiler.lowerings.hopper.kernels.tuples import Visits, WideBarriers
from attn_compiler.lowerings.hopper.kernels.visiting import nth_tile
from attn_compiler.lowerings.hopper.kernels.wide_visiting_sm90 import list_of_wide_block, wide_block, wide_visits
from attn_compiler.lowerings.shared.kernels.releases_sm90 import async_load
from attn_compiler.lowerings.shared.kernels.tiles_sm90 import ROWS


@gluon.jit
def wide_barriers_of(STAGES: gl.constexpr, STAGES_V: gl.constexpr):
    """Make barriers of a block's own rows, of STAGES and STAGES_V parts of tiles, each read last by one warpgroup, and of a tile's
    gradients."""
    single = rooms_for_barriers(7, [1])
    own_full, own_empty, own_v_full, own_v_empty, given, grads_full, grads_empty = single
    full, empty = rooms_for_barriers(2, [STAGES, 1])
    v_full, v_empty = rooms_for_barriers(2, [STAGES_V, 1])
    for i in gl.static_range(7):
        mbarrier.init(single[i], count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(STAGES_V):
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=1)
    fence_async_shared()
    return WideBarriers(
        own_full=own_full, own_empty=own_empty, own_v_full=own_v_full, own_v_empty=own_v_empty, full=full, empty=empty,
        v_full=v_full, v_empty=v_empty, given=given, grads_full=grads_full, grads_empty=grads_empty,
    )  # fmt: skip


@gluon.jit
def _fetch_own(of, batch, head, start, nth, tiles, full, empty, PARTS: gl.constexpr, PART: gl.constexpr):
    """Load the rows of the nth block, in parts."""
    mbarrier.wait(empty, (nth & 1) ^ 1)
    mbarrier.expect(full, of.block_type.nbytes * PARTS)
    for part in gl.static_range(PARTS):
        async_load(of, [batch, head, start, part * PART], full, tiles.index(part))


@gluon.jit
def _fetch_others(
    of, batch, head, start, n, tiles, full, empty, PARTS: gl.constexpr, PART: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Load the parts of the n-th tile, each as soon as its last reader has freed its buffer."""
    for part in gl.static_range(PARTS):
        place = (n * PARTS + part) % STAGES
        mbarrier.wait(empty.index(place), (((n * PARTS + part) // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(place), of.block_type.nbytes)
        async_load(of, [batch, head, start, part * PART], full.index(place), tiles.index(place))


@gluon.jit
def fetch_wide(of_own, of_own_v, of_others, of_others_v, tiles, barriers, work, rounds, how: gl.constexpr):
    """Load each block's rows, and the tiles of the other side. The weights' gradients' part of a tile comes first: their product runs while
    the tile before has its softmax."""
    PARTS: gl.constexpr = how.QK_ALL // how.PART
    PARTS_V: gl.constexpr = how.V_ALL // how.PART_V
    n = 0
    for nth in range(rounds):
        is_one, block, batch, head, _row = wide_block(nth, work, how)
        if is_one:
            List = list_of_wide_block(work, batch, head, block, how)
            partial, first, second, full_first, full_last = wide_visits(List, block, work.sizes, how)
            visits = Visits(
                List=List, partial=partial, first=first, second=second, full_first=full_first, full_last=full_last
            )  # fmt: skip
            count = partial + full_last - full_first
            head_kv = head // work.sizes.group
            own_head, other_head = head, head_kv
            if how.BY_KEY:
                own_head, other_head = head_kv, head
            start = nth_tile(0, visits) * how.TILE
            _fetch_own(
                of_own, batch, own_head, block * ROWS, nth, tiles.own, barriers.own_full, barriers.own_empty, PARTS, how.PART
            )  # fmt: skip
            _fetch_others(
                of_others, batch, other_head, start, n, tiles.others, barriers.full, barriers.empty, PARTS, how.PART, how.STAGES
            )  # fmt: skip
            _fetch_own(
                of_own_v, batch, own_head, block * ROWS, nth, tiles.own_v, barriers.own_v_full, barriers.own_v_empty, PARTS_V,
                how.PART_V,
            )  # fmt: skip
            _fetch_others(
                of_others_v, batch, other_head, start, n, tiles.others_v, barriers.v_full, barriers.v_empty, PARTS_V, how.PART_V,
                how.STAGES_V,
            )  # fmt: skip
            for i in range(1, count):
                start = nth_tile(i, visits) * how.TILE
                _fetch_others(
                    of_others_v, batch, other_head, start, n + i, tiles.others_v, barriers.v_full, barriers.v_empty, PARTS_V,
                    how.PART_V, how.STAGES_V,
                )  # fmt: skip
                _fetch_others(
                    of_others, batch, other_head, start, n + i, tiles.others, barriers.full, barriers.empty, PARTS, how.PART,
                    how.STAGES,
                )  # fmt: skip
            n += count


@gluon.jit
def fetch_for_values(of_k, of_q, of_g, tiles, barriers, work, rounds, how: gl.constexpr):
    """Load each block's keys, and in each pass over the queries the parts of all tiles: those of q, then those of the output's gradient of
    the tile before. Runs ahead into the next pass and block."""
    K_PARTS: gl.constexpr = how.QK_ALL // how.PART
    V_PARTS: gl.constexpr = how.V_ALL // how.PART
    n = 0
    for nth in range(rounds):
        is_one, block, batch, head, _row = wide_block(nth, work, how)
        if is_one:
            List = list_of_wide_block(work, batch, head, block, how)
            partial, first, second, full_first, full_last = wide_visits(List, block, work.sizes, how)
            visits = Visits(
                List=List, partial=partial, first=first, second=second, full_first=full_first, full_last=full_last
            )  # fmt: skip
            count = partial + full_last - full_first
            head_kv = head // work.sizes.group
            fetch_rows_in_parts(of_k, batch, head_kv, block * how.BLOCK_N, nth, tiles, barriers, how)
            for turn_of_pass in range(passes_in(how.HEAD_DIM_V, how.V_ALL)):
                dim = turn_of_pass * how.V_ALL
                start = nth_tile(0, visits) * how.TILE
                n = fetch_tile_in_parts(of_q, batch, head, start, 0, n, tiles, barriers, K_PARTS, how)
                for i in range(1, count):
                    following = nth_tile(i, visits) * how.TILE
                    n = fetch_tile_in_parts(of_q, batch, head, following, 0, n, tiles, barriers, K_PARTS, how)
                    n = fetch_tile_in_parts(of_g, batch, head, start, dim, n, tiles, barriers, V_PARTS, how)
                    start = following
                n = fetch_tile_in_parts(of_g, batch, head, start, dim, n, tiles, barriers, V_PARTS, how)
