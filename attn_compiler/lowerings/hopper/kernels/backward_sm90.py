"""Attention backward in half precision for Hopper, in Gluon: one pass over the keys, with what forward_sm90.py takes of masks and scores.

A program stays for several blocks of 128 keys. One warpgroup has the copy engine (TMA) fetch tiles of queries and of the output's
gradient, two compute 64 keys each: their scores are transposed, (keys, queries), so that weights and their gradients stay in registers as
the left operand of the products for dv and dk. The gradients of scores meet in shared memory, where both warpgroups take half of dq's
columns (or rows) of them; the copy engine adds those to float32 sums in memory (https://arxiv.org/abs/2407.08608, section 3).

Those sums come in no fixed order, so two runs may differ in the last bits of dq. Gradients that come out as NaN raise a flag: a masked key
may hold NaN, and 0 · NaN is NaN. Then the Triton family's kernels compute all of them again.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attn_compiler.lowerings.hopper.kernels.tuples import (
    GradBarriers,
    GradTiles,
    KeyBlock,
    Masks,
    QueryMasks,
    Visits,
    Work,
)
from attn_compiler.lowerings.shared.kernels.optional import at_index, list_of
from attn_compiler.lowerings.shared.kernels.scheduling_sm90 import place
from attn_compiler.lowerings.shared.kernels.tile_parts import LOG2E, partial_tile, queries_to_visit
from attn_compiler.lowerings.shared.kernels.tiles_sm90 import (
    ROWS,
    add_from_shared,
    barrier_of_threads,
    descriptor,
    distances_to,
    narrowed,
    tanh,
    up_to,
)
from attn_compiler.lowerings.shared.kernels.tuples_sm90 import GradLayouts

#: of a thread of each of the three warpgroups, in all
REGISTERS_OF_ALL = gl.constexpr(504)
#: further than any sequence is long
FAR = gl.constexpr(1 << 30)


@gluon.jit
def _block(item, work):
    """An item of work: the number of a block of keys, batch row and head of queries."""
    block, row = place(item, work.section, work.blocks, work.heads_of_all)
    # A block's length grows with its number for queries. For keys the first ones are the long ones.
    return work.blocks - 1 - block, row // work.sizes.heads_q, row % work.sizes.heads_q


@gluon.jit
def _visits(work, batch, head, block, how: gl.constexpr):
    """partial, first, second, full_first and full_last of `Visits` of a block of keys, in one head of queries; and how many tiles are to be
    masked: all, where keys end within the block."""
    start = block * how.BLOCK_N
    List = list_of(work.Lists, batch, head, block, work.lists)
    partial, first, second, full_first, full_last = queries_to_visit(List, start, work.sizes, how)
    masked = gl.where(start + how.BLOCK_N > work.sizes.seqlen_kv, partial + full_last - full_first, partial)
    return partial, first, second, full_first, full_last, masked


@gluon.jit
def _tile(i, visits):
    """The number of the i-th tile of queries of a block."""
    tile = partial_tile(visits.List, i, visits.first, visits.second, visits.full_first, visits.full_last)
    return gl.where(i < visits.partial, tile, visits.full_first + i - visits.partial)


@gluon.jit
def _tell(tiles, at, number):
    """A number to the warpgroups that compute."""
    NUMBER: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    tiles.index(at).store(gl.full([1], number, gl.int32, layout=NUMBER))


@gluon.jit
def _told(tiles, at):
    """What `_tell` told."""
    NUMBER: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(tiles.index(at).load(NUMBER), 0)


@gluon.jit
def _fetch_tile(X, at, full, stage, tiles):
    """Ask for a tile."""
    mbarrier.expect(full.index(stage), X.block_type.nbytes)
    tma.async_copy_global_to_shared(X, at, full.index(stage), tiles.index(stage))


@gluon.jit
def _fetch_keys(K, V, batch, head, start, loaded, tiles, barriers):
    """The keys and values of a block, each half for a warpgroup, as soon as both have let go of those of the block before."""
    mbarrier.wait(barriers.kv_empty, (loaded & 1) ^ 1)
    mbarrier.expect(barriers.kv_full, 2 * K.block_type.nbytes + 2 * V.block_type.nbytes)
    for half in gl.static_range(2):
        at = [batch, head, start + half * ROWS, 0]
        tma.async_copy_global_to_shared(K, at, barriers.kv_full, tiles.k.index(half))
        tma.async_copy_global_to_shared(V, at, barriers.kv_full, tiles.v.index(half))


@gluon.jit
def _fetch(Q, K, V, GradOut, RowStats, Counter, stats_rows, tiles, barriers, work, how: gl.constexpr):
    """For each block its keys and values, and the tiles of queries, of the output's gradient and of row stats: those that need their mask,
    and then the others. Which block is the next one a counter tells, that all programs share: so none is done long before the others."""
    NUMBERS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    offsets = gl.arange(0, 2 * how.BLOCK_M, layout=NUMBERS)
    # -lse of a tile's rows, and then delta.
    within = offsets % how.BLOCK_M + (offsets // how.BLOCK_M) * stats_rows
    sizes = work.sizes
    item, nth, loaded, done = gl.program_id(0), 0, 0, 0
    while item < work.blocks * work.heads_of_all:
        next_item = gl.atomic_add(Counter, 1) + gl.num_programs(0)
        block, batch, head = _block(item, work)
        partial, first, second, full_first, full_last, masked = _visits(work, batch, head, block, how)
        visits = Visits(
            List=list_of(work.Lists, batch, head, block, work.lists), partial=partial, first=first, second=second,
            full_first=full_first, full_last=full_last,
        )  # fmt: skip
        count = partial + full_last - full_first
        half, phase_of_half = nth % 2, (nth // 2) & 1
        mbarrier.wait(barriers.work_empty.index(half), phase_of_half ^ 1)
        _tell(tiles.work, half * 3, item)
        _tell(tiles.work, half * 3 + 1, count)
        _tell(tiles.work, half * 3 + 2, masked)
        mbarrier.arrive(barriers.work_full.index(half))
        stats = RowStats + (batch * sizes.heads_q + head).to(gl.int64) * (2 * stats_rows)
        for i in range(count):
            query = _tile(i, visits) * how.BLOCK_M
            found = gl.load(stats + query + within)
            stage, phase = (done + i) % how.STAGES, ((done + i) // how.STAGES) & 1
            at = [batch, head, query, 0]
            mbarrier.wait(barriers.q_empty.index(stage), phase ^ 1)
            _fetch_tile(Q, at, barriers.q_full, stage, tiles.q)
            _fetch_tile(GradOut, at, barriers.g_full, stage, tiles.g)
            # Later than the first tile, which has room before the block before is done.
            if i == 0:
                _fetch_keys(K, V, batch, head // sizes.group, block * how.BLOCK_N, loaded, tiles, barriers)
            tiles.stats.index(stage).store(found)
            _tell(tiles.first, stage, query)
            mbarrier.arrive(barriers.stats_full.index(stage))
        done += count
        loaded += gl.where(count > 0, 1, 0)
        item = next_item
        nth += 1
    half = nth % 2
    mbarrier.wait(barriers.work_empty.index(half), ((nth // 2) & 1) ^ 1)
    _tell(tiles.work, half * 3, -1)
    mbarrier.arrive(barriers.work_full.index(half))


@gluon.jit
def _allowed(weights, start, own, masks, sizes, layouts: gl.constexpr, how: gl.constexpr):
    """The weights (keys, queries) of a tile, 0 where a pair is not allowed."""
    SCORES: gl.constexpr = layouts.SCORES
    weights = gl.where(up_to(own.most - start, SCORES, how.BLOCK_M), weights, 0.0)
    if how.HAS_RIGHT:
        weights = gl.where(up_to(own.least - 1 - start, SCORES, how.BLOCK_M), 0.0, weights)
    QUERY: gl.constexpr = gl.SliceLayout(0, SCORES)
    if masks.Rows is not None:
        queries = start + gl.arange(0, how.BLOCK_M, layout=QUERY)
        inside = queries < sizes.seqlen_q
        lower = gl.load(masks.Rows + queries, mask=inside, other=0)
        weights = gl.where(own.keys[:, None] >= lower[None, :], weights, 0.0)
        upper = gl.load(masks.Rows + masks.rows_side + queries, mask=inside, other=0)
        weights = gl.where(own.keys[:, None] < upper[None, :], weights, 0.0)
    if own.document is not None:
        queries = start + gl.arange(0, how.BLOCK_M, layout=QUERY)
        document = gl.load(masks.Documents + queries, mask=queries < sizes.seqlen_q, other=0)
        weights = gl.where(own.document[:, None] == document[None, :], weights, 0.0)
    return weights


@gluon.jit
def _weights(scores, start, IS_MASKED: gl.constexpr, base, own, masks, sizes, layouts: gl.constexpr, how: gl.constexpr):
    """The weights of a tile (keys, queries), and what their gradients are multiplied by instead of them. base: -lse, in units of log 2."""
    factor = own.factor
    if how.SOFTCAP:
        scores = tanh(scores * factor)
        factor = own.cap
    logits = scores * factor + base[None, :]
    if own.slope is not None:
        from_start = own.slope * (own.keys - start).to(gl.float32)
        logits = distances_to(logits, from_start, -own.slope, layouts.SCORES, how.BLOCK_M)
    weights = gl.exp2(logits)
    if IS_MASKED:
        weights = _allowed(weights, start, own, masks, sizes, layouts, how)
    through = weights
    if how.SOFTCAP:
        through = weights * (1.0 - scores * scores)
    return weights, through


@gluon.jit
def _products_of_dq(consumer: gl.constexpr, grads, tiles, layouts: gl.constexpr, how: gl.constexpr):
    """What a tile's gradients of scores (keys, queries) add to dq, under way: half of the columns, or of 128 queries half of these."""
    COLUMNS: gl.constexpr = how.SUM_COLUMNS
    none = gl.zeros([ROWS, COLUMNS], gl.float32, layout=layouts.SUM)
    grads_0, grads_1 = grads.slice(0, ROWS, dim=0), grads.slice(ROWS, ROWS, dim=0)
    k_0 = tiles.k.index(0).reshape([ROWS, how.QK_ALL])
    k_1 = tiles.k.index(1).reshape([ROWS, how.QK_ALL])
    if how.BLOCK_M == ROWS:
        k_0, k_1 = k_0.slice(consumer * COLUMNS, COLUMNS, dim=1), k_1.slice(consumer * COLUMNS, COLUMNS, dim=1)
    else:
        grads_0, grads_1 = grads_0.slice(consumer * ROWS, ROWS, dim=1), grads_1.slice(consumer * ROWS, ROWS, dim=1)
    sums = warpgroup_mma(grads_0.permute([1, 0]), k_0, none, use_acc=False, is_async=True)
    return warpgroup_mma(grads_1.permute([1, 0]), k_1, sums, is_async=True)


@gluon.jit
def _add_to_dq(consumer: gl.constexpr, Sums, batch, head, start, sums, tiles, how: gl.constexpr):
    """To the sums in memory, by the copy engine. What was there before has left."""
    mine = tiles.sums.index(consumer)
    mine.reshape([ROWS, how.SUM_COLUMNS]).store(sums)
    fence_async_shared()
    barrier_of_threads()
    if how.BLOCK_M == ROWS:
        add_from_shared(Sums, [batch, head, start, consumer * how.SUM_COLUMNS], mine)
    else:
        add_from_shared(Sums, [batch, head, start + consumer * ROWS, 0], mine)


@gluon.jit
def _scores(consumer: gl.constexpr, n, tiles, barriers, layouts: gl.constexpr, how: gl.constexpr):
    """k qᵀ of the n-th tile, under way."""
    stage = n % how.STAGES
    mbarrier.wait(barriers.q_full.index(stage), (n // how.STAGES) & 1)
    q = tiles.q.index(stage).reshape([how.BLOCK_M, how.QK_ALL])
    k = tiles.k.index(consumer).reshape([ROWS, how.QK_ALL])
    none = gl.zeros([ROWS, how.BLOCK_M], gl.float32, layout=layouts.SCORES)
    return warpgroup_mma(k, q.permute([1, 0]), none, use_acc=False, is_async=True)


@gluon.jit
def _grad_weights(consumer: gl.constexpr, n, tiles, barriers, layouts: gl.constexpr, how: gl.constexpr):
    """v gᵀ of the n-th tile, under way."""
    stage = n % how.STAGES
    mbarrier.wait(barriers.g_full.index(stage), (n // how.STAGES) & 1)
    g = tiles.g.index(stage).reshape([how.BLOCK_M, how.V_ALL])
    v = tiles.v.index(consumer).reshape([ROWS, how.V_ALL])
    none = gl.zeros([ROWS, how.BLOCK_M], gl.float32, layout=layouts.SCORES)
    return warpgroup_mma(v, g.permute([1, 0]), none, use_acc=False, is_async=True)


@gluon.jit
def _step(
    consumer: gl.constexpr, n, state, own, masks, Sums, batch, head, tiles, barriers, sizes,
    IS_MASKED: gl.constexpr, layouts: gl.constexpr, how: gl.constexpr,
):  # fmt: skip
    """A tile of queries, the n-th that goes through the stages. state: the sums of dk and dv of 64 keys."""
    LEFT_OF_K: gl.constexpr = gl.DotOperandLayout(0, layouts.GRAD_K, k_width=2)
    LEFT_OF_V: gl.constexpr = gl.DotOperandLayout(0, layouts.GRAD_V, k_width=2)
    QUERY: gl.constexpr = gl.SliceLayout(0, layouts.SCORES)
    grad_k, grad_v = state
    stage, phase = n % how.STAGES, (n // how.STAGES) & 1
    q = tiles.q.index(stage).reshape([how.BLOCK_M, how.QK_ALL])
    g = tiles.g.index(stage).reshape([how.BLOCK_M, how.V_ALL])
    scores = _scores(consumer, n, tiles, barriers, layouts, how)
    grad_weights = _grad_weights(consumer, n, tiles, barriers, layouts, how)
    mbarrier.wait(barriers.stats_full.index(stage), phase)
    start = _told(tiles.first, stage)
    stats = tiles.stats.index(stage)
    base = stats.slice(0, how.BLOCK_M).load(QUERY)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    weights, through = _weights(scores, start, IS_MASKED, base, own, masks, sizes, layouts, how)
    left = gl.convert_layout(narrowed(weights, tiles.k), LEFT_OF_V, assert_trivial=True)
    delta = stats.slice(how.BLOCK_M, how.BLOCK_M).load(QUERY)
    # It has come. ptxas moves the weights behind the products' wait unless something that branches is between.
    mbarrier.wait(barriers.g_full.index(stage), phase)
    grad_weights = warpgroup_mma_wait(0, deps=(grad_weights,))
    grad_v = warpgroup_mma(left, g, grad_v, is_async=True)
    grads = narrowed(through * (grad_weights - delta[None, :]), tiles.k)
    # Both warpgroups have read what was there: else the tile's gradients of the output had not come.
    tiles.grads.index(stage).slice(consumer * ROWS, ROWS, dim=0).store(grads)
    fence_async_shared()
    mbarrier.arrive(barriers.grads_full.index(stage))
    grad_k = warpgroup_mma(gl.convert_layout(grads, LEFT_OF_K, assert_trivial=True), q, grad_k, is_async=True)
    mbarrier.wait(barriers.grads_full.index(stage), phase)
    sums = _products_of_dq(consumer, tiles.grads.index(stage), tiles, layouts, how)
    sums, grad_k, grad_v = warpgroup_mma_wait(0, deps=(sums, grad_k, grad_v))
    # Until what is in place of what is added to dq has left.
    tma.store_wait(0)
    barrier_of_threads()
    mbarrier.arrive(barriers.q_empty.index(stage))
    _add_to_dq(consumer, Sums, batch, head, start, sums, tiles, how)
    return grad_k, grad_v


@gluon.jit
def _own(block, batch, consumer: gl.constexpr, masks, masking, sizes, layouts: gl.constexpr, how: gl.constexpr):
    """keys, least and most of `KeyBlock`. Keys that nobody may use have no query."""
    KEY: gl.constexpr = gl.SliceLayout(1, layouts.SCORES)
    keys = block * how.BLOCK_N + consumer * ROWS + gl.arange(0, ROWS, layout=KEY)
    inside = keys < sizes.seqlen_kv
    least = keys * 0
    most = keys * 0 + FAR
    if how.HAS_RIGHT:
        least = keys - sizes.band_right
    if how.HAS_LEFT:
        most = keys + sizes.band_left
    used = inside
    if masks.Keys is not None:
        found = gl.load(at_index(masks.Keys, batch, masking.keys_b) + keys, mask=inside, other=0)
        used = found != 0
    return keys, least, gl.where(used, most, -1 - FAR)


@gluon.jit
def _leave(Out, at, sums, tile, HEAD_DIM: gl.constexpr, ELEMENT: gl.constexpr):
    """64 rows of a gradient, by the place that sums of dq leave from."""
    own = tile._reinterpret(ELEMENT, [1, 1, ROWS, HEAD_DIM], Out.layout)
    tma.store_wait(0)
    barrier_of_threads()
    own.reshape([ROWS, HEAD_DIM]).store(sums.to(ELEMENT))
    fence_async_shared()
    barrier_of_threads()
    tma.async_copy_shared_to_global(Out, at, own)


@gluon.jit
def _mark(Flag, sums, rows, length):
    """Raise the flag if a row of a gradient has come out as NaN."""
    found = gl.sum(sums, 1)
    gl.store(Flag + rows * 0, rows * 0 + 1, mask=(found != found) & (rows < length))


@gluon.jit
def _compute(
    consumer: gl.constexpr, Sums, GradK, GradV, Flag, masks, masking, tiles, barriers, work, scale, factor, softcap,
    how: gl.constexpr,
):  # fmt: skip
    """64 keys of each of this program's blocks."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, how.BLOCK_M, 16]
    )
    GRAD_K: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, how.QK_ALL, 16]
    )
    GRAD_V: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, how.V_ALL, 16]
    )
    SUM: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, how.SUM_COLUMNS, 16]
    )
    LAYOUTS: gl.constexpr = GradLayouts(SCORES=SCORES, GRAD_K=GRAD_K, GRAD_V=GRAD_V, SUM=SUM)
    sizes = work.sizes
    nth, loaded, done = 0, 0, 0
    mbarrier.wait(barriers.work_full.index(0), 0)
    item, count, masked = _told(tiles.work, 0), _told(tiles.work, 1), _told(tiles.work, 2)
    mbarrier.arrive(barriers.work_empty.index(0))
    while item >= 0:
        block, batch, head = _block(item, work)
        start = block * how.BLOCK_N + consumer * ROWS
        keys, least, most = _own(block, batch, consumer, masks, masking, sizes, LAYOUTS, how)
        document = None
        if masks.DocumentsK is not None:
            of_row = at_index(masks.DocumentsK, batch, masking.documents_kb)
            document = gl.load(of_row + keys, mask=keys < sizes.seqlen_kv, other=0)
        of_batch = QueryMasks(
            Rows=at_index(masks.Rows, batch, masking.rows_b), rows_side=masking.rows_side,
            Documents=at_index(masks.DocumentsQ, batch, masking.documents_qb),
        )  # fmt: skip
        slope = None
        if masks.Slopes is not None:
            slope = gl.load(masks.Slopes + head) * LOG2E
        own = KeyBlock(
            keys=keys, least=least, most=most, document=document, factor=factor, cap=softcap * LOG2E, slope=slope
        )
        grad_k = gl.zeros([ROWS, how.QK_ALL], gl.float32, layout=GRAD_K)
        grad_v = gl.zeros([ROWS, how.V_ALL], gl.float32, layout=GRAD_V)
        if count > 0:
            mbarrier.wait(barriers.kv_full, loaded & 1)
            state = (grad_k, grad_v)
            for i in range(masked):
                state = _step(
                    consumer, done + i, state, own, of_batch, Sums, batch, head, tiles, barriers, sizes, True, LAYOUTS, how
                )  # fmt: skip
            for i in range(masked, count):
                state = _step(
                    consumer, done + i, state, own, of_batch, Sums, batch, head, tiles, barriers, sizes, how.MASK_ALL,
                    LAYOUTS, how,
                )  # fmt: skip
            grad_k, grad_v = state
            loaded += 1
            done += count
            mbarrier.arrive(barriers.kv_empty)
        ELEMENT: gl.constexpr = tiles.k.dtype
        if how.MARKS:
            _mark(Flag, grad_k, start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, GRAD_K)), sizes.seqlen_kv)
            _mark(Flag, grad_v, start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, GRAD_V)), sizes.seqlen_kv)
        at = [batch, head, start, 0]
        _leave(GradV, at, grad_v, tiles.sums.index(consumer), how.V_ALL, ELEMENT)
        _leave(GradK, at, grad_k * scale, tiles.sums.index(consumer), how.QK_ALL, ELEMENT)
        nth += 1
        place_of = nth % 2
        mbarrier.wait(barriers.work_full.index(place_of), (nth // 2) & 1)
        item, count = _told(tiles.work, place_of * 3), _told(tiles.work, place_of * 3 + 1)
        masked = _told(tiles.work, place_of * 3 + 2)
        mbarrier.arrive(barriers.work_empty.index(place_of))
    tma.store_wait(0)


@gluon.jit
def _barriers(STAGES: gl.constexpr):
    LAYOUT: gl.constexpr = mbarrier.MBarrierLayout()
    kv_full = gl.allocate_shared_memory(gl.int64, [1], LAYOUT)
    kv_empty = gl.allocate_shared_memory(gl.int64, [1], LAYOUT)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], LAYOUT)
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], LAYOUT)
    g_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], LAYOUT)
    stats_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], LAYOUT)
    grads_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], LAYOUT)
    work_full = gl.allocate_shared_memory(gl.int64, [2, 1], LAYOUT)
    work_empty = gl.allocate_shared_memory(gl.int64, [2, 1], LAYOUT)
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


@gluon.jit(do_not_specialize=["section", "blocks", "heads_of_all"])
def attention_backward_sm90(
    Q, K, V, GradOut, RowStats, Sums, GradK, GradV, Flag, Rows, Keys, DocumentsQ, DocumentsK, Lists, Slopes,
    stride_q, stride_k, stride_v, stride_g, stride_s, stride_dk, stride_dv, stats_rows, masking, lists, sizes,
    section, blocks, heads_of_all, HOW: gl.constexpr,
):  # fmt: skip
    """Grid: up to blocks · heads_of_all, for `blocks` blocks of BLOCK_N keys of each of heads_of_all = B · Hq heads: no more than run at
    once, each then computes several. num_warps: 4.

    Q, K, V, GradOut: logical BHSD, in half precision, every stride but the last one a multiple of 16 bytes. GradK, GradV: the same,
    (B, Hq, Skv, D), what each head of queries adds. RowStats: (B, Hq, 2, stats_rows) float32, as row_stats.py says. Sums: (B, Hq, Sq, QK)
    float32, contiguous, zeros: gets dq over the scale. Flag: two int32, 0: the first gets 1 if MARKS and a gradient is NaN, the second
    counts blocks. Lists: by key. The other operands: kernel_plan.Plan; tuples: shared tuples.py; HOW: `GradSwitches`. The scale is
    positive.
    """
    how: gl.constexpr = HOW._replace()
    work = Work(section=section, blocks=blocks, heads_of_all=heads_of_all, sizes=sizes, Lists=Lists, lists=lists)
    heads, heads_kv = sizes.heads_q, sizes.heads_q // sizes.group
    batch, seqlen_q, seqlen_kv = heads_of_all // heads, sizes.seqlen_q, sizes.seqlen_kv
    QK: gl.constexpr = how.HEAD_DIM_QK
    of_q = descriptor(Q, batch, heads, seqlen_q, stride_q, how.BLOCK_M, QK, how.QK_ALL)
    of_g = descriptor(GradOut, batch, heads, seqlen_q, stride_g, how.BLOCK_M, how.HEAD_DIM_V, how.V_ALL)
    of_k = descriptor(K, batch, heads_kv, seqlen_kv, stride_k, ROWS, QK, how.QK_ALL)
    of_v = descriptor(V, batch, heads_kv, seqlen_kv, stride_v, ROWS, how.HEAD_DIM_V, how.V_ALL)
    of_dk = descriptor(GradK, batch, heads, seqlen_kv, stride_dk, ROWS, QK, how.QK_ALL)
    of_dv = descriptor(GradV, batch, heads, seqlen_kv, stride_dv, ROWS, how.HEAD_DIM_V, how.V_ALL)
    of_sums = descriptor(Sums, batch, heads, seqlen_q, stride_s, ROWS, QK, how.SUM_COLUMNS)
    ELEMENT: gl.constexpr = K.dtype.element_ty
    GRADS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2 * ROWS, how.BLOCK_M], ELEMENT)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tiles = GradTiles(
        q=gl.allocate_shared_memory(ELEMENT, [how.STAGES, 1, 1, how.BLOCK_M, how.QK_ALL], of_q.layout),
        g=gl.allocate_shared_memory(ELEMENT, [how.STAGES, 1, 1, how.BLOCK_M, how.V_ALL], of_g.layout),
        k=gl.allocate_shared_memory(ELEMENT, [2, 1, 1, ROWS, how.QK_ALL], of_k.layout),
        v=gl.allocate_shared_memory(ELEMENT, [2, 1, 1, ROWS, how.V_ALL], of_v.layout),
        grads=gl.allocate_shared_memory(ELEMENT, [how.STAGES, 2 * ROWS, how.BLOCK_M], GRADS_LAYOUT),
        sums=gl.allocate_shared_memory(gl.float32, [2, 1, 1, ROWS, how.SUM_COLUMNS], of_sums.layout),
        stats=gl.allocate_shared_memory(gl.float32, [how.STAGES, 2 * how.BLOCK_M], FLAT),
        first=gl.allocate_shared_memory(gl.int32, [how.STAGES, 1], FLAT),
        work=gl.allocate_shared_memory(gl.int32, [6, 1], FLAT),
    )
    barriers = _barriers(how.STAGES)
    masks = Masks(Rows=Rows, Keys=Keys, DocumentsQ=DocumentsQ, DocumentsK=DocumentsK, Slopes=Slopes)
    scale, softcap = sizes.scale, sizes.changed_by
    factor = scale / softcap if how.SOFTCAP else scale * LOG2E
    gl.warp_specialize(
        [
            (
                _compute,
                (
                    0,
                    of_sums,
                    of_dk,
                    of_dv,
                    Flag,
                    masks,
                    masking,
                    tiles,
                    barriers,
                    work,
                    scale,
                    factor,
                    softcap,
                    how,
                ),
            ),
            (
                _compute,
                (
                    1,
                    of_sums,
                    of_dk,
                    of_dv,
                    Flag,
                    masks,
                    masking,
                    tiles,
                    barriers,
                    work,
                    scale,
                    factor,
                    softcap,
                    how,
                ),
            ),
            (_fetch, (of_q, of_k, of_v, of_g, RowStats, Flag + 1, stats_rows, tiles, barriers, work, how)),
        ],
        [4, 4],
        [how.REGISTERS, REGISTERS_OF_ALL - 2 * how.REGISTERS],
    )
