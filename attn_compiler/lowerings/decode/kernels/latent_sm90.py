"""Attention of many heads over the latent that k and v are made of, for Hopper, in Gluon.

A program has 64 rows, which are heads and queries, and keys of one batch row. Its output, 64 rows of up to 512 dims, fills the registers
of two warpgroups. So one warpgroup computes the scores, their softmax and the left half of the output. It leaves the weights in shared
memory for the other one, which computes the right half. A third one has the copy engine (TMA) load tiles of keys. Values are the latent's
part of the same tile.

The product of a tile's right half waits for the next tile's scores: the tensor cores run it during their softmax. The left half of a tile
is freed before the right one, and both are loaded separately.

The tiles are visited from the last one to the first: only the last one has keys beyond the end, so only the first visit is masked.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attn_compiler.lowerings.decode.kernels.latent_sm90_tuples import LatentBarriers, LatentTiles
from attn_compiler.lowerings.shared.kernels.releases import members
from attn_compiler.lowerings.shared.kernels.releases_sm90 import async_load, barrier_of_threads
from attn_compiler.lowerings.shared.kernels.tile_parts import LN2, LOG2E
from attn_compiler.lowerings.shared.kernels.tiles_sm90 import FEW, NOTHING, ROWS, SHARES, narrowed, shares, up_to

#: keys of a tile
KEYS = gl.constexpr(64)
#: a factor that makes finite scores equal and leaves -inf
ALIKE = gl.constexpr(1e-30)


@gluon.jit
def _rows_of(X, length, stride, SIZE: gl.constexpr, DIMS: gl.constexpr, TILE: gl.constexpr):
    """Make a descriptor of (length, DIMS), for tiles of SIZE rows and TILE dims. Reads beyond the tensor are 0."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SIZE, TILE], X.dtype.element_ty)
    return tma.make_tensor_descriptor(X, [length, DIMS], [stride, 1], [SIZE, TILE], LAYOUT)


@gluon.jit
def _fetch(of_q, of_q_rope, of_c, of_r, tiles, barriers, block, start, step, count, how: gl.constexpr):
    """Load the queries, then tiles of keys: first the operands of the scores' first products and of the output's left half, then the right
    half."""
    first_row = block * ROWS
    mbarrier.expect(barriers.q_full, 2 * of_q.block_type.nbytes)
    async_load(of_q, [first_row, 0], barriers.q_full, tiles.q.index(0))
    async_load(of_q, [first_row, how.HALF], barriers.q_full, tiles.q.index(1))
    mbarrier.expect(barriers.q_rope_full, of_q_rope.block_type.nbytes)
    async_load(of_q_rope, [first_row, 0], barriers.q_rope_full, tiles.q_rope)
    for i in range(count):
        stage, phase = i % how.STAGES, (i // how.STAGES) & 1
        key = start + i * step
        mbarrier.wait(barriers.left_empty.index(stage), phase ^ 1)
        mbarrier.expect(barriers.left_full.index(stage), of_c.block_type.nbytes + of_r.block_type.nbytes)
        async_load(of_r, [key, 0], barriers.left_full.index(stage), tiles.rope.index(stage))
        async_load(of_c, [key, 0], barriers.left_full.index(stage), tiles.left.index(stage))
        mbarrier.wait(barriers.right_empty.index(stage), phase ^ 1)
        mbarrier.expect(barriers.right_full.index(stage), of_c.block_type.nbytes)
        async_load(of_c, [key, how.HALF], barriers.right_full.index(stage), tiles.right.index(stage))


@gluon.jit
def _scores(tiles, barriers, i, QK_LAYOUT: gl.constexpr, how: gl.constexpr):
    """Start q kᵀ of the i-th tile as its parts arrive."""
    stage, phase = i % how.STAGES, (i // how.STAGES) & 1
    none = gl.zeros([ROWS, KEYS], gl.float32, layout=QK_LAYOUT)
    mbarrier.wait(barriers.left_full.index(stage), phase)
    left = tiles.left.index(stage).permute([1, 0])
    rope = tiles.rope.index(stage).permute([1, 0])
    qk = warpgroup_mma(tiles.q_rope, rope, none, use_acc=False, is_async=True)
    qk = warpgroup_mma(tiles.q.index(0), left, qk, is_async=True)
    mbarrier.wait(barriers.right_full.index(stage), phase)
    right = tiles.right.index(stage).permute([1, 0])
    return warpgroup_mma(tiles.q.index(1), right, qk, is_async=True)


@gluon.jit
def _softmax(qk, key, most, peak, total, factor, MASKED: gl.constexpr, QK_LAYOUT: gl.constexpr):
    """Return the weights of a tile from `key` on, each row's maximum, its sum as `shares` of it, and the factor of the sums so far."""
    if MASKED:
        qk = gl.where(up_to(most - key, QK_LAYOUT, KEYS), qk, float("-inf"))
    new_peak = gl.maximum(peak, gl.max(qk, 1) * factor)
    weights = gl.exp2(qk * factor - new_peak[:, None])
    decay = gl.exp2(peak - new_peak)
    total = total * gl.convert_layout(decay, gl.SliceLayout(1, SHARES), assert_trivial=True)[:, None]
    return weights, new_peak, total + shares(weights, KEYS), decay


@gluon.jit
def _hand_over(weights, decay, tiles, barriers, i):
    """Pass the weights of the i-th tile, and the factor of the output so far, to the other warpgroup."""
    mbarrier.wait(barriers.weights_empty, (i & 1) ^ 1)
    if weights is not None:
        tiles.weights.store(weights)
    tiles.decay.store(decay)
    barrier_of_threads()
    mbarrier.arrive(barriers.weights_full)


@gluon.jit
def _left(
    tiles, barriers, Out, Lse, start, step, count, length, block, split, batch, factor, unit,
    PARTIAL: gl.constexpr, how: gl.constexpr,
):  # fmt: skip
    """Run scores, softmax and the left half of the output."""
    QK_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16]
    )
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, how.HALF, 16]
    )
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT_LAYOUT, k_width=2)
    ROW: gl.constexpr = gl.SliceLayout(1, QK_LAYOUT)
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, OUT_LAYOUT)
    most = gl.full([ROWS], 0, gl.int32, layout=ROW) + (length - 1)
    peak = gl.full([ROWS], NOTHING, gl.float32, layout=ROW)
    total = gl.zeros([ROWS, 4], gl.float32, layout=SHARES)
    out = gl.zeros([ROWS, how.HALF], gl.float32, layout=OUT_LAYOUT)
    mbarrier.wait(barriers.q_rope_full, 0)
    mbarrier.wait(barriers.q_full, 0)
    qk = _scores(tiles, barriers, 0, QK_LAYOUT, how)
    qk = warpgroup_mma_wait(0, deps=(qk,))
    found, peak, total, decay = _softmax(qk, start, most, peak, total, factor, True, QK_LAYOUT)
    weights = narrowed(found, tiles.weights)
    _hand_over(weights, decay, tiles, barriers, 0)
    weights = gl.convert_layout(weights, WEIGHTS, assert_trivial=True)
    for i in range(1, count):
        before = (i - 1) % how.STAGES
        out = warpgroup_mma(weights, tiles.left.index(before), out, is_async=True)
        qk = _scores(tiles, barriers, i, QK_LAYOUT, how)
        out = warpgroup_mma_wait(3, deps=(out,))
        mbarrier.arrive(barriers.left_empty.index(before))
        qk = warpgroup_mma_wait(0, deps=(qk,))
        mbarrier.arrive(barriers.turn)
        found, peak, total, decay = _softmax(qk, start + i * step, most, peak, total, factor, False, QK_LAYOUT)
        weights = narrowed(found, tiles.weights)
        _hand_over(weights, decay, tiles, barriers, i)
        weights = gl.convert_layout(weights, WEIGHTS, assert_trivial=True)
        out = out * gl.convert_layout(decay, OUT_ROW, assert_trivial=True)[:, None]
    mbarrier.arrive(barriers.turn)
    out = warpgroup_mma(weights, tiles.left.index((count - 1) % how.STAGES), out)
    total = gl.convert_layout(gl.sum(total, 1), ROW, assert_trivial=True)
    is_empty = total == 0.0
    share = gl.where(is_empty, 0.0, 1.0 / gl.where(is_empty, 1.0, total))
    _hand_over(None, share, tiles, barriers, count)
    lse = gl.where(is_empty, float("-inf"), (peak + gl.log2(gl.where(is_empty, 1.0, total))) * unit)
    _, at, kept = _places(block, split, batch, ROW, PARTIAL, how)
    gl.store(Lse + at, lse, mask=kept)
    out = out * gl.convert_layout(share, OUT_ROW, assert_trivial=True)[:, None]
    _store(Out, out, block, split, batch, 0, OUT_LAYOUT, PARTIAL, how)


@gluon.jit
def _right(tiles, barriers, Out, count, block, split, batch, PARTIAL: gl.constexpr, how: gl.constexpr):
    """Run the right half of the output."""
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, how.HALF, 16]
    )
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT_LAYOUT, k_width=2)
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, OUT_LAYOUT)
    out = gl.zeros([ROWS, how.HALF], gl.float32, layout=OUT_LAYOUT)
    for i in range(count):
        stage = i % how.STAGES
        mbarrier.wait(barriers.weights_full, i & 1)
        weights = tiles.weights.load(WEIGHTS)
        decay = tiles.decay.load(OUT_ROW)
        out = out * decay[:, None]
        mbarrier.wait(barriers.right_full.index(stage), (i // how.STAGES) & 1)
        # Before the next weights may come: no second turn is given until this one is taken.
        mbarrier.wait(barriers.turn, i & 1)
        barrier_of_threads()
        mbarrier.arrive(barriers.weights_empty)
        out = warpgroup_mma(weights, tiles.right.index(stage), out, is_async=True)
        out = warpgroup_mma_wait(0, deps=(out,))
        mbarrier.arrive(barriers.right_empty.index(stage))
    mbarrier.wait(barriers.weights_full, count & 1)
    out = out * tiles.decay.load(OUT_ROW)[:, None]
    _store(Out, out, block, split, batch, how.HALF, OUT_LAYOUT, PARTIAL, how)


@gluon.jit
def _places(block, split, batch, LAYOUT: gl.constexpr, PARTIAL: gl.constexpr, how: gl.constexpr):
    """Return each row's position in the output (in rows) and in the lse, and whether they are stored."""
    own = gl.arange(0, ROWS, layout=LAYOUT)
    row, far = block * ROWS + own, batch.to(gl.int64)
    if PARTIAL:
        record = (far * gl.num_programs(0) + block) * gl.num_programs(1) + split
        at = record * how.KEPT + own
        of_lse = at
        kept = own < how.KEPT
    else:
        head, query = row // how.SEQLEN_Q, row % how.SEQLEN_Q
        at = (far * how.SEQLEN_Q + query) * how.GROUP + head
        of_lse = (far * how.GROUP + head) * how.SEQLEN_Q + query
        kept = row < how.GROUP * how.SEQLEN_Q
    return at, of_lse, kept


@gluon.jit
def _store(
    Out, out, block, split, batch, first: gl.constexpr,
    OUT_LAYOUT: gl.constexpr, PARTIAL: gl.constexpr, how: gl.constexpr,
):  # fmt: skip
    """Store half of the output."""
    at, _, kept = _places(block, split, batch, gl.SliceLayout(1, OUT_LAYOUT), PARTIAL, how)
    dims = first + gl.arange(0, how.HALF, layout=gl.SliceLayout(0, OUT_LAYOUT))
    gl.store(Out + at[:, None] * (2 * how.HALF) + dims[None, :], out, mask=kept[:, None])


@gluon.jit
def _barrier():
    """Make a barrier of one arrival."""
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    return barrier


@gluon.jit
def _barriers(STAGES: gl.constexpr):
    """Make a barrier of one arrival for each stage."""
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(barriers.index(i), count=1)
    return barriers


@gluon.jit
def _all_barriers(STAGES: gl.constexpr):
    made = LatentBarriers(
        q_full=_barrier(), q_rope_full=_barrier(),
        left_full=_barriers(STAGES), left_empty=_barriers(STAGES),
        right_full=_barriers(STAGES), right_empty=_barriers(STAGES),
        weights_full=_barrier(), weights_empty=_barrier(), turn=_barrier(),
    )  # fmt: skip
    fence_async_shared()
    return made


@gluon.jit
def _bounds_of(Bounds, batch, bounds_side, bounds_b, seqlen_kv, how: gl.constexpr):
    """Return the first key that a row of the batch may use, and the one after the last."""
    first, end = batch * 0, batch * 0 + seqlen_kv
    if Bounds is not None:
        at = Bounds + batch.to(gl.int64) * bounds_b
        first = gl.maximum(gl.load(at), 0)
        end = gl.minimum(gl.load(at + bounds_side), seqlen_kv)
    return first, end


#: as in decode_latent.py
ANY_VALUE = (
    "stride_qb", "stride_qr", "stride_cb", "stride_cs", "stride_rb", "stride_rs",
    "bounds_side", "bounds_b", "lse_at", "seqlen_kv", "scale",
)  # fmt: skip
ANY_OPERAND = ("Lse", "Bounds")


@gluon.jit(do_not_specialize=ANY_VALUE, do_not_specialize_on_alignment=ANY_OPERAND)
def attention_latent_sm90(
    Q, C, R, Out, Lse, Partial, Bounds,
    stride_qb: tl.int64, stride_qr: tl.int64, stride_cb: tl.int64, stride_cs: tl.int64, stride_rb: tl.int64, stride_rs: tl.int64,
    bounds_side: tl.int32, bounds_b: tl.int32, lse_at: tl.int64, seqlen_kv: tl.int32, scale: tl.float32, HOW: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of 64 rows, splits, B). num_warps: 4. As `attention_decode_latent`, in half precision; the mask is bounds of a query,
    and the only change of scores is a positive scale.

    stride_qr: from one row of Q to the next. Every stride is a multiple of 16 bytes.
    """
    how: gl.constexpr = members(HOW)
    block, split, batch = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    splits = gl.num_programs(1)
    far = batch.to(gl.int64)
    first, end = _bounds_of(Bounds, batch, bounds_side, bounds_b, seqlen_kv, how)
    length = gl.maximum(end - first, 0)
    first = gl.where(length > 0, first, 0)
    factor = scale * LOG2E
    if how.MEANS is not None:
        factor = gl.where(length > 0, factor, ALIKE)
        length = gl.where(length > 0, length, seqlen_kv)
    tiles_of_all = (length + KEYS - 1) // KEYS
    # A split without keys has one tile beyond the end, which is loaded as 0.
    count = gl.maximum((tiles_of_all - split + splits - 1) // splits, 1)
    last = split + (count - 1) * splits
    last = gl.where(tiles_of_all == 0, last + 1, last)
    start, step = last * KEYS, -splits * KEYS
    TOTAL: gl.constexpr = how.GROUP * how.SEQLEN_Q
    RANK: gl.constexpr = 2 * how.HALF
    of_q = _rows_of(Q + far * stride_qb, TOTAL, stride_qr, ROWS, RANK, how.HALF)
    of_c = _rows_of(
        C + far * stride_cb + first.to(gl.int64) * stride_cs, gl.maximum(length, 1), stride_cs, KEYS, RANK, how.HALF
    )
    of_q_rope = _rows_of(Q + far * stride_qb + RANK, TOTAL, stride_qr, ROWS, how.ROPE, how.ROPE)
    of_r = _rows_of(
        R + far * stride_rb + first.to(gl.int64) * stride_rs, gl.maximum(length, 1), stride_rs, KEYS, how.ROPE, how.ROPE
    )
    ELEMENT: gl.constexpr = C.dtype.element_ty
    WEIGHTS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, KEYS], ELEMENT)
    weights = gl.allocate_shared_memory(ELEMENT, [ROWS, KEYS], WEIGHTS_LAYOUT)
    q_tiles = gl.allocate_shared_memory(ELEMENT, [2, ROWS, how.HALF], of_q.layout)
    left = gl.allocate_shared_memory(ELEMENT, [how.STAGES, KEYS, how.HALF], of_c.layout)
    right = gl.allocate_shared_memory(ELEMENT, [how.STAGES, KEYS, how.HALF], of_c.layout)
    rope = gl.allocate_shared_memory(ELEMENT, [how.STAGES, KEYS, how.ROPE], of_r.layout)
    q_rope = gl.allocate_shared_memory(ELEMENT, [ROWS, how.ROPE], of_q_rope.layout)
    decay = gl.allocate_shared_memory(gl.float32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tiles = LatentTiles(q=q_tiles, q_rope=q_rope, left=left, right=right, rope=rope, weights=weights, decay=decay)
    barriers = _all_barriers(how.STAGES)
    results, of_lse, unit = Out, Lse, LN2
    if Partial is not None:
        results, of_lse, unit = Partial, Partial + lse_at, 1.0
    gl.warp_specialize(
        [
            (
                _left,
                (
                    tiles,
                    barriers,
                    results,
                    of_lse,
                    start,
                    step,
                    count,
                    length,
                    block,
                    split,
                    batch,
                    factor,
                    unit,
                    Partial is not None,
                    how,
                ),
            ),
            (_right, (tiles, barriers, results, count, block, split, batch, Partial is not None, how)),
            (_fetch, (of_q, of_q_rope, of_c, of_r, tiles, barriers, block, start, step, count, how)),
        ],
        [4, 4],
        [how.REGISTERS, FEW],
    )
