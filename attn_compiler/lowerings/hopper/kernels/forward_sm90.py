"""Attention forward in half precision for Hopper, in Gluon: bands, intervals, keys, documents, softcap, slopes, biases and sinks.

One warpgroup has the copy engine (TMA) load tiles of keys and values, two or three compute 64 queries each. A warpgroup has two products
in flight: the scores of a tile, and the outputs of the one before, whose softmax is over (https://arxiv.org/abs/2407.08608, section 3.2).
Two warpgroups take turns, so that one computes its softmax while the other has the tensor cores. A program computes several blocks of
queries.

Tiles that need their mask come first, then the others, in a loop of their own. A masked key may hold NaN, and 0 · NaN is NaN: such rows
are marked by an lse that is NaN, and recomputed (`again`, of the Triton family).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from attn_compiler.lowerings.hopper.kernels.forward_added_sm90 import (
    added_of,
    descriptor_of_added,
    let_go_of_added,
    room_for_added,
)
from attn_compiler.lowerings.hopper.kernels.forward_fetching_sm90 import (
    fetch,
    list_of_block,
    nth_block,
    place_of_queries,
    tiles_to_visit,
)
from attn_compiler.lowerings.hopper.kernels.forward_masks_sm90 import documents_of, keys_of, slope_of, words_of
from attn_compiler.lowerings.hopper.kernels.forward_softmax_sm90 import divided, softmax
from attn_compiler.lowerings.hopper.kernels.forward_turns_sm90 import await_products, give_products
from attn_compiler.lowerings.hopper.kernels.head_parts_sm90 import (
    descriptors,
    no_outputs,
    outputs_of,
    outputs_there,
    parts_in,
    put,
    room,
    rows_at,
    scores_of,
    send,
    sums_of,
    times,
    weights_layout,
    zero_where,
)
from attn_compiler.lowerings.hopper.kernels.tuples import AddedTiles, ForwardWork, Masks, Visits, Warpgroup
from attn_compiler.lowerings.hopper.kernels.visiting import nth_tile
from attn_compiler.lowerings.shared.kernels.optional import at_index, of_head
from attn_compiler.lowerings.shared.kernels.releases import members
from attn_compiler.lowerings.shared.kernels.releases_sm90 import barrier_of_threads
from attn_compiler.lowerings.shared.kernels.scheduling_sm90 import barriers_of
from attn_compiler.lowerings.shared.kernels.tile_parts import LOG2E
from attn_compiler.lowerings.shared.kernels.tiles_sm90 import (
    FEW,
    NOTHING,
    ROWS,
    SHARES,
    narrowed,
)
from attn_compiler.lowerings.shared.kernels.tuples_sm90 import SharedTiles


@gluon.jit
def _scores(own, tiles, stage, QK_LAYOUT: gl.constexpr, how: gl.constexpr):
    """Start q kᵀ of a tile of keys."""
    no_scores = gl.zeros([ROWS, how.BLOCK_N], gl.float32, layout=QK_LAYOUT)
    return scores_of(own.q, rows_at(tiles.k, stage, how.BLOCK_N, how.QK_ALL), no_scores, how.QK_ALL)


@gluon.jit
def _step(
    consumer: gl.constexpr, i, tile, done, state, own, masks, tiles, added, barriers, seqlen_kv,
    MASKED: gl.constexpr, QK_LAYOUT: gl.constexpr, how: gl.constexpr,
):  # fmt: skip
    """Process the scores of a block's i-th tile, and the outputs of the one before, whose values are loaded. `done`: tiles before the
    block.

    state: maximum of each row, its sum as `shares` of it, the output, and the weights of the tile before.
    """
    WEIGHTS: gl.constexpr = weights_layout(how.V_ALL, 0)
    peak, total, out, weights = state
    stage, phase = (done + i) % how.STAGES, ((done + i) // how.STAGES) & 1
    before = (done + i - 1) % how.STAGES
    mbarrier.wait(barriers.k_full.index(stage), phase)
    await_products(consumer, how)
    qk = _scores(own, tiles, stage, QK_LAYOUT, how)
    out = outputs_of(weights, rows_at(tiles.v, before, how.BLOCK_N, how.V_ALL), out, how.V_ALL)
    give_products(consumer, how)
    bias = None
    if how.ADDED_STAGES > 0 and how.ADDED_EARLY:
        bias = added_of(consumer, done + i, added, QK_LAYOUT, how)
    qk = warpgroup_mma_wait(parts_in(how.V_ALL), deps=(qk,))
    mbarrier.arrive(barriers.k_empty.index(stage))
    if how.ADDED_STAGES > 0 and not how.ADDED_EARLY:
        bias = added_of(consumer, done + i, added, QK_LAYOUT, how)
    if not how.OVERLAPS:
        out = outputs_there(out, how.V_ALL)
        mbarrier.arrive(barriers.v_empty.index(before))
    found, peak, total, decay = softmax(qk, bias, tile, peak, total, own, masks, seqlen_kv, MASKED, QK_LAYOUT, how)
    weights = gl.convert_layout(narrowed(found, tiles.v[0]), WEIGHTS, assert_trivial=True)
    # Waited for here, not where they are used: ptxas moves the softmax behind the products' wait unless something that branches is between.
    mbarrier.wait(barriers.v_full.index(stage), phase)
    if how.ADDED_STAGES > 0:
        let_go_of_added(consumer, done + i, added, how)
    if how.OVERLAPS:
        out = outputs_there(out, how.V_ALL)
        mbarrier.arrive(barriers.v_empty.index(before))
    out = times(out, decay, how.V_ALL)
    return peak, total, out, weights


@gluon.jit
def _tiles(
    consumer: gl.constexpr, place, done, visits, own, masks, tiles, added, barriers, seqlen_kv,
    QK_LAYOUT: gl.constexpr, how: gl.constexpr,
):  # fmt: skip
    """Run the online softmax over a block's tiles: maximum, sum as `shares` of it and output of each row. place: the queries' buffer."""
    WEIGHTS: gl.constexpr = weights_layout(how.V_ALL, 0)
    partial = visits.partial
    count = partial + visits.full_last - visits.full_first
    peak = gl.full([ROWS], NOTHING, gl.float32, layout=gl.SliceLayout(1, QK_LAYOUT))
    total = gl.zeros([ROWS, 4], gl.float32, layout=SHARES)
    out = no_outputs(how.V_ALL)
    # The first tile has none before it. It is masked always.
    stage = done % how.STAGES
    mbarrier.wait(barriers.k_full.index(stage), (done // how.STAGES) & 1)
    await_products(consumer, how)
    qk = _scores(own, tiles, stage, QK_LAYOUT, how)
    give_products(consumer, how)
    bias = None
    if how.ADDED_STAGES > 0:
        bias = added_of(consumer, done, added, QK_LAYOUT, how)
    qk = warpgroup_mma_wait(0, deps=(qk,))
    mbarrier.arrive(barriers.k_empty.index(stage))
    tile = nth_tile(0, visits)
    found, peak, total, _ = softmax(qk, bias, tile, peak, total, own, masks, seqlen_kv, True, QK_LAYOUT, how)
    weights = gl.convert_layout(narrowed(found, tiles.v[0]), WEIGHTS, assert_trivial=True)
    mbarrier.wait(barriers.v_full.index(stage), (done // how.STAGES) & 1)
    if how.ADDED_STAGES > 0:
        let_go_of_added(consumer, done, added, how)
    state = (peak, total, out, weights)
    upcoming = nth_tile(1, visits)
    for i in range(1, partial):
        tile = upcoming
        # Loaded a tile ahead: what it needs then has come.
        upcoming = nth_tile(i + 1, visits)
        state = _step(
            consumer, i, tile, done, state, own, masks, tiles, added, barriers, seqlen_kv, True, QK_LAYOUT, how
        )  # fmt: skip
    for i in range(gl.maximum(partial, 1), count):
        tile = visits.full_first + i - partial
        state = _step(
            consumer, i, tile, done, state, own, masks, tiles, added, barriers, seqlen_kv, how.MASK_ALL, QK_LAYOUT, how
        )  # fmt: skip
    if not how.OUT_IN_Q:
        mbarrier.arrive(barriers.q_empty.index(place))
    peak, total, out, weights = state
    last = (done + count - 1) % how.STAGES
    out = outputs_of(weights, rows_at(tiles.v, last, how.BLOCK_N, how.V_ALL), out, how.V_ALL)
    out = outputs_there(out, how.V_ALL)
    mbarrier.arrive(barriers.v_empty.index(last))
    return peak, total, out


@gluon.jit
def _finish(peak, total, out, Lse, Sinks, head, rows, seqlen_q, QK_LAYOUT: gl.constexpr, how: gl.constexpr):
    """Return the output of 64 queries and store their lse: natural logarithm, -inf without keys, NaN for a row to be recomputed."""
    scale, lse, is_empty = divided(peak, total, Sinks, head, QK_LAYOUT, how)
    out = times(out, scale, how.V_ALL)
    if how.MARKS:
        # Without keys the output is 0, also where values hold NaN.
        out = zero_where(is_empty, out, how.V_ALL)
        sums = sums_of(out, gl.SliceLayout(1, QK_LAYOUT), how.V_ALL)
        lse = gl.where(sums != sums, sums, lse)
    gl.store(Lse + rows, lse, mask=rows < seqlen_q)
    return out


@gluon.jit
def _compute(
    consumer: gl.constexpr, Out, Lse, Sinks, masks, masking, tiles, added, barriers, work, rounds, scale, softcap,
    how: gl.constexpr,
):  # fmt: skip
    """Compute 64 queries of each block of this program."""
    QK_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, how.BLOCK_N, 16]
    )
    sizes = work.sizes
    seqlen_q, seqlen_kv = sizes.seqlen_q, sizes.seqlen_kv
    done = 0
    of_added = None
    if how.ADDED_STAGES > 0:
        of_added = 1.0 / softcap if how.SOFTCAP else LOG2E / scale
    if consumer == 1:
        give_products(consumer, how)
    is_one, block, batch, head, row = nth_block(0, work, how)
    partial, first, second, full_first, full_last = tiles_to_visit(
        list_of_block(work, batch, head, block), block, sizes, how
    )
    rows, least, most = keys_of(consumer, block, batch, masks, masking, sizes, QK_LAYOUT, how)
    for nth in range(rounds):
        if is_one:
            start = block * how.BLOCK_M
            visits = Visits(
                List=list_of_block(work, batch, head, block), partial=partial, first=first, second=second,
                full_first=full_first, full_last=full_last,
            )  # fmt: skip
            of_row = Masks(
                Rows=masks.Rows,
                Keys=at_index(masks.Keys, batch, masking.keys_b),
                DocumentsQ=masks.DocumentsQ,
                DocumentsK=at_index(masks.DocumentsK, batch, masking.documents_kb),
                Slopes=masks.Slopes,
                Bits=of_head(masks.Bits, batch, head, masking.mask_b, masking.mask_h),
            )
            document = documents_of(rows, masks, masking, batch, seqlen_q)
            slope = slope_of(masks, head)
            bits = words_of(rows, masks, masking, seqlen_q)
            place, phase = place_of_queries(consumer, nth, how)
            own = Warpgroup(
                q=rows_at(tiles.q, place, ROWS, how.QK_ALL), least=least, most=most, document=document,
                rows=rows, factor=scale, cap=softcap * LOG2E, slope=slope, of_added=of_added, bits=bits,
            )  # fmt: skip
            mbarrier.wait(barriers.q_full.index(place), phase)
            peak, total, out = _tiles(
                consumer, place, done, visits, own, of_row, tiles, added, barriers, seqlen_kv, QK_LAYOUT, how
            )
            done += partial + full_last - full_first
            # The next block's list and masks are loaded while this one's outputs are stored.
            of_next = nth_block(nth + 1, work, how)
            is_one, next_block, next_batch, next_head, next_row = of_next
            List = list_of_block(work, next_batch, next_head, next_block)
            partial, first, second, full_first, full_last = tiles_to_visit(List, next_block, sizes, how)
            of_next_rows = keys_of(consumer, next_block, next_batch, masks, masking, sizes, QK_LAYOUT, how)
            lse_of_head = Lse + row.to(gl.int64) * seqlen_q
            out = _finish(peak, total, out, lse_of_head, Sinks, head, rows, seqlen_q, QK_LAYOUT, how)
            own_place = place if how.OUT_IN_Q else consumer
            if not how.OUT_IN_Q:
                # Until the output of the block before is stored.
                tma.store_wait(0)
            barrier_of_threads()
            put(out, tiles.out, own_place, how.V_ALL)
            fence_async_shared()
            send(Out, batch, head, start + consumer * ROWS, tiles.out, own_place, how.V_ALL)
            if how.OUT_IN_Q:
                tma.store_wait(0)
                mbarrier.arrive(barriers.q_empty.index(place))
            block, batch, head, row = next_block, next_batch, next_head, next_row
            rows, least, most = of_next_rows
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["section", "blocks", "heads_of_all"])
def attention_forward_sm90(
    Q, K, V, Out, Lse, Rows, Keys, DocumentsQ, DocumentsK, Lists, Slopes, Sinks, Bits, Added, stride_q, stride_k,
    stride_v, stride_o, masking, lists, adding, sizes, section, blocks, heads_of_all, HOW: gl.constexpr,
):  # fmt: skip
    """Grid: up to blocks · heads_of_all, for `blocks` blocks of BLOCK_M queries of each of heads_of_all = B · Hq heads. No more programs
    than run at once; each computes several blocks. num_warps: 4.

    Q, K, V, Out: logical BHSD, in half precision, every stride but the last one a multiple of 16 bytes. Lse: (B, Hq, Sq), contiguous,
    float32. Bits: of a dense mask, int32 (B|1, Hq|1, Sq|1, words), or None; masking then has their strides in place of the mask's. Added:
    a tensor added to the scores, strides as those of Q; adding: `Adding`; or both None. The other operands: kernel_plan.Plan; tuples:
    shared tuples.py; HOW: `ForwardSwitches`. The scale is positive.
    """
    how: gl.constexpr = members(HOW)
    rounds = (blocks * heads_of_all + gl.num_programs(0) - 1) // gl.num_programs(0)
    work = ForwardWork(section=section, blocks=blocks, heads_of_all=heads_of_all, sizes=sizes, Lists=Lists, lists=lists)
    heads, batch = sizes.heads_q, heads_of_all // sizes.heads_q
    seqlen_q, seqlen_kv, heads_kv = sizes.seqlen_q, sizes.seqlen_kv, heads // sizes.group
    of_q = descriptors(Q, batch, heads, seqlen_q, stride_q, ROWS, how.HEAD_DIM_QK, how.QK_ALL)
    of_k = descriptors(K, batch, heads_kv, seqlen_kv, stride_k, how.BLOCK_N, how.HEAD_DIM_QK, how.QK_ALL)
    of_v = descriptors(V, batch, heads_kv, seqlen_kv, stride_v, how.BLOCK_N, how.HEAD_DIM_V, how.V_ALL)
    of_out = descriptors(Out, batch, heads, seqlen_q, stride_o, ROWS, how.HEAD_DIM_V, how.V_ALL)
    ELEMENT: gl.constexpr = K.dtype.element_ty
    QUERIES: gl.constexpr = how.CONSUMERS * how.QUERY_STAGES
    q_tiles = room(ELEMENT, QUERIES, ROWS, of_q, how.QK_ALL)
    k_tiles = room(ELEMENT, how.STAGES, how.BLOCK_N, of_k, how.QK_ALL)
    v_tiles = room(ELEMENT, how.STAGES, how.BLOCK_N, of_v, how.V_ALL)
    out_tiles = q_tiles
    if not how.OUT_IN_Q:
        out_tiles = room(ELEMENT, how.CONSUMERS, ROWS, of_out, how.V_ALL)
    tiles = SharedTiles(q=q_tiles, k=k_tiles, v=v_tiles, out=out_tiles)
    barriers = barriers_of(QUERIES, how.STAGES, how.CONSUMERS)
    added = AddedTiles(of=None, at=None, tiles=None, full=None, empty=None)
    if how.ADDED_STAGES > 0:
        of_added = descriptor_of_added(Added, adding, ROWS, how.BLOCK_N)
        places, full, empty = room_for_added(of_added, Added.dtype.element_ty, how)
        added = AddedTiles(of=of_added, at=adding, tiles=places, full=full, empty=empty)
    masks = Masks(Rows=Rows, Keys=Keys, DocumentsQ=DocumentsQ, DocumentsK=DocumentsK, Slopes=Slopes, Bits=Bits)
    softcap = sizes.changed_by
    scale = sizes.scale / softcap if how.SOFTCAP else sizes.scale * LOG2E
    if how.CONSUMERS == 2:
        gl.warp_specialize(
            [
                (
                    _compute,
                    (0, of_out, Lse, Sinks, masks, masking, tiles, added, barriers, work, rounds, scale, softcap, how),
                ),
                (
                    _compute,
                    (1, of_out, Lse, Sinks, masks, masking, tiles, added, barriers, work, rounds, scale, softcap, how),
                ),
                (fetch, (of_q, of_k, of_v, tiles, added, barriers, work, rounds, how)),
            ],
            [4, 4],
            [how.REGISTERS, FEW],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _compute,
                    (0, of_out, Lse, Sinks, masks, masking, tiles, added, barriers, work, rounds, scale, softcap, how),
                ),
                (
                    _compute,
                    (1, of_out, Lse, Sinks, masks, masking, tiles, added, barriers, work, rounds, scale, softcap, how),
                ),
                (
                    _compute,
                    (2, of_out, Lse, Sinks, masks, masking, tiles, added, barriers, work, rounds, scale, softcap, how),
                ),
                (fetch, (of_q, of_k, of_v, tiles, added, barriers, work, rounds, how)),
            ],
            [4, 4, 4],
            [how.REGISTERS, how.REGISTERS, FEW],
        )
