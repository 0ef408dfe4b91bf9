"""Attention backward in half precision for Hopper, in Gluon: one pass over the keys, for all masks and scores of forward_sm90.py.

A program computes several blocks of 128 keys. One warpgroup has the copy engine (TMA) load tiles of queries and of the output's gradient;
two compute 64 keys each. Their scores are transposed, (keys, queries), so that weights and their gradients stay in registers as the left
operand of the products for dv and dk. Both warpgroups share the gradients of scores through shared memory: each multiplies half of dq's
columns (or rows). The copy engine adds the products to float32 sums in memory (https://arxiv.org/abs/2407.08608, section 3).

Those sums come in no fixed order, so two runs may differ in the last bits of dq, unless blocks take turns (in_order_sm90.py). A gradient
that is NaN raises a flag: a masked key may hold NaN, and 0 · NaN is NaN. The Triton family's kernels then recompute all gradients.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from attn_compiler.lowerings.hopper.kernels.forward_added_sm90 import descriptor_of_added
from attn_compiler.lowerings.hopper.kernels.grad_fetching_sm90 import fetch, grad_barriers_of, told, told_block
from attn_compiler.lowerings.hopper.kernels.grad_tiles_sm90 import (
    REGISTERS_OF_ALL,
    add_to_dq,
    keys_of_block,
    mark_nan,
    products_of_dq,
    start_product,
    weights_of,
)
from attn_compiler.lowerings.hopper.kernels.head_parts_sm90 import (
    no_outputs,
    outputs_of,
    parts_in,
    slices_of,
    start_of,
    sums_of,
    width_of,
)
from attn_compiler.lowerings.hopper.kernels.in_order_sm90 import sums_have_come
from attn_compiler.lowerings.hopper.kernels.tuples import (
    AddedTiles,
    ForwardWork,
    GradTiles,
    KeyBlock,
    Masks,
    QueryMasks,
)
from attn_compiler.lowerings.shared.kernels.optional import at_index, of_head
from attn_compiler.lowerings.shared.kernels.releases import members
from attn_compiler.lowerings.shared.kernels.releases_sm90 import async_store, barrier_of_threads, reinterpret
from attn_compiler.lowerings.shared.kernels.tile_parts import LOG2E
from attn_compiler.lowerings.shared.kernels.tiles_sm90 import ROWS, descriptor, narrowed
from attn_compiler.lowerings.shared.kernels.tuples_sm90 import GradLayouts


@gluon.jit
def _meet():
    """Wait for the other warpgroup that computes. Triton's own barriers have lower numbers."""
    ASM: gl.constexpr = "bar.sync 15, 256; mov.u32 $0, $1;"
    gl.inline_asm_elementwise(ASM, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _step(
    consumer: gl.constexpr, n, state, own, masks, Sums, batch, head, tiles, barriers, sizes,
    IS_MASKED: gl.constexpr, layouts: gl.constexpr, how: gl.constexpr,
):  # fmt: skip
    """Process the n-th tile of queries of all stages, 64 at a time. state: the sums of dk and dv of 64 keys.

    With two halves, products of one are under way while the other has its weights. dv's product begins before the wait for the weights'
    gradients, so ptxas can't move the weights behind that.
    """
    QUERY: gl.constexpr = gl.SliceLayout(0, layouts.SCORES)
    HALVES: gl.constexpr = how.BLOCK_M // ROWS
    grad_k, grad_v = state
    stage, phase = n % how.STAGES, (n // how.STAGES) & 1
    q = tiles.q.index(stage).reshape([how.BLOCK_M, how.QK_ALL])
    g = tiles.g.index(stage).reshape([how.BLOCK_M, how.V_ALL])
    mbarrier.wait(barriers.q_full.index(stage), phase)
    k = tiles.k.index(consumer).reshape([ROWS, how.QK_ALL])
    scores = start_product(k, q, 0, how.QK, layouts)
    if HALVES == 2:
        next_scores = start_product(k, q, 1, how.QK, layouts)
    mbarrier.wait(barriers.g_full.index(stage), phase)
    v = tiles.v.index(consumer).reshape([ROWS, how.V_ALL])
    grad_weights = start_product(v, g, 0, how.V, layouts)
    mbarrier.wait(barriers.stats_full.index(stage), phase)
    start = told(tiles.first, stage)
    stats = tiles.stats.index(stage)
    if HALVES == 1:
        base = stats.slice(0, how.BLOCK_M).load(QUERY)
    bias = None
    if how.ADDED:
        bias = tiles.added.index(2 * stage + consumer).reshape([how.BLOCK_M, ROWS]).permute([1, 0]).load(layouts.SCORES)
    scores = warpgroup_mma_wait(HALVES, deps=(scores,))
    for half in gl.static_range(HALVES):
        if HALVES == 2:
            base = stats.slice(half * ROWS, ROWS).load(QUERY)
        weights, through = weights_of(
            scores, start + half * ROWS, IS_MASKED, base, bias, own, masks, sizes, layouts, how
        )  # fmt: skip
        left = narrowed(weights, tiles.k)
        if HALVES == 1:
            delta = stats.slice(how.BLOCK_M, how.BLOCK_M).load(QUERY)
            # Already loaded: the branch alone matters, without which ptxas moves the weights behind the products' wait.
            mbarrier.wait(barriers.g_full.index(stage), phase)
            grad_weights = warpgroup_mma_wait(0, deps=(grad_weights,))
        grad_v = outputs_of(left, slices_of(g.slice(half * ROWS, ROWS, dim=0), how.V), grad_v, how.V)
        if HALVES == 2:
            if half == 0:
                next_grad_weights = start_product(v, g, 1, how.V, layouts)
                scores, grad_weights = warpgroup_mma_wait(2, deps=(next_scores, grad_weights))
            else:
                grad_weights = warpgroup_mma_wait(2, deps=(next_grad_weights,))
            delta = stats.slice(how.BLOCK_M + half * ROWS, ROWS).load(QUERY)
        grads = narrowed(through * (grad_weights - delta[None, :]), tiles.k)
        # Both warpgroups have read the buffer's last gradients: else this tile's output gradient would not have been loaded.
        own_grads = tiles.grads.index(stage).slice(consumer * ROWS, ROWS, dim=0)
        own_grads.slice(half * ROWS, ROWS, dim=1).store(grads)
        if half + 1 == HALVES:
            fence_async_shared()
            if HALVES == 1:
                mbarrier.arrive(barriers.grads_full.index(stage))
        grad_k = outputs_of(grads, slices_of(q.slice(half * ROWS, ROWS, dim=0), how.QK), grad_k, how.QK)
    if HALVES == 1:
        mbarrier.wait(barriers.grads_full.index(stage), phase)
    else:
        _meet()
    sums = products_of_dq(consumer, tiles.grads.index(stage), tiles, how)
    found = warpgroup_mma_wait(0, deps=(sums,) + grad_k + grad_v)  # noqa: RUF005 (Triton reads no stars)
    sums, grad_k, grad_v = found[0], found[1 : 1 + parts_in(how.QK)], found[1 + parts_in(how.QK) :]
    # Until the copy engine has read the last sums of dq from their buffer, or, where blocks take turns, has added them.
    if how.IN_ORDER:
        sums_have_come()
    else:
        tma.store_wait(0)
    barrier_of_threads()
    mbarrier.arrive(barriers.q_empty.index(stage))
    add_to_dq(consumer, Sums, batch, head, start, n, sums, tiles, how)
    return grad_k, grad_v


@gluon.jit
def _leave(Out, at, sums, scale, tile, HEAD_DIM: gl.constexpr, DIMS: gl.constexpr, ELEMENT: gl.constexpr):
    """Store 64 rows of a gradient, times the scale, through the buffer of dq's sums."""
    own = reinterpret(tile, ELEMENT, [1, 1, ROWS, HEAD_DIM], Out.layout)
    tma.store_wait(0)
    barrier_of_threads()
    for n in gl.static_range(parts_in(DIMS)):
        part = own.reshape([ROWS, HEAD_DIM]).slice(start_of(DIMS, n), width_of(DIMS, n), dim=1)
        part.store((sums[n] * scale).to(ELEMENT))
    fence_async_shared()
    barrier_of_threads()
    async_store(Out, at, own)


@gluon.jit
def _compute(
    consumer: gl.constexpr, Sums, GradK, GradV, Flag, masks, masking, tiles, barriers, work, scale, factor, softcap,
    how: gl.constexpr,
):  # fmt: skip
    """Compute 64 keys of each block of this program."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    KEY: gl.constexpr = gl.SliceLayout(1, SCORES)
    LAYOUTS: gl.constexpr = GradLayouts(SCORES=SCORES)
    sizes = work.sizes
    nth, loaded, done = 0, 0, 0
    mbarrier.wait(barriers.work_full.index(0), 0)
    item, count, masked = told(tiles.work, 0), told(tiles.work, 1), told(tiles.work, 2)
    mbarrier.arrive(barriers.work_empty.index(0))
    while item >= 0:
        block, batch, head = told_block(item, work)
        start = block * how.BLOCK_N + consumer * ROWS
        keys, least, most = keys_of_block(block, batch, consumer, masks, masking, sizes, LAYOUTS, how)
        document = None
        if masks.DocumentsK is not None:
            of_row = at_index(masks.DocumentsK, batch, masking.documents_kb)
            document = gl.load(of_row + keys, mask=keys < sizes.seqlen_kv, other=0)
        of_batch = QueryMasks(
            Rows=at_index(masks.Rows, batch, masking.rows_b), rows_side=masking.rows_side,
            Documents=at_index(masks.DocumentsQ, batch, masking.documents_qb),
            Bits=of_head(masks.Bits, batch, head, masking.mask_b, masking.mask_h),
        )  # fmt: skip
        slope = None
        if masks.Slopes is not None:
            slope = gl.load(masks.Slopes + head) * LOG2E
        bits = None
        if masks.Bits is not None:
            bits = gl.minimum(keys, sizes.seqlen_kv - 1) * masking.mask_k
        own = KeyBlock(
            keys=keys, least=least, most=most, document=document, factor=factor, cap=softcap * LOG2E, slope=slope,
            bits=bits,
        )  # fmt: skip
        grad_k, grad_v = no_outputs(how.QK), no_outputs(how.V)
        if count > 0:
            mbarrier.wait(barriers.kv_full, loaded & 1)
            state = (grad_k, grad_v)
            # Where blocks take turns, tiles come from the last one on: those that need their mask come last.
            first = masked
            if how.IN_ORDER:
                first = 0 if how.MASK_ALL else count - masked
            if not how.IN_ORDER or not how.MASK_ALL:
                for i in range(first):
                    state = _step(
                        consumer, done + i, state, own, of_batch, Sums, batch, head, tiles, barriers, sizes,
                        not how.IN_ORDER, LAYOUTS, how,
                    )  # fmt: skip
            for i in range(first, count):
                state = _step(
                    consumer, done + i, state, own, of_batch, Sums, batch, head, tiles, barriers, sizes,
                    how.IN_ORDER or how.MASK_ALL, LAYOUTS, how,
                )  # fmt: skip
            if how.IN_ORDER:
                sums_have_come()
                barrier_of_threads()
            grad_k, grad_v = state
            loaded += 1
            done += count
            mbarrier.arrive(barriers.kv_empty)
        ELEMENT: gl.constexpr = tiles.k.dtype
        if how.MARKS:
            rows = start + gl.arange(0, ROWS, layout=KEY)
            mark_nan(Flag, sums_of(grad_k, KEY, how.QK), rows, sizes.seqlen_kv)
            mark_nan(Flag, sums_of(grad_v, KEY, how.V), rows, sizes.seqlen_kv)
        at = [batch, head, start, 0]
        _leave(GradV, at, grad_v, 1.0, tiles.sums.index(consumer), how.V_ALL, how.V, ELEMENT)
        _leave(GradK, at, grad_k, scale, tiles.sums.index(consumer), how.QK_ALL, how.QK, ELEMENT)
        nth += 1
        place_of = nth % 2
        mbarrier.wait(barriers.work_full.index(place_of), (nth // 2) & 1)
        item, count = told(tiles.work, place_of * 3), told(tiles.work, place_of * 3 + 1)
        masked = told(tiles.work, place_of * 3 + 2)
        mbarrier.arrive(barriers.work_empty.index(place_of))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["section", "blocks", "heads_of_all"])
def attention_backward_sm90(
    Q, K, V, GradOut, RowStats, Sums, GradK, GradV, Flag, Rows, Keys, DocumentsQ, DocumentsK, Lists, Slopes, Bits, Added,
    Turns, Ranks, stride_q, stride_k, stride_v, stride_g, stride_s, stride_dk, stride_dv, stats_rows, masking, lists, adding, sizes,
    section, blocks, heads_of_all, HOW: gl.constexpr,
):  # fmt: skip
    """Compute dk, dv and, into Sums, dq over the scale. Grid: at most blocks · heads_of_all programs, and no more than run at once: each
    computes several blocks. blocks: of BLOCK_N keys, of one head. heads_of_all: B · Hq. num_warps: 4.

    Q, K, V, GradOut: logical BHSD, in half precision, every stride but the last one a multiple of 16 bytes. GradK, GradV: the same, (B,
    Hq, Skv, D), the part of each query head. RowStats: (B, Hq, 2, stats_rows) float32 (row_stats.py). Sums: (B, Hq, Sq, QK) float32,
    contiguous, zeros; gets dq over the scale. Flag: two int32, 0: the first gets 1 if MARKS and a gradient is NaN, the second counts
    blocks. Lists: by key. Turns: int32 (B, Hq, stats_rows / BLOCK_M), 0, or None where the order does not matter. Ranks: from
    `attention_ranks` and Lists, or None. Bits: of a dense mask, int32 (B|1, Hq|1, Skv|1, words of queries), or None; masking then has
    their strides in place of the mask's. Added: a bias that wants no gradient, and adding: `Adding`; or both None. The other operands:
    kernel_plan.Plan; tuples: shared tuples.py; HOW: `GradSwitches`. The scale is positive.
    """
    how: gl.constexpr = members(HOW)
    work = ForwardWork(section=section, blocks=blocks, heads_of_all=heads_of_all, sizes=sizes, Lists=Lists, lists=lists)
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
    turns, turn_full = None, None
    added = AddedTiles(of=None, at=None, tiles=None, full=None, empty=None)
    ELEMENT: gl.constexpr = K.dtype.element_ty
    GRADS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2 * ROWS, how.BLOCK_M], ELEMENT)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if how.IN_ORDER:
        turns = gl.allocate_shared_memory(gl.int32, [4 * how.STAGES, 1], FLAT)
        turn_full = gl.allocate_shared_memory(gl.int64, [2 * how.STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(2 * how.STAGES):
            mbarrier.init(turn_full.index(i), count=1)
    if how.ADDED:
        of_added = descriptor_of_added(Added, adding, how.BLOCK_M, ROWS)
        added = AddedTiles(
            of=of_added, at=adding, full=None, empty=None,
            tiles=gl.allocate_shared_memory(
                Added.dtype.element_ty, [2 * how.STAGES, 1, 1, how.BLOCK_M, ROWS], of_added.layout
            ),
        )  # fmt: skip
    tiles = GradTiles(
        q=gl.allocate_shared_memory(ELEMENT, [how.STAGES, 1, 1, how.BLOCK_M, how.QK_ALL], of_q.layout),
        g=gl.allocate_shared_memory(ELEMENT, [how.STAGES, 1, 1, how.BLOCK_M, how.V_ALL], of_g.layout),
        k=gl.allocate_shared_memory(ELEMENT, [2, 1, 1, ROWS, how.QK_ALL], of_k.layout),
        v=gl.allocate_shared_memory(ELEMENT, [2, 1, 1, ROWS, how.V_ALL], of_v.layout),
        grads=gl.allocate_shared_memory(ELEMENT, [how.STAGES, 2 * ROWS, how.BLOCK_M], GRADS_LAYOUT),
        sums=gl.allocate_shared_memory(gl.float32, [2, 1, 1, ROWS, how.SUM_COLUMNS], of_sums.layout),
        stats=gl.allocate_shared_memory(gl.float32, [how.STAGES, 2 * how.BLOCK_M], FLAT),
        first=gl.allocate_shared_memory(gl.int32, [how.STAGES, 1], FLAT),
        turns=turns,
        turn_full=turn_full,
        added=added.tiles,
        work=gl.allocate_shared_memory(gl.int32, [6, 1], FLAT),
    )
    barriers = grad_barriers_of(how.STAGES)
    masks = Masks(Rows=Rows, Keys=Keys, DocumentsQ=DocumentsQ, DocumentsK=DocumentsK, Slopes=Slopes, Bits=Bits)
    scale, softcap = sizes.scale, sizes.changed_by
    factor = scale / softcap if how.SOFTCAP else scale * LOG2E
    gl.warp_specialize(
        [
            (_compute, (0, of_sums, of_dk, of_dv, Flag, masks, masking, tiles, barriers, work, scale, factor, softcap, how)),
            (_compute, (1, of_sums, of_dk, of_dv, Flag, masks, masking, tiles, barriers, work, scale, factor, softcap, how)),
            (fetch, (of_q, of_k, of_v, of_g, added, RowStats, Flag + 1, Turns, Ranks, stats_rows, tiles, barriers, work, how)),
        ],
        [4, 4],
        [how.REGISTERS, REGISTERS_OF_ALL - 2 * how.REGISTERS],
    )  # fmt: skip
