"""Attention forward in half precision for Hopper and head dims above 256, in Gluon: as forward_sm90.py, with nothing added to scores.

Registers hold the outputs of 128 queries for 256 head dims. A program passes over the keys once for each 256 dims of the values, and
computes a tile's scores in each pass: 1.5 times the products that are needed. Sums of 64 queries and all head dims would fill the
registers as well, and read every key and value from the L2 cache for half as many queries: that cache is this kernel's bottleneck.

Shared memory holds the queries of a block and a ring of parts of tiles, which are BLOCK_N keys and PART head dims. A part is freed as
soon as both warpgroups have multiplied it, and the next one is loaded into its buffer.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from attn_compiler.lowerings.hopper.kernels.forward_fetching_sm90 import (
    list_of_block,
    nth_block,
    place_of_queries,
    tiles_to_visit,
)
from attn_compiler.lowerings.hopper.kernels.forward_masks_sm90 import documents_of, keys_of, slope_of, words_of
from attn_compiler.lowerings.hopper.kernels.forward_ring_sm90 import (
    add_outputs,
    barriers_of_ring,
    fetch_parts_in_turn,
    let_go,
    outputs_that_came,
    part_at,
    passes_in,
    scores_in_parts,
)
from attn_compiler.lowerings.hopper.kernels.forward_softmax_sm90 import divided, softmax
from attn_compiler.lowerings.hopper.kernels.head_parts_sm90 import out_layout, weights_layout
from attn_compiler.lowerings.hopper.kernels.tuples import ForwardWork, Masks, Visits, Warpgroup
from attn_compiler.lowerings.hopper.kernels.visiting import nth_tile
from attn_compiler.lowerings.shared.kernels.optional import at_index, of_head
from attn_compiler.lowerings.shared.kernels.releases import members
from attn_compiler.lowerings.shared.kernels.tile_parts import LOG2E
from attn_compiler.lowerings.shared.kernels.tiles_sm90 import FEW, NOTHING, ROWS, SHARES, descriptor, narrowed
from attn_compiler.lowerings.shared.kernels.tuples_sm90 import SharedTiles


@gluon.jit
def _times(out, of_rows, how: gl.constexpr):
    """Multiply each part of the outputs by a number of its row."""
    own = gl.convert_layout(of_rows, gl.SliceLayout(1, out_layout(how.PART, 0)), assert_trivial=True)
    found = ()
    for n in gl.static_range(how.V_ALL // how.PART):
        found += (out[n] * own[:, None],)
    return found


@gluon.jit
def _step(
    i, tile, done, state, own, masks, tiles, barriers, seqlen_kv,
    MASKED: gl.constexpr, QK_LAYOUT: gl.constexpr, how: gl.constexpr,
):  # fmt: skip
    """Process the scores of a pass's i-th tile, and the outputs of the one before. `done`: parts before the pass. state: as in
    forward_sm90.py."""
    K_PARTS: gl.constexpr = how.QK_ALL // how.PART
    V_PARTS: gl.constexpr = how.V_ALL // how.PART
    peak, total, out, weights = state
    at = done + i * (K_PARTS + V_PARTS) - V_PARTS
    qk, peak = scores_in_parts(own.q, at, peak, tiles, barriers, QK_LAYOUT, how)
    out = add_outputs(weights, at + K_PARTS, out, tiles, barriers, how)
    qk = warpgroup_mma_wait(V_PARTS, deps=(qk,))
    let_go(at + K_PARTS - 1, barriers, how)
    found, peak, total, decay = softmax(qk, None, tile, peak, total, own, masks, seqlen_kv, MASKED, QK_LAYOUT, how)
    weights = gl.convert_layout(narrowed(found, tiles.k), weights_layout(how.PART, 0), assert_trivial=True)
    # For the part that is multiplied next: ptxas moves the softmax behind the products' wait unless something that branches is between.
    part_at(at + K_PARTS + V_PARTS, tiles, barriers, how)
    out = outputs_that_came(at + K_PARTS, out, barriers, how)
    out = _times(out, decay, how)
    return peak, total, out, weights


@gluon.jit
def _tiles(
    done, visits, own, masks, tiles, barriers, seqlen_kv, QK_LAYOUT: gl.constexpr, how: gl.constexpr
):  # fmt: skip
    """Run the online softmax over all tiles of a pass: maximum, sum as `shares` of it, outputs and the weights of the last tile."""
    OUT_LAYOUT: gl.constexpr = out_layout(how.PART, 0)
    K_PARTS: gl.constexpr = how.QK_ALL // how.PART
    partial = visits.partial
    count = partial + visits.full_last - visits.full_first
    peak = gl.full([ROWS], NOTHING, gl.float32, layout=gl.SliceLayout(1, QK_LAYOUT))
    total = gl.zeros([ROWS, 4], gl.float32, layout=SHARES)
    out = ()
    for _ in gl.static_range(how.V_ALL // how.PART):
        out += (gl.zeros([ROWS, how.PART], gl.float32, layout=OUT_LAYOUT),)
    # The first tile has none before it. It is masked always.
    qk, peak = scores_in_parts(own.q, done, peak, tiles, barriers, QK_LAYOUT, how)
    qk = warpgroup_mma_wait(0, deps=(qk,))
    let_go(done + K_PARTS - 1, barriers, how)
    tile = nth_tile(0, visits)
    found, peak, total, _ = softmax(qk, None, tile, peak, total, own, masks, seqlen_kv, True, QK_LAYOUT, how)
    weights = gl.convert_layout(narrowed(found, tiles.k), weights_layout(how.PART, 0), assert_trivial=True)
    state = (peak, total, out, weights)
    upcoming = nth_tile(1, visits)
    for i in range(1, partial):
        tile = upcoming
        # Loaded a tile ahead: what it needs then has come.
        upcoming = nth_tile(i + 1, visits)
        state = _step(i, tile, done, state, own, masks, tiles, barriers, seqlen_kv, True, QK_LAYOUT, how)
    for i in range(gl.maximum(partial, 1), count):
        tile = visits.full_first + i - partial
        state = _step(
            i, tile, done, state, own, masks, tiles, barriers, seqlen_kv, how.MASK_ALL, QK_LAYOUT, how
        )  # fmt: skip
    return state


@gluon.jit
def _marked(lse, out, is_empty, turn, Lse, rows, seqlen_q, QK_LAYOUT: gl.constexpr, how: gl.constexpr):
    """Return the outputs, 0 in rows without keys, and the rows' lse, NaN where an output of this pass or of one before is NaN."""
    ROW: gl.constexpr = gl.SliceLayout(1, QK_LAYOUT)
    own = gl.convert_layout(is_empty, gl.SliceLayout(1, out_layout(how.PART, 0)), assert_trivial=True)
    kept = ()
    for n in gl.static_range(how.V_ALL // how.PART):
        # Without keys the output is 0, also where values hold NaN.
        kept += (gl.where(own[:, None], 0.0, out[n]),)
        sums = gl.convert_layout(gl.sum(kept[n], 1), ROW, assert_trivial=True)
        lse = gl.where(sums != sums, sums, lse)
    # Each warp reads what it has stored itself.
    before = gl.load(Lse + rows, mask=(rows < seqlen_q) & (turn > 0), other=0.0)
    lse = gl.where(before != before, before, lse)
    return kept, lse


@gluon.jit
def _store(Out, out, rows, first, seqlen_q, stride, how: gl.constexpr):
    """Store 64 queries' outputs of a head from the dim `first` on. stride: from one query to the next."""
    LAYOUT: gl.constexpr = out_layout(how.PART, 0)
    own = gl.convert_layout(rows, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    inside = (own < seqlen_q)[:, None]
    # Triton's facts on arguments (alignment) are lost in the partitions of warps.
    of_rows = gl.multiple_of(own.to(gl.int64) * stride, 8)[:, None]
    for n in gl.static_range(how.V_ALL // how.PART):
        dims = first + n * how.PART + gl.arange(0, how.PART, layout=gl.SliceLayout(0, LAYOUT))
        at = gl.multiple_of(Out, 16) + (of_rows + dims[None, :])
        gl.store(at, out[n].to(Out.dtype.element_ty), mask=inside & (dims < how.HEAD_DIM_V)[None, :])


@gluon.jit
def _compute(
    consumer: gl.constexpr, Out, Lse, Sinks, stride_o, masks, masking, tiles, barriers, work, rounds, scale, softcap,
    how: gl.constexpr,
):  # fmt: skip
    """Compute 64 queries of each block of this program, in each pass."""
    QK_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, how.BLOCK_N, 16]
    )
    K_PARTS: gl.constexpr = how.QK_ALL // how.PART
    V_PARTS: gl.constexpr = how.V_ALL // how.PART
    PASSES: gl.constexpr = passes_in(how.HEAD_DIM_V, how.V_ALL)
    sizes = work.sizes
    seqlen_q, seqlen_kv = sizes.seqlen_q, sizes.seqlen_kv
    done = 0
    for nth in range(rounds * PASSES):
        is_one, block, batch, head, row = nth_block(nth // PASSES, work, how)
        if is_one:
            turn = nth % PASSES
            List = list_of_block(work, batch, head, block)
            partial, first, second, full_first, full_last = tiles_to_visit(List, block, sizes, how)
            visits = Visits(
                List=List, partial=partial, first=first, second=second, full_first=full_first, full_last=full_last
            )  # fmt: skip
            rows, least, most = keys_of(consumer, block, batch, masks, masking, sizes, QK_LAYOUT, how)
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
            place, phase = place_of_queries(consumer, nth // PASSES, how)
            q = ()
            for n in gl.static_range(K_PARTS):
                q += (tiles.q.index(place * K_PARTS + n).reshape([ROWS, how.PART]),)
            own = Warpgroup(
                q=q, least=least, most=most, document=document, rows=rows, factor=scale, cap=softcap * LOG2E,
                slope=slope, of_added=None, bits=bits,
            )  # fmt: skip
            mbarrier.wait(barriers.q_full.index(place), phase)
            peak, total, out, weights = _tiles(
                done, visits, own, of_row, tiles, barriers, seqlen_kv, QK_LAYOUT, how
            )  # fmt: skip
            if turn == PASSES - 1:
                mbarrier.arrive(barriers.q_empty.index(place))
            done += (partial + full_last - full_first) * (K_PARTS + V_PARTS)
            out = add_outputs(weights, done - V_PARTS, out, tiles, barriers, how)
            out = outputs_that_came(done - V_PARTS, out, barriers, how)
            scale_of_row, lse, is_empty = divided(peak, total, Sinks, head, QK_LAYOUT, how)
            out = _times(out, scale_of_row, how)
            lse_of_head = Lse + row.to(gl.int64) * seqlen_q
            if how.MARKS:
                out, lse = _marked(lse, out, is_empty, turn, lse_of_head, rows, seqlen_q, QK_LAYOUT, how)
            gl.store(lse_of_head + rows, lse, mask=rows < seqlen_q)
            out_of_head = Out + (batch.to(gl.int64) * stride_o.b + head.to(gl.int64) * stride_o.h)
            _store(out_of_head, out, rows, turn * how.V_ALL, seqlen_q, stride_o.s, how)


@gluon.jit(do_not_specialize=["section", "blocks", "heads_of_all"])
def attention_forward_wide_sm90(
    Q, K, V, Out, Lse, Rows, Keys, DocumentsQ, DocumentsK, Lists, Slopes, Sinks, Bits, stride_q, stride_k,
    stride_v, stride_o, masking, lists, sizes, section, blocks, heads_of_all, HOW: gl.constexpr,
):  # fmt: skip
    """Grid, num_warps, operands and the order of blocks: as `attention_forward_sm90`. HOW: its PART divides QK_ALL and V_ALL; STAGES, the
    parts in shared memory, are at least those of a tile of keys and one of values."""
    how: gl.constexpr = members(HOW)
    rounds = (blocks * heads_of_all + gl.num_programs(0) - 1) // gl.num_programs(0)
    work = ForwardWork(section=section, blocks=blocks, heads_of_all=heads_of_all, sizes=sizes, Lists=Lists, lists=lists)
    heads, batch = sizes.heads_q, heads_of_all // sizes.heads_q
    heads_kv = heads // sizes.group
    of_q = descriptor(Q, batch, heads, sizes.seqlen_q, stride_q, ROWS, how.HEAD_DIM_QK, how.PART)
    of_k = descriptor(K, batch, heads_kv, sizes.seqlen_kv, stride_k, how.BLOCK_N, how.HEAD_DIM_QK, how.PART)
    of_v = descriptor(V, batch, heads_kv, sizes.seqlen_kv, stride_v, how.BLOCK_N, how.HEAD_DIM_V, how.PART)
    ELEMENT: gl.constexpr = K.dtype.element_ty
    QUERIES: gl.constexpr = how.CONSUMERS * how.QUERY_STAGES
    q_tiles = gl.allocate_shared_memory(
        ELEMENT, [QUERIES * (how.QK_ALL // how.PART), 1, 1, ROWS, how.PART], of_q.layout
    )  # fmt: skip
    ring = gl.allocate_shared_memory(ELEMENT, [how.STAGES, 1, 1, how.BLOCK_N, how.PART], of_k.layout)
    tiles = SharedTiles(q=q_tiles, k=ring, v=ring, out=None)
    barriers = barriers_of_ring(QUERIES, how.STAGES, how.CONSUMERS)
    masks = Masks(Rows=Rows, Keys=Keys, DocumentsQ=DocumentsQ, DocumentsK=DocumentsK, Slopes=Slopes, Bits=Bits)
    softcap = sizes.changed_by
    scale = sizes.scale / softcap if how.SOFTCAP else sizes.scale * LOG2E
    gl.warp_specialize(
        [
            (
                _compute,
                (0, Out, Lse, Sinks, stride_o, masks, masking, tiles, barriers, work, rounds, scale, softcap, how),
            ),
            (
                _compute,
                (1, Out, Lse, Sinks, stride_o, masks, masking, tiles, barriers, work, rounds, scale, softcap, how),
            ),
            (fetch_parts_in_turn, (of_q, of_k, of_v, tiles, barriers, work, rounds, how)),
        ],
        [4, 4],
        [how.REGISTERS, FEW],
    )
