"""The gradients of q or of k for Hopper and head dims above 256, in Gluon: a program has 64 rows of one, and visits tiles of the other.

Registers of two warpgroups hold the sums of those rows, half of the head dim each. The scores and the weights' gradients of a tile are
products over all head dims: one warpgroup computes the scores, the other one the weights' gradients, which it passes through shared
memory. The scores' gradients take their buffer. Both warpgroups multiply them by their half of the tile that gave the scores.

Each of dq, dk and dv (wide_values_sm90.py) so has a pass of its own: eight products where five would do. Each element has one writer, and
every run gives the same bits. A gradient that is NaN raises a flag, as in backward_sm90.py.
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

from attn_compiler.lowerings.hopper.kernels.forward_masks_sm90 import documents_of, keys_of, masked, slope_of
from attn_compiler.lowerings.hopper.kernels.grad_tiles_sm90 import REGISTERS_OF_ALL, keys_of_block, mark_nan, weights_of
from attn_compiler.lowerings.hopper.kernels.head_parts_sm90 import out_layout
from attn_compiler.lowerings.hopper.kernels.tuples import (
    ForwardWork,
    KeyBlock,
    Masks,
    QueryMasks,
    Visits,
    Warpgroup,
    WideTiles,
)
from attn_compiler.lowerings.hopper.kernels.visiting import nth_tile
from attn_compiler.lowerings.hopper.kernels.wide_fetching_sm90 import fetch_wide, wide_barriers_of
from attn_compiler.lowerings.hopper.kernels.wide_visiting_sm90 import (
    list_of_wide_block,
    wide_block,
    wide_visits,
)
from attn_compiler.lowerings.shared.kernels.optional import at_index
from attn_compiler.lowerings.shared.kernels.releases import members
from attn_compiler.lowerings.shared.kernels.tile_parts import LOG2E
from attn_compiler.lowerings.shared.kernels.tiles_sm90 import ROWS, descriptor, distances_to, narrowed, tanh
from attn_compiler.lowerings.shared.kernels.tuples_sm90 import GradLayouts


@gluon.constexpr_function
def share_of(consumer, PARTS):
    """Return the first part of the head dim that a warpgroup sums, and the one after the last."""
    half = (PARTS + 1) // 2
    return (half, PARTS) if consumer else (0, half)


@gluon.constexpr_function
def first_of_share(consumer, PARTS):
    return share_of(consumer, PARTS)[0]


@gluon.constexpr_function
def parts_of_share(consumer, PARTS):
    first, last = share_of(consumer, PARTS)
    return last - first


@gluon.jit
def _scores(n, tiles, barriers, LAYOUT: gl.constexpr, how: gl.constexpr):
    """Return the scores (rows, others) of the n-th tile."""
    PARTS: gl.constexpr = how.QK_ALL // how.PART
    scores = gl.zeros([ROWS, how.TILE], gl.float32, layout=LAYOUT)
    for part in gl.static_range(PARTS):
        at = n * PARTS + part
        place = at % how.STAGES
        mbarrier.wait(barriers.full.index(place), (at // how.STAGES) & 1)
        others = tiles.others.index(place).reshape([how.TILE, how.PART])
        own = tiles.own.index(part).reshape([ROWS, how.PART])
        scores = warpgroup_mma(own, others.permute([1, 0]), scores, use_acc=part > 0, is_async=True)
    return warpgroup_mma_wait(0, deps=(scores,))


@gluon.jit
def _grad_weights(n, delta, tiles, barriers, LAYOUT: gl.constexpr, how: gl.constexpr):
    """Start the weights' gradients (rows, others) of the n-th tile: the last part's product is in flight. Returns delta unchanged."""
    PARTS: gl.constexpr = how.V_ALL // how.PART_V
    found = gl.zeros([ROWS, how.TILE], gl.float32, layout=LAYOUT)
    for part in gl.static_range(PARTS):
        at = n * PARTS + part
        place = at % how.STAGES_V
        mbarrier.wait(barriers.v_full.index(place), (at // how.STAGES_V) & 1)
        others = tiles.others_v.index(place).reshape([how.TILE, how.PART_V])
        own = tiles.own_v.index(part).reshape([ROWS, how.PART_V])
        found = warpgroup_mma(own, others.permute([1, 0]), found, use_acc=part > 0, is_async=True)
        if part > 0:
            # The sums stay in flight, so another value is passed through.
            delta = warpgroup_mma_wait(1, deps=(delta,))
            mbarrier.arrive(barriers.v_empty.index((at - 1) % how.STAGES_V))
    return found, delta


@gluon.jit
def _hand_over(n, found, delta, tiles, barriers, how: gl.constexpr):
    """Pass the weights' gradients less delta to the warpgroup that has the weights."""
    PARTS: gl.constexpr = how.V_ALL // how.PART_V
    found = warpgroup_mma_wait(0, deps=(found,))
    mbarrier.arrive(barriers.v_empty.index((n * PARTS + PARTS - 1) % how.STAGES_V))
    if how.BY_KEY:
        beside = found - delta[None, :]
    else:
        beside = found - delta[:, None]
    # Until the other warpgroup has multiplied the last gradients, as this one has.
    mbarrier.wait(barriers.grads_empty, (n & 1) ^ 1)
    tiles.grads.store(narrowed(beside, tiles.own))
    fence_async_shared()
    mbarrier.arrive(barriers.given)


@gluon.jit
def _add(consumer: gl.constexpr, n, sums, tiles, barriers, how: gl.constexpr):
    """Add the product of the n-th tile's score gradients to a warpgroup's share."""
    PARTS: gl.constexpr = how.QK_ALL // how.PART
    FIRST: gl.constexpr = first_of_share(consumer, PARTS)
    COUNT: gl.constexpr = parts_of_share(consumer, PARTS)
    mbarrier.wait(barriers.grads_full, n & 1)
    started = ()
    for part in gl.static_range(COUNT):
        at = n * PARTS + FIRST + part
        place = at % how.STAGES
        mbarrier.wait(barriers.full.index(place), (at // how.STAGES) & 1)
        others = tiles.others.index(place).reshape([how.TILE, how.PART])
        started += (warpgroup_mma(tiles.grads, others, sums[part], is_async=True),)
    found = ()
    for part in gl.static_range(COUNT):
        found += (warpgroup_mma_wait(COUNT - 1 - part, deps=(started[part],)),)
        # The scores, which the other warpgroup has of all parts, were there before their gradients.
        mbarrier.arrive(barriers.empty.index((n * PARTS + FIRST + part) % how.STAGES))
    return found


@gluon.jit
def _no_sums(consumer: gl.constexpr, how: gl.constexpr):
    found = ()
    for _ in gl.static_range(parts_of_share(consumer, how.QK_ALL // how.PART)):
        found += (gl.zeros([ROWS, how.PART], gl.float32, layout=out_layout(how.PART, 0)),)
    return found


@gluon.jit
def _leave(
    consumer: gl.constexpr, Grad, Flag, stride, batch, head, block, sums, scale, work, how: gl.constexpr
):  # fmt: skip
    """Store a warpgroup's share of the gradient of 64 rows."""
    LAYOUT: gl.constexpr = out_layout(how.PART, 0)
    PARTS: gl.constexpr = how.QK_ALL // how.PART
    length = work.sizes.seqlen_q
    if how.BY_KEY:
        length = work.sizes.seqlen_kv
    rows = block * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    inside = (rows < length)[:, None]
    # Triton's facts on arguments (alignment) are lost in the partitions of warps.
    of_rows = gl.multiple_of(rows.to(gl.int64) * stride.s, 8)[:, None]
    of_head = gl.multiple_of(Grad, 16) + (batch.to(gl.int64) * stride.b + head.to(gl.int64) * stride.h)
    for part in gl.static_range(parts_of_share(consumer, PARTS)):
        first = (first_of_share(consumer, PARTS) + part) * how.PART
        dims = first + gl.arange(0, how.PART, layout=gl.SliceLayout(0, LAYOUT))
        if how.MARKS:
            mark_nan(Flag, gl.sum(sums[part], 1), rows, length)
        gl.store(
            of_head + (of_rows + dims[None, :]), (sums[part] * scale).to(Grad.dtype.element_ty),
            mask=inside & (dims < how.HEAD_DIM_QK)[None, :],
        )  # fmt: skip


@gluon.jit
def _weights_of_queries(
    scores, tile, base, own, masks, seqlen_kv, MASKED: gl.constexpr, LAYOUT: gl.constexpr, how: gl.constexpr
):  # fmt: skip
    """Return the factor of the weights' gradients (queries, keys). base: -lse of each query, in units of log 2."""
    factor = own.factor
    if how.SOFTCAP:
        scores = tanh(scores * factor)
        factor = own.cap
    logits = scores * factor + base[:, None]
    start = tile * how.TILE
    if own.slope is not None:
        from_start = own.slope * (start - own.rows).to(gl.float32)
        logits = distances_to(logits, from_start, own.slope, LAYOUT, how.TILE)
    if MASKED:
        logits = masked(logits, tile, own, masks, seqlen_kv, LAYOUT, how)
    through = gl.exp2(logits)
    if how.SOFTCAP:
        through = through * (1.0 - scores * scores)
    return through


@gluon.jit
def _weighted(
    n, tile, sums, base, own, stats, masks, tiles, barriers, sizes,
    MASKED: gl.constexpr, layouts: gl.constexpr, how: gl.constexpr,
):  # fmt: skip
    """Process the n-th tile in the warpgroup that has the scores."""
    LAYOUT: gl.constexpr = layouts.SCORES
    if how.BY_KEY:
        start = tile * how.TILE
        # Loaded before the scores, which come later.
        base = gl.load(stats + start + gl.arange(0, how.TILE, layout=gl.SliceLayout(0, LAYOUT)))
        scores = _scores(n, tiles, barriers, LAYOUT, how)
        _, through = weights_of(scores, start, MASKED, base, None, own, masks, sizes, layouts, how)
    else:
        scores = _scores(n, tiles, barriers, LAYOUT, how)
        through = _weights_of_queries(scores, tile, base, own, masks, sizes.seqlen_kv, MASKED, LAYOUT, how)
    mbarrier.wait(barriers.given, n & 1)
    # Each thread puts what it makes where it has found what it is made of.
    grads = through * tiles.grads.load(LAYOUT).to(gl.float32)
    tiles.grads.store(narrowed(grads, tiles.own))
    fence_async_shared()
    mbarrier.arrive(barriers.grads_full)
    sums = _add(0, n, sums, tiles, barriers, how)
    mbarrier.arrive(barriers.grads_empty)
    return sums


@gluon.jit
def _with_scores(
    Grad, Flag, stride, RowStats, stats_rows, masks, masking, tiles, barriers, work, rounds, scale, factor, softcap,
    how: gl.constexpr,
):  # fmt: skip
    """Run the warpgroup that has the scores of each tile, and the first half of the sums."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, how.TILE, 16]
    )
    LAYOUTS: gl.constexpr = GradLayouts(SCORES=LAYOUT)
    sizes = work.sizes
    done = 0
    for nth in range(rounds):
        is_one, block, batch, head, row = wide_block(nth, work, how)
        if is_one:
            List = list_of_wide_block(work, batch, head, block, how)
            partial, first, second, full_first, full_last = wide_visits(List, block, sizes, how)
            visits = Visits(
                List=List, partial=partial, first=first, second=second, full_first=full_first, full_last=full_last
            )  # fmt: skip
            count = partial + full_last - full_first
            stats = RowStats + row.to(gl.int64) * (2 * stats_rows)
            slope = slope_of(masks, head)
            if how.BY_KEY:
                keys, least, most = keys_of_block(block, batch, 0, masks, masking, sizes, LAYOUTS, how)
                document = None
                if masks.DocumentsK is not None:
                    of_keys = at_index(masks.DocumentsK, batch, masking.documents_kb)
                    document = gl.load(of_keys + keys, mask=keys < sizes.seqlen_kv, other=0)
                own = KeyBlock(
                    keys=keys, least=least, most=most, document=document, factor=factor, cap=softcap * LOG2E, slope=slope,
                    bits=None,
                )  # fmt: skip
                of_row = QueryMasks(
                    Rows=at_index(masks.Rows, batch, masking.rows_b), rows_side=masking.rows_side,
                    Documents=at_index(masks.DocumentsQ, batch, masking.documents_qb),
                    Bits=None,
                )  # fmt: skip
                base = least
            else:
                rows, least, most = keys_of(0, block, batch, masks, masking, sizes, LAYOUT, how)
                own = Warpgroup(
                    q=None, least=least, most=most, document=documents_of(rows, masks, masking, batch, sizes.seqlen_q),
                    rows=rows, factor=factor, cap=softcap * LOG2E, slope=slope, of_added=None,
                    bits=None,
                )  # fmt: skip
                of_row = Masks(
                    Rows=masks.Rows, Keys=at_index(masks.Keys, batch, masking.keys_b), DocumentsQ=masks.DocumentsQ,
                    DocumentsK=at_index(masks.DocumentsK, batch, masking.documents_kb), Slopes=masks.Slopes,
                    Bits=None,
                )  # fmt: skip
                base = gl.load(stats + rows)
            sums = _no_sums(0, how)
            mbarrier.wait(barriers.own_full, nth & 1)
            for i in range(partial):
                tile = nth_tile(i, visits)
                sums = _weighted(
                    done + i, tile, sums, base, own, stats, of_row, tiles, barriers, sizes, True, LAYOUTS, how
                )  # fmt: skip
            for i in range(partial, count):
                tile = full_first + i - partial
                sums = _weighted(
                    done + i, tile, sums, base, own, stats, of_row, tiles, barriers, sizes, how.MASK_ALL, LAYOUTS, how
                )  # fmt: skip
            mbarrier.arrive(barriers.own_empty)
            done += count
            _leave(0, Grad, Flag, stride, batch, head, block, sums, scale, work, how)


@gluon.jit
def _delta(stats, stats_rows, block, tile, LAYOUT: gl.constexpr, how: gl.constexpr):
    """Load delta of a tile's queries, or of the block's."""
    if how.BY_KEY:
        at = tile * how.TILE + gl.arange(0, how.TILE, layout=gl.SliceLayout(0, LAYOUT))
    else:
        at = block * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    return gl.load(stats + stats_rows + at)


@gluon.jit
def _with_grad_weights(
    Grad, Flag, stride, RowStats, stats_rows, tiles, barriers, work, rounds, scale, how: gl.constexpr
):
    """Run the warpgroup that has the weights' gradients of each tile, a tile ahead, and the second half of the sums."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, how.TILE, 16]
    )
    done = 0
    for nth in range(rounds):
        is_one, block, batch, head, row = wide_block(nth, work, how)
        if is_one:
            List = list_of_wide_block(work, batch, head, block, how)
            partial, first, second, full_first, full_last = wide_visits(List, block, work.sizes, how)
            visits = Visits(
                List=List, partial=partial, first=first, second=second, full_first=full_first, full_last=full_last
            )  # fmt: skip
            count = partial + full_last - full_first
            stats = RowStats + row.to(gl.int64) * (2 * stats_rows)
            sums = _no_sums(1, how)
            delta = _delta(stats, stats_rows, block, nth_tile(0, visits), LAYOUT, how)
            mbarrier.wait(barriers.own_v_full, nth & 1)
            found, delta = _grad_weights(done, delta, tiles, barriers, LAYOUT, how)
            for i in range(count - 1):
                _hand_over(done + i, found, delta, tiles, barriers, how)
                delta = _delta(stats, stats_rows, block, nth_tile(i + 1, visits), LAYOUT, how)
                found, delta = _grad_weights(done + i + 1, delta, tiles, barriers, LAYOUT, how)
                sums = _add(1, done + i, sums, tiles, barriers, how)
            _hand_over(done + count - 1, found, delta, tiles, barriers, how)
            mbarrier.arrive(barriers.own_v_empty)
            sums = _add(1, done + count - 1, sums, tiles, barriers, how)
            done += count
            _leave(1, Grad, Flag, stride, batch, head, block, sums, scale, work, how)


@gluon.jit(do_not_specialize=["section", "blocks", "heads_of_all"])
def attention_grad_wide_sm90(
    Q, K, V, GradOut, RowStats, Grad, Flag, Rows, Keys, DocumentsQ, DocumentsK, Lists, Slopes, stride_q, stride_k, stride_v,
    stride_g, stride_grad, stats_rows, masking, lists, sizes, section, blocks, heads_of_all, HOW: gl.constexpr,
):  # fmt: skip
    """Write dq to Grad, or, BY_KEY, the part of dk of each query head, (B, Hq, Skv, D).

    Grid: up to blocks · heads_of_all, for `blocks` blocks of 64 rows of each of heads_of_all = B · Hq heads. No more programs than run at
    once; each computes several blocks. num_warps: 4. HOW: `WideSwitches`. Lists: tiles of the other side, one list for TOGETHER blocks.
    The other operands: as of `attention_backward_sm90`.
    """
    how: gl.constexpr = members(HOW)
    rounds = (blocks * heads_of_all + gl.num_programs(0) - 1) // gl.num_programs(0)
    work = ForwardWork(section=section, blocks=blocks, heads_of_all=heads_of_all, sizes=sizes, Lists=Lists, lists=lists)
    heads, batch = sizes.heads_q, heads_of_all // sizes.heads_q
    heads_kv = heads // sizes.group
    QUERIES: gl.constexpr = how.TILE if how.BY_KEY else ROWS
    KEYS: gl.constexpr = ROWS if how.BY_KEY else how.TILE
    of_q = descriptor(Q, batch, heads, sizes.seqlen_q, stride_q, QUERIES, how.HEAD_DIM_QK, how.PART)
    of_g = descriptor(GradOut, batch, heads, sizes.seqlen_q, stride_g, QUERIES, how.HEAD_DIM_V, how.PART_V)
    of_k = descriptor(K, batch, heads_kv, sizes.seqlen_kv, stride_k, KEYS, how.HEAD_DIM_QK, how.PART)
    of_v = descriptor(V, batch, heads_kv, sizes.seqlen_kv, stride_v, KEYS, how.HEAD_DIM_V, how.PART_V)
    ELEMENT: gl.constexpr = K.dtype.element_ty
    if how.BY_KEY:
        of_own, of_own_v, of_others, of_others_v = of_k, of_v, of_q, of_g
    else:
        of_own, of_own_v, of_others, of_others_v = of_q, of_g, of_k, of_v
    PARTS: gl.constexpr = how.QK_ALL // how.PART
    PARTS_V: gl.constexpr = how.V_ALL // how.PART_V
    GRADS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, how.TILE], ELEMENT)
    tiles = WideTiles(
        own=gl.allocate_shared_memory(ELEMENT, [PARTS, 1, 1, ROWS, how.PART], of_own.layout),
        own_v=gl.allocate_shared_memory(ELEMENT, [PARTS_V, 1, 1, ROWS, how.PART_V], of_own_v.layout),
        others=gl.allocate_shared_memory(ELEMENT, [how.STAGES, 1, 1, how.TILE, how.PART], of_others.layout),
        others_v=gl.allocate_shared_memory(ELEMENT, [how.STAGES_V, 1, 1, how.TILE, how.PART_V], of_others_v.layout),
        grads=gl.allocate_shared_memory(ELEMENT, [ROWS, how.TILE], GRADS),
    )
    barriers = wide_barriers_of(how.STAGES, how.STAGES_V)
    masks = Masks(Rows=Rows, Keys=Keys, DocumentsQ=DocumentsQ, DocumentsK=DocumentsK, Slopes=Slopes, Bits=None)
    scale, softcap = sizes.scale, sizes.changed_by
    factor = scale / softcap if how.SOFTCAP else scale * LOG2E
    gl.warp_specialize(
        [
            (
                _with_scores,
                (
                    Grad, Flag, stride_grad, RowStats, stats_rows, masks, masking, tiles, barriers, work, rounds, scale, factor,
                    softcap, how,
                ),
            ),
            (
                _with_grad_weights,
                (Grad, Flag, stride_grad, RowStats, stats_rows, tiles, barriers, work, rounds, scale, how),
            ),
            (fetch_wide, (of_own, of_own_v, of_others, of_others_v, tiles, barriers, work, rounds, how)),
        ],
        [4, 4],
        [how.REGISTERS, REGISTERS_OF_ALL - 2 * how.REGISTERS],
    )  # fmt: skip
