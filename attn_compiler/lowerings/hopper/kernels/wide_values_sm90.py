"""The gradient of v for Hopper and head dims above 256, in Gluon: as forward_wide_sm90.py, with keys in place of queries, and weights from
the rows' lse.

A program has 128 keys and passes over the queries once for each 256 dims of the values. The scores are transposed, (keys, queries), so
that weights stay in registers as the left operand of their product with the output's gradient.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from attn_compiler.lowerings.hopper.kernels.forward_fetching_sm90 import place_of_queries
from attn_compiler.lowerings.hopper.kernels.forward_masks_sm90 import slope_of
from attn_compiler.lowerings.hopper.kernels.forward_ring_sm90 import (
    add_outputs,
    barriers_of_ring,
    let_go,
    outputs_that_came,
    part_at,
    passes_in,
    scores_in_parts,
)
from attn_compiler.lowerings.hopper.kernels.grad_tiles_sm90 import REGISTERS_OF_ALL, keys_of_block, mark_nan, weights_of
from attn_compiler.lowerings.hopper.kernels.head_parts_sm90 import out_layout, weights_layout
from attn_compiler.lowerings.hopper.kernels.tuples import ForwardWork, KeyBlock, Masks, QueryMasks, Visits
from attn_compiler.lowerings.hopper.kernels.visiting import nth_tile
from attn_compiler.lowerings.hopper.kernels.wide_fetching_sm90 import fetch_for_values
from attn_compiler.lowerings.hopper.kernels.wide_visiting_sm90 import (
    list_of_wide_block,
    wide_block,
    wide_visits,
)
from attn_compiler.lowerings.shared.kernels.optional import at_index
from attn_compiler.lowerings.shared.kernels.releases import members
from attn_compiler.lowerings.shared.kernels.tile_parts import LOG2E
from attn_compiler.lowerings.shared.kernels.tiles_sm90 import ROWS, descriptor, narrowed
from attn_compiler.lowerings.shared.kernels.tuples_sm90 import GradLayouts, SharedTiles


@gluon.jit
def _weights(
    scores, tile, base, own, masks, tiles, sizes, MASKED: gl.constexpr, layouts: gl.constexpr, how: gl.constexpr
):  # fmt: skip
    """Return the weights of a tile as the left operand of a product."""
    found, _ = weights_of(scores, tile * how.TILE, MASKED, base, None, own, masks, sizes, layouts, how)
    return gl.convert_layout(narrowed(found, tiles.k), weights_layout(how.PART, 0), assert_trivial=True)


@gluon.jit
def _base(stats, tile, layouts: gl.constexpr, how: gl.constexpr):
    """Load -lse of a tile's queries, in units of log 2."""
    return gl.load(stats + tile * how.TILE + gl.arange(0, how.TILE, layout=gl.SliceLayout(0, layouts.SCORES)))


@gluon.jit
def _step(
    i, tile, done, state, parts, own, stats, masks, tiles, barriers, sizes,
    MASKED: gl.constexpr, layouts: gl.constexpr, how: gl.constexpr,
):  # fmt: skip
    """Process the scores of a pass's i-th tile, and the sums of the one before. `done`: parts before the pass. state: sums, and the weights
    before."""
    K_PARTS: gl.constexpr = how.QK_ALL // how.PART
    V_PARTS: gl.constexpr = how.V_ALL // how.PART
    sums, weights = state
    at = done + i * (K_PARTS + V_PARTS) - V_PARTS
    base = _base(stats, tile, layouts, how)
    scores, base = scores_in_parts(parts, at, base, tiles, barriers, layouts.SCORES, how)
    sums = add_outputs(weights, at + K_PARTS, sums, tiles, barriers, how)
    scores = warpgroup_mma_wait(V_PARTS, deps=(scores,))
    let_go(at + K_PARTS - 1, barriers, how)
    weights = _weights(scores, tile, base, own, masks, tiles, sizes, MASKED, layouts, how)
    # For the part that is multiplied next: ptxas moves the weights behind the products' wait unless something that branches is between.
    part_at(at + K_PARTS + V_PARTS, tiles, barriers, how)
    return outputs_that_came(at + K_PARTS, sums, barriers, how), weights


@gluon.jit
def _tiles(
    done, visits, parts, own, stats, masks, tiles, barriers, sizes, layouts: gl.constexpr, how: gl.constexpr
):  # fmt: skip
    """Run the sums over all tiles of a pass but the last one, and return its weights."""
    K_PARTS: gl.constexpr = how.QK_ALL // how.PART
    partial = visits.partial
    count = partial + visits.full_last - visits.full_first
    sums = ()
    for _ in gl.static_range(how.V_ALL // how.PART):
        sums += (gl.zeros([ROWS, how.PART], gl.float32, layout=out_layout(how.PART, 0)),)
    # The first tile has none before it. It is masked always.
    tile = nth_tile(0, visits)
    base = _base(stats, tile, layouts, how)
    scores, base = scores_in_parts(parts, done, base, tiles, barriers, layouts.SCORES, how)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    let_go(done + K_PARTS - 1, barriers, how)
    weights = _weights(scores, tile, base, own, masks, tiles, sizes, True, layouts, how)
    state = (sums, weights)
    for i in range(1, partial):
        state = _step(
            i, nth_tile(i, visits), done, state, parts, own, stats, masks, tiles, barriers, sizes, True, layouts, how
        )  # fmt: skip
    for i in range(gl.maximum(partial, 1), count):
        tile = visits.full_first + i - partial
        state = _step(
            i, tile, done, state, parts, own, stats, masks, tiles, barriers, sizes, how.MASK_ALL, layouts, how
        )  # fmt: skip
    return state


@gluon.jit
def _store(GradV, Flag, sums, rows, first, length, stride, how: gl.constexpr):
    """Store the gradient of 64 values of a head from the dim `first` on. stride: from one key to the next."""
    LAYOUT: gl.constexpr = out_layout(how.PART, 0)
    own = gl.convert_layout(rows, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    inside = (own < length)[:, None]
    # Triton's facts on arguments (alignment) are lost in the partitions of warps.
    of_rows = gl.multiple_of(own.to(gl.int64) * stride, 8)[:, None]
    for n in gl.static_range(how.V_ALL // how.PART):
        if how.MARKS:
            mark_nan(Flag, gl.sum(sums[n], 1), own, length)
        dims = first + n * how.PART + gl.arange(0, how.PART, layout=gl.SliceLayout(0, LAYOUT))
        at = gl.multiple_of(GradV, 16) + (of_rows + dims[None, :])
        gl.store(at, sums[n].to(GradV.dtype.element_ty), mask=inside & (dims < how.HEAD_DIM_V)[None, :])


@gluon.jit
def _compute(
    consumer: gl.constexpr, GradV, Flag, stride, RowStats, stats_rows, masks, masking, tiles, barriers, work, rounds, factor,
    softcap, how: gl.constexpr,
):  # fmt: skip
    """Compute 64 keys of each block of this program, in each pass."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, how.TILE, 16]
    )
    LAYOUTS: gl.constexpr = GradLayouts(SCORES=SCORES)
    K_PARTS: gl.constexpr = how.QK_ALL // how.PART
    V_PARTS: gl.constexpr = how.V_ALL // how.PART
    PASSES: gl.constexpr = passes_in(how.HEAD_DIM_V, how.V_ALL)
    sizes = work.sizes
    done = 0
    for nth in range(rounds * PASSES):
        is_one, block, batch, head, row = wide_block(nth // PASSES, work, how)
        if is_one:
            turn = nth % PASSES
            List = list_of_wide_block(work, batch, head, block, how)
            partial, first, second, full_first, full_last = wide_visits(List, block, sizes, how)
            visits = Visits(
                List=List, partial=partial, first=first, second=second, full_first=full_first, full_last=full_last
            )  # fmt: skip
            keys, least, most = keys_of_block(block, batch, consumer, masks, masking, sizes, LAYOUTS, how)
            document = None
            if masks.DocumentsK is not None:
                of_row = at_index(masks.DocumentsK, batch, masking.documents_kb)
                document = gl.load(of_row + keys, mask=keys < sizes.seqlen_kv, other=0)
            own = KeyBlock(
                keys=keys, least=least, most=most, document=document, factor=factor, cap=softcap * LOG2E,
                slope=slope_of(masks, head), bits=None,
            )  # fmt: skip
            of_batch = QueryMasks(
                Rows=at_index(masks.Rows, batch, masking.rows_b), rows_side=masking.rows_side,
                Documents=at_index(masks.DocumentsQ, batch, masking.documents_qb),
                Bits=None,
            )  # fmt: skip
            place, phase = place_of_queries(consumer, nth // PASSES, how)
            parts = ()
            for n in gl.static_range(K_PARTS):
                parts += (tiles.q.index(place * K_PARTS + n).reshape([ROWS, how.PART]),)
            mbarrier.wait(barriers.q_full.index(place), phase)
            stats = RowStats + row.to(gl.int64) * (2 * stats_rows)
            sums, weights = _tiles(
                done, visits, parts, own, stats, of_batch, tiles, barriers, sizes, LAYOUTS, how
            )  # fmt: skip
            if turn == PASSES - 1:
                mbarrier.arrive(barriers.q_empty.index(place))
            done += (partial + full_last - full_first) * (K_PARTS + V_PARTS)
            sums = add_outputs(weights, done - V_PARTS, sums, tiles, barriers, how)
            sums = outputs_that_came(done - V_PARTS, sums, barriers, how)
            of_head_v = GradV + (batch.to(gl.int64) * stride.b + head.to(gl.int64) * stride.h)
            _store(of_head_v, Flag, sums, keys, turn * how.V_ALL, sizes.seqlen_kv, stride.s, how)


@gluon.jit(do_not_specialize=["section", "blocks", "heads_of_all"])
def attention_grad_v_wide_sm90(
    Q, K, GradOut, RowStats, GradV, Flag, Rows, Keys, DocumentsQ, DocumentsK, Lists, Slopes, stride_q, stride_k, stride_g,
    stride_dv, stats_rows, masking, lists, sizes, section, blocks, heads_of_all, HOW: gl.constexpr,
):  # fmt: skip
    """Write the part of dv of each query head to GradV, (B, Hq, Skv, D). Grid, num_warps and operands: as `attention_grad_wide_sm90`, with
    blocks of 128 keys. HOW: V_ALL are the dims of a pass, and STAGES parts of PART dims are in shared memory."""
    how: gl.constexpr = members(HOW)
    rounds = (blocks * heads_of_all + gl.num_programs(0) - 1) // gl.num_programs(0)
    work = ForwardWork(section=section, blocks=blocks, heads_of_all=heads_of_all, sizes=sizes, Lists=Lists, lists=lists)
    heads, batch = sizes.heads_q, heads_of_all // sizes.heads_q
    of_k = descriptor(K, batch, heads // sizes.group, sizes.seqlen_kv, stride_k, ROWS, how.HEAD_DIM_QK, how.PART)
    of_q = descriptor(Q, batch, heads, sizes.seqlen_q, stride_q, how.TILE, how.HEAD_DIM_QK, how.PART)
    of_g = descriptor(GradOut, batch, heads, sizes.seqlen_q, stride_g, how.TILE, how.HEAD_DIM_V, how.PART)
    ELEMENT: gl.constexpr = K.dtype.element_ty
    ROOM: gl.constexpr = how.CONSUMERS * how.QUERY_STAGES
    own = gl.allocate_shared_memory(ELEMENT, [ROOM * (how.QK_ALL // how.PART), 1, 1, ROWS, how.PART], of_k.layout)
    ring = gl.allocate_shared_memory(ELEMENT, [how.STAGES, 1, 1, how.TILE, how.PART], of_q.layout)
    tiles = SharedTiles(q=own, k=ring, v=ring, out=None)
    barriers = barriers_of_ring(ROOM, how.STAGES, how.CONSUMERS)
    masks = Masks(Rows=Rows, Keys=Keys, DocumentsQ=DocumentsQ, DocumentsK=DocumentsK, Slopes=Slopes, Bits=None)
    softcap = sizes.changed_by
    factor = sizes.scale / softcap if how.SOFTCAP else sizes.scale * LOG2E
    gl.warp_specialize(
        [
            (
                _compute,
                (
                    0, GradV, Flag, stride_dv, RowStats, stats_rows, masks, masking, tiles, barriers, work, rounds, factor, softcap,
                    how,
                ),
            ),
            (
                _compute,
                (
                    1, GradV, Flag, stride_dv, RowStats, stats_rows, masks, masking, tiles, barriers, work, rounds, factor, softcap,
                    how,
                ),
            ),
            (fetch_for_values, (of_k, of_q, of_g, tiles, barriers, work, rounds, how)),
        ],
        [4, 4],
        [how.REGISTERS, REGISTERS_OF_ALL - 2 * how.REGISTERS],
    )  # fmt: skip
