"""Attention forward on FP8 tensors for Hopper, in Gluon: a band, softcap, sinks. plain/fp8_reference.py has its numerics.

One warpgroup has the copy engine (TMA) load tiles of keys and values, three or four compute 64 queries each: while one waits for its
products, the others' softmax has the arithmetic units. A program computes several blocks of queries, so that loads for the next one begin
before this one's output is stored. docs/fp8_kernels.md has the other designs that were tried, with numbers.

Weights become the operand of the next product in their own registers: v is stored in the order of each thread's weights
(fp8_rounding.in_order).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from attn_compiler.lowerings.hopper.kernels.fp8_tuples import Fp8Tensors, Fp8Warpgroup, Fp8Work
from attn_compiler.lowerings.shared.kernels.releases import members
from attn_compiler.lowerings.shared.kernels.releases_sm90 import async_load, async_store, barrier_of_threads
from attn_compiler.lowerings.shared.kernels.scheduling_sm90 import barriers_of, turn
from attn_compiler.lowerings.shared.kernels.tile_parts import LN2, LOG2E
from attn_compiler.lowerings.shared.kernels.tiles_sm90 import (
    FEW,
    KEYS,
    NOTHING,
    ROWS,
    SHARES,
    as_numbers,
    quotient,
    rounded,
    shares,
    tanh,
    up_to,
)
from attn_compiler.lowerings.shared.kernels.tuples_sm90 import Layouts, SharedTiles

#: log2 of the weights' scale in FP8: fp8_reference.WEIGHT
WEIGHT = gl.constexpr(8.0)
#: Never 0: -inf times 0 is NaN.
_LEAST_SCALE = gl.constexpr(1e-30)


@gluon.jit
def _block(nth, work, how: gl.constexpr):
    """Return whether this program has an nth block of queries (`turn`), then batch, head, head of keys, row of the lse, first query, first
    tile of keys, number of tiles, and the number of keys of its batch row."""
    blocks = work.blocks
    is_one, block, row = turn(nth, work.section, blocks, work.heads_of_all)
    head, batch = row % work.heads_q, row // work.heads_q
    # The first block is the one cut short where blocks don't divide the queries: under a causal mask it has the fewest keys.
    missing = blocks * how.CONSUMERS - (work.seqlen_q + (ROWS - 1)) // ROWS
    start = (block * how.CONSUMERS - missing) * ROWS
    # One tile at least, even if none of its keys is allowed.
    keys = work.seqlen_kv
    end = keys
    if work.Ends is not None:
        keys = gl.load(work.Ends + batch.to(gl.int64) * work.rows_b, mask=is_one, other=0)
        end = gl.maximum(keys, 1)
    if how.HAS_RIGHT:
        end = gl.minimum(end, gl.maximum(start + ROWS * how.CONSUMERS + work.band_right, 1))
    first = 0
    if how.HAS_LEFT:
        first = gl.minimum(gl.maximum(gl.maximum(start, 0) - work.band_left, 0), end - 1) // KEYS
    count = (end + (KEYS - 1)) // KEYS - first
    return is_one, batch, head, head // work.group, row, start, first, count, keys


@gluon.jit
def _fetch(Q, K, V, tiles, barriers, work, rounds, how: gl.constexpr):
    """Load the queries of every warpgroup for each block, then tiles of keys and values, the last ones first. Runs ahead into the next
    block."""
    done = 0
    for nth in range(rounds):
        is_one, batch, head, head_kv, _row, start, first_tile, count, _keys = _block(nth, work, how)
        if is_one:
            for consumer in gl.static_range(how.CONSUMERS):
                full = barriers.q_full.index(consumer)
                mbarrier.wait(barriers.q_empty.index(consumer), (nth & 1) ^ 1)
                mbarrier.expect(full, Q.block_type.nbytes)
                # The copy engine can't load from before the first query.
                at = [batch, head, gl.maximum(start + consumer * ROWS, 0), 0]
                async_load(Q, at, full, tiles.q.index(consumer))
            for i in range(count):
                stage, phase = (done + i) % how.STAGES, ((done + i) // how.STAGES) & 1
                first = (first_tile + count - 1 - i) * KEYS
                mbarrier.wait(barriers.k_empty.index(stage), phase ^ 1)
                mbarrier.expect(barriers.k_full.index(stage), K.block_type.nbytes)
                async_load(K, [batch, head_kv, first, 0], barriers.k_full.index(stage), tiles.k.index(stage))
                mbarrier.wait(barriers.v_empty.index(stage), phase ^ 1)
                mbarrier.expect(barriers.v_full.index(stage), V.block_type.nbytes)
                async_load(V, [batch, head_kv, 0, first], barriers.v_full.index(stage), tiles.v.index(stage))
            done += count


@gluon.jit
def _skip(first, end, barriers, how: gl.constexpr):
    """Free tiles that only other warpgroups use: a tile is overwritten once every warpgroup has freed it."""
    for i in range(first, end):
        stage, phase = i % how.STAGES, (i // how.STAGES) & 1
        mbarrier.wait(barriers.k_full.index(stage), phase)
        mbarrier.arrive(barriers.k_empty.index(stage))
        mbarrier.wait(barriers.v_full.index(stage), phase)
        mbarrier.arrive(barriers.v_empty.index(stage))


@gluon.jit
def _tiles(
    done, first, end, state, own, tensors, tiles, barriers, RIGHT: gl.constexpr, LEFT: gl.constexpr,
    layouts: gl.constexpr, how: gl.constexpr,
):  # fmt: skip
    """Run the online softmax over the tiles from `first` to `end`, counted from the last one. `done`: tiles of all stages before.

    state: maximum of each row, its sum as `shares` of it, the output, and v's descale, in whose units the output is. RIGHT, LEFT: the
    band's edges that may cross a tile; the end of the keys is a right one. own: `Fp8Warpgroup`; tensors: `Fp8Tensors` of this head.
    """
    QK_LAYOUT: gl.constexpr = layouts.QK
    OUT_LAYOUT: gl.constexpr = layouts.OUT
    rows, seqlen_kv = own.rows, own.seqlen_kv
    peak, total, out, descale_v = state
    SUM: gl.constexpr = gl.int32 if own.q.dtype == gl.int8 else gl.float32
    no_scores = gl.zeros([ROWS, KEYS], SUM, layout=QK_LAYOUT)
    no_out = gl.zeros([ROWS, how.HEAD_DIM_V], gl.float32, layout=OUT_LAYOUT)
    for i in range(first, end):
        stage, phase = (done + i) % how.STAGES, ((done + i) // how.STAGES) & 1
        start = (own.last - i) * KEYS
        factor, own_v = own.factor, descale_v
        if how.SCALE_BLOCK > 0:
            factor = gl.maximum(factor * gl.load(tensors.DescaleK + start // how.SCALE_BLOCK), _LEAST_SCALE)
            own_v = gl.load(tensors.DescaleV + start // how.SCALE_BLOCK)
        mbarrier.wait(barriers.k_full.index(stage), phase)
        k = tiles.k.index(stage).reshape([KEYS, how.HEAD_DIM_QK]).permute([1, 0])
        qk = as_numbers(warpgroup_mma(own.q, k, no_scores, use_acc=False))
        mbarrier.arrive(barriers.k_empty.index(stage))
        if how.SOFTCAP:
            x = qk * factor
            if tensors.Shift is not None:
                x = x + own.shift[:, None]
            qk = tanh(x)
            factor = own.softcap * LOG2E
        if RIGHT:
            most = gl.minimum(rows + own.band_right, seqlen_kv - 1) - start
            if not how.HAS_RIGHT:
                most = rows * 0 + (seqlen_kv - 1 - start)
            qk = gl.where(up_to(most, QK_LAYOUT), qk, float("-inf"))
        if LEFT:
            qk = gl.where(up_to(rows - own.band_left - 1 - start, QK_LAYOUT), float("-inf"), qk)
        new_peak = gl.maximum(peak, gl.max(qk, 1) * factor)
        weights = gl.exp2(qk * factor - (new_peak - WEIGHT)[:, None])
        decay = gl.exp2(peak - new_peak)
        shared_decay = gl.convert_layout(decay, gl.SliceLayout(1, SHARES), assert_trivial=True)
        total = total * shared_decay[:, None] + shares(weights)
        peak = new_peak
        if how.SCALE_BLOCK > 0:
            decay = decay * quotient(descale_v, own_v)
            descale_v = own_v
        ordered = weights.reshape([ROWS, KEYS // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([ROWS, KEYS])
        ordered = gl.convert_layout(ordered, gl.DotOperandLayout(0, OUT_LAYOUT, k_width=4), assert_trivial=True)
        operand = rounded(ordered, tiles.v)
        mbarrier.wait(barriers.v_full.index(stage), phase)
        v = tiles.v.index(stage).reshape([how.HEAD_DIM_V, KEYS]).permute([1, 0])
        # Summed in float32 after each tile: tensor cores keep some 14 bits.
        part = warpgroup_mma(operand, v, no_out, use_acc=False)
        mbarrier.arrive(barriers.v_empty.index(stage))
        out = out * gl.convert_layout(decay, gl.SliceLayout(1, OUT_LAYOUT), assert_trivial=True)[:, None] + part
    return peak, total, out, descale_v


@gluon.jit
def _queries(
    consumer: gl.constexpr, round_phase, done, tensors, tiles, barriers, work, block, scale, softcap, how: gl.constexpr
):  # fmt: skip
    """Compute 64 queries of one block. tensors: `Fp8Tensors` of its head. done: tiles of all stages before. block: batch, head, first
    query, first tile of keys, number of tiles, and number of keys."""
    batch, head, start, first_tile, count, seqlen_kv = block
    seqlen_q, band_left, band_right = work.seqlen_q, work.band_left, work.band_right
    QK_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 32]
    )
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, how.HEAD_DIM_V, 32]
    )
    ROW: gl.constexpr = gl.SliceLayout(1, QK_LAYOUT)
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, OUT_LAYOUT)
    LAYOUTS: gl.constexpr = Layouts(QK=QK_LAYOUT, OUT=OUT_LAYOUT)
    HAS_SHIFT: gl.constexpr = tensors.Shift is not None
    first_row = start + consumer * ROWS
    rows = first_row + gl.arange(0, ROWS, layout=ROW)
    inside = rows < seqlen_q
    shift = gl.zeros([ROWS], gl.float32, layout=ROW)
    if HAS_SHIFT:
        shift = gl.load(tensors.Shift + rows, mask=inside, other=0.0)
        if how.SOFTCAP:
            shift = shift * (scale / softcap)
    # The factor of q kᵀ for logits in units of log 2, or for tanh's argument; without k's descale where blocks have one.
    scales = first_row // how.SCALE_BLOCK if how.SCALE_BLOCK > 0 else 0
    factor = scale * gl.load(tensors.DescaleQ + scales)
    if how.SCALE_BLOCK == 0:
        factor = factor * gl.load(tensors.DescaleK)
    factor = factor / softcap if how.SOFTCAP else factor * LOG2E
    factor = gl.maximum(factor, _LEAST_SCALE)

    # Tiles from the last one on: those beyond this warpgroup's queries, those on the right edge, those in full, those on the left edge
    # alone, those before all of its queries.
    last, skipped, full = first_tile + count - 1, 0, 0
    if how.HAS_RIGHT:
        own_last = (gl.minimum(gl.maximum(first_row + ROWS + band_right, 1), seqlen_kv) + (KEYS - 1)) // KEYS - 1
        skipped = gl.minimum(gl.maximum(last - own_last, 0), count - 1)
        full = last + 1 - gl.maximum(gl.minimum(first_row + band_right + 1, seqlen_kv), 0) // KEYS
    else:
        full = last + 1 - seqlen_kv // KEYS
    full = gl.minimum(gl.maximum(full, skipped), count)
    edge, end = count, count
    if how.HAS_LEFT:
        end = last + 1 - gl.maximum(first_row - band_left, 0) // KEYS
        end = gl.minimum(gl.maximum(end, skipped), count)
        full = gl.minimum(full, end)
        edge = last + 1 - (gl.maximum(first_row + (ROWS - 1) - band_left, 0) + (KEYS - 1)) // KEYS
        edge = gl.minimum(gl.maximum(edge, full), end)

    peak = gl.full([ROWS], NOTHING, gl.float32, layout=ROW)
    total = gl.zeros([ROWS, 4], gl.float32, layout=SHARES)
    out = gl.zeros([ROWS, how.HEAD_DIM_V], gl.float32, layout=OUT_LAYOUT)
    state = (peak, total, out, gl.load(tensors.DescaleV))
    mbarrier.wait(barriers.q_full.index(consumer), round_phase)
    own = Fp8Warpgroup(
        q=tiles.q.index(consumer).reshape([ROWS, how.HEAD_DIM_QK]), rows=rows, shift=shift, factor=factor, softcap=softcap,
        last=last, band_left=band_left, band_right=band_right, seqlen_kv=seqlen_kv,
    )  # fmt: skip
    _skip(done, done + skipped, barriers, how)
    state = _tiles(done, skipped, full, state, own, tensors, tiles, barriers, True, how.HAS_LEFT, LAYOUTS, how)
    state = _tiles(done, full, edge, state, own, tensors, tiles, barriers, False, False, LAYOUTS, how)
    if how.HAS_LEFT:
        state = _tiles(done, edge, end, state, own, tensors, tiles, barriers, False, True, LAYOUTS, how)
        _skip(done + end, done + count, barriers, how)
    mbarrier.arrive(barriers.q_empty.index(consumer))
    peak, total, out, descale_v = state
    total = gl.convert_layout(gl.sum(total, 1), ROW, assert_trivial=True)

    if HAS_SHIFT and not how.SOFTCAP:
        # The shift is the same for all keys, so it was left out so far. A row without keys has no scores to shift, also where q holds NaN.
        peak = gl.where(total == 0.0, peak, peak + shift * (scale * LOG2E))
    if tensors.Sinks is not None:
        sink = gl.load(tensors.Sinks + head).to(gl.float32) * LOG2E
        with_sink = gl.maximum(peak, sink)
        decay = gl.exp2(peak - with_sink)
        total = total * decay + gl.exp2(sink - with_sink + WEIGHT)
        out = out * gl.convert_layout(decay, OUT_ROW, assert_trivial=True)[:, None]
        peak = with_sink
    empty = total == 0.0
    divisor = gl.where(empty, 1.0, total)
    lse = gl.where(empty, float("-inf"), (peak - WEIGHT) * LN2 + gl.log(divisor))
    gl.store(tensors.Lse + rows, lse, mask=inside)
    out = out * gl.convert_layout(descale_v / divisor, OUT_ROW, assert_trivial=True)[:, None]
    own_tile = tiles.out.index(consumer)
    # Until the output of the block before is stored.
    tma.store_wait(0)
    barrier_of_threads()
    own_tile.reshape([ROWS, how.HEAD_DIM_V]).store(out.to(tiles.out.dtype))
    fence_async_shared()
    async_store(tensors.Out, [batch, head, first_row, 0], own_tile)


@gluon.jit
def _compute(
    consumer: gl.constexpr, tensors, descales, tiles, barriers, work, rounds, scale, softcap, how: gl.constexpr
):  # fmt: skip
    """Compute 64 queries of each block of this program. descales: `DescaleStrides`."""
    done = 0
    for nth in range(rounds):
        is_one, batch, head, head_kv, row, start, first_tile, count, keys = _block(nth, work, how)
        if is_one and start + consumer * ROWS < 0:
            mbarrier.wait(barriers.q_full.index(consumer), nth & 1)
            mbarrier.arrive(barriers.q_empty.index(consumer))
            _skip(done, done + count, barriers, how)
            done += count
        elif is_one:
            of_head = Fp8Tensors(
                Out=tensors.Out,
                Lse=tensors.Lse + row.to(gl.int64) * work.seqlen_q,
                DescaleQ=tensors.DescaleQ + (batch * descales.descale_qb + head * descales.descale_qh),
                DescaleK=tensors.DescaleK + (batch * descales.descale_kb + head_kv * descales.descale_kh),
                DescaleV=tensors.DescaleV + (batch * descales.descale_vb + head_kv * descales.descale_vh),
                Shift=tensors.Shift if tensors.Shift is None else tensors.Shift + row.to(gl.int64) * work.seqlen_q,
                Sinks=tensors.Sinks,
            )
            block = (batch, head, start, first_tile, count, keys)
            _queries(consumer, nth & 1, done, of_head, tiles, barriers, work, block, scale, softcap, how)
            done += count
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["section", "blocks", "heads_of_all", "seqlen_q", "seqlen_kv", "band_left"])
def attention_forward_fp8_sm90(
    Q, K, V, Out, Lse, DescaleQ, DescaleK, DescaleV, Shift, Sinks, Ends,
    stride_descales, heads_q, group, section, blocks, heads_of_all, seqlen_q, seqlen_kv, band_right, scale, softcap, band_left, rows_b,
    HOW: gl.constexpr,
):  # fmt: skip
    """Grid: up to blocks · heads_of_all, for `blocks` blocks of 64 · CONSUMERS queries of each of heads_of_all = B · Hq heads. No more
    programs than run at once; each computes several blocks. num_warps: 4.

    Q, K (FP8 or int8), V, Out: descriptors of logical BHSD (V: BHDS) with tiles of (1, 1, 64, D), (1, 1, 128, D), (1, 1, Dv, 128), (1, 1,
    64, Dv), D and Dv powers of two: reads beyond a tensor are 0, writes there are dropped. Lse: (B, Hq, Sq). Descales, Shift: as in
    quantise.names. Sinks: (Hq,) or None. Ends: int32 (B|1, Sq), the numbers of keys that queries may use, equal for all queries of a
    batch row; or None. scale is positive. section: as in `_block`. HOW: tuples_sm90.py.
    """
    how: gl.constexpr = members(HOW)
    rounds = (blocks * heads_of_all + gl.num_programs(0) - 1) // gl.num_programs(0)
    work = Fp8Work(
        section=section, blocks=blocks, heads_of_all=heads_of_all, heads_q=heads_q, group=group, seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv, band_left=band_left, band_right=band_right, Ends=Ends, rows_b=rows_b,
    )  # fmt: skip
    q_tiles = gl.allocate_shared_memory(K.dtype, [how.CONSUMERS, 1, 1, ROWS, how.HEAD_DIM_QK], K.layout)
    k_tiles = gl.allocate_shared_memory(K.dtype, [how.STAGES, 1, 1, KEYS, how.HEAD_DIM_QK], K.layout)
    v_tiles = gl.allocate_shared_memory(V.dtype, [how.STAGES, 1, 1, how.HEAD_DIM_V, KEYS], V.layout)
    out_tiles = gl.allocate_shared_memory(Out.dtype, [how.CONSUMERS, 1, 1, ROWS, how.HEAD_DIM_V], Out.layout)
    tiles = SharedTiles(q=q_tiles, k=k_tiles, v=v_tiles, out=out_tiles)
    barriers = barriers_of(how.CONSUMERS, how.STAGES, how.CONSUMERS)
    tensors = Fp8Tensors(
        Out=Out, Lse=Lse, DescaleQ=DescaleQ, DescaleK=DescaleK, DescaleV=DescaleV, Shift=Shift, Sinks=Sinks
    )  # fmt: skip
    if how.CONSUMERS == 3:
        gl.warp_specialize(
            [
                (_compute, (0, tensors, stride_descales, tiles, barriers, work, rounds, scale, softcap, how)),
                (_compute, (1, tensors, stride_descales, tiles, barriers, work, rounds, scale, softcap, how)),
                (_compute, (2, tensors, stride_descales, tiles, barriers, work, rounds, scale, softcap, how)),
                (_fetch, (Q, K, V, tiles, barriers, work, rounds, how)),
            ],
            [4, 4, 4],
            [how.REGISTERS, how.REGISTERS, FEW],
        )
    else:
        gl.warp_specialize(
            [
                (_compute, (0, tensors, stride_descales, tiles, barriers, work, rounds, scale, softcap, how)),
                (_compute, (1, tensors, stride_descales, tiles, barriers, work, rounds, scale, softcap, how)),
                (_compute, (2, tensors, stride_descales, tiles, barriers, work, rounds, scale, softcap, how)),
                (_compute, (3, tensors, stride_descales, tiles, barriers, work, rounds, scale, softcap, how)),
                (_fetch, (Q, K, V, tiles, barriers, work, rounds, how)),
            ],
            [4, 4, 4, 4],
            [how.REGISTERS, how.REGISTERS, how.REGISTERS, FEW],
        )
