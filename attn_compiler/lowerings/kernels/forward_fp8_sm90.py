"""Attention forward on FP8 tensors for Hopper, in Gluon: a band, softcap, sinks. Its numbers are those of forward_fp8.py, which says why.

One warpgroup has the copy engine (TMA) fetch tiles of keys and values, three compute 64 queries each: while one waits for its products,
the others' softmax has the arithmetic units. With the products of one warpgroup overlapped as well, as in FlashAttention-3
(https://arxiv.org/abs/2407.08608), registers suffice for two of them, which was slower: on an H200, S 8192, causal and full, 775 and 815
TFLOP/s at head dim 128 instead of 809 and 958, 501 and 583 at 64 instead of 553 and 621.

Weights become the operand of the next product where they are: v lies in the order that each thread has them in (fp8_rounding.in_order).
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

#: of Triton 3.7, else of 3.6
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
#: log2 of what weights are rounded at: forward_fp8.WEIGHT
WEIGHT = gl.constexpr(8.0)
#: queries of a warpgroup: what its tensor cores take at once
ROWS = gl.constexpr(64)
#: warpgroups that compute
CONSUMERS = gl.constexpr(3)
#: A maximum of nothing. Finite, so that differences are.
_NOTHING = gl.constexpr(-1e30)
#: Added and taken away again, it leaves a whole number, the nearest and of two the even one.
_WHOLE = gl.constexpr(12582912.0)
#: Never 0, which -inf would turn into NaN.
_LEAST_SCALE = gl.constexpr(1e-30)
#: registers of a thread that only fetches
_FEW = gl.constexpr(24)


@gluon.jit
def _fetch(
    Q, K, V, tiles, barriers, batch, head, head_kv, start, last, count,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The queries of every warpgroup, then tiles of keys and values, the last ones first."""
    _, k_tiles, v_tiles, _, q_given = tiles
    q_full, k_full, k_empty, v_full, v_empty = barriers
    for consumer in gl.static_range(CONSUMERS):
        full = q_full.index(consumer)
        mbarrier.expect(full, Q.block_type.nbytes)
        tma.async_copy_global_to_shared(Q, [batch, head, start + consumer * ROWS, 0], full, q_given.index(consumer))
    for i in range(count):
        stage, phase = i % STAGES, (i // STAGES) & 1
        first = (last - i) * BLOCK_N
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        mbarrier.expect(k_full.index(stage), K.block_type.nbytes)
        tma.async_copy_global_to_shared(K, [batch, head_kv, first, 0], k_full.index(stage), k_tiles.index(stage))
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        mbarrier.expect(v_full.index(stage), V.block_type.nbytes)
        tma.async_copy_global_to_shared(V, [batch, head_kv, 0, first], v_full.index(stage), v_tiles.index(stage))


@gluon.jit
def _tanh(x):
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _not_before(x):
    """x, each thread's own: not known before the product that was waited for. Comparisons with it are made while another product runs
    otherwise, and kept in bits that have to be taken apart again."""
    asm: gl.constexpr = "shfl.sync.bfly.b32 $0, $1, 0, 31, -1;"
    return gl.inline_asm_elementwise(asm, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _skip(first, end, barriers, STAGES: gl.constexpr):
    """Tiles that only other warpgroups use, but every one has to let go."""
    _, k_full, k_empty, v_full, v_empty = barriers
    for i in range(first, end):
        stage, phase = i % STAGES, (i // STAGES) & 1
        mbarrier.wait(k_full.index(stage), phase)
        mbarrier.arrive(k_empty.index(stage))
        mbarrier.wait(v_full.index(stage), phase)
        mbarrier.arrive(v_empty.index(stage))


@gluon.jit
def _tiles(
    first, end, state, q, tiles, barriers, DescaleK, DescaleV, last, rows, shift, factor, softcap, band_left, band_right,
    seqlen_kv, HEAD_DIM_QK: gl.constexpr, HEAD_DIM_V: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    SCALE_BLOCK: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr,
    HAS_SHIFT: gl.constexpr, MASKED: gl.constexpr, ROUND_Q: gl.constexpr, QK_LAYOUT: gl.constexpr, OUT_LAYOUT: gl.constexpr,
):  # fmt: skip
    """The online softmax over the tiles from `first` to `end`, counted from the last one.

    state: maximum and sum of each row, the output, and v's descale that it is in units of.
    """
    _, k_tiles, v_tiles, _, _ = tiles
    _, k_full, k_empty, v_full, v_empty = barriers
    peak, total, out, descale_v = state
    SUM: gl.constexpr = gl.int32 if q.dtype == gl.int8 else gl.float32
    no_scores = gl.zeros([ROWS, BLOCK_N], SUM, layout=QK_LAYOUT)
    no_out = gl.zeros([ROWS, HEAD_DIM_V], gl.float32, layout=OUT_LAYOUT)
    for i in range(first, end):
        stage, phase = i % STAGES, (i // STAGES) & 1
        start = (last - i) * BLOCK_N
        own, own_v = factor, descale_v
        if SCALE_BLOCK > 0 and not ROUND_Q:
            own = gl.maximum(factor * gl.load(DescaleK + start // SCALE_BLOCK), _LEAST_SCALE)
            own_v = gl.load(DescaleV + start // SCALE_BLOCK)
        mbarrier.wait(k_full.index(stage), phase)
        k = k_tiles.index(stage).reshape([BLOCK_N, HEAD_DIM_QK]).permute([1, 0])
        product = warpgroup_mma(q, k, no_scores, use_acc=False, is_async=ROUND_Q)
        if ROUND_Q:
            # While the product runs, which was faster where q is rounded here (hopper_fp8.py says where).
            if SCALE_BLOCK > 0:
                own = gl.maximum(factor * gl.load(DescaleK + start // SCALE_BLOCK), _LEAST_SCALE)
                own_v = gl.load(DescaleV + start // SCALE_BLOCK)
            product = warpgroup_mma_wait(0, deps=(product,))
        qk = product.to(gl.float32)
        mbarrier.arrive(k_empty.index(stage))
        if SOFTCAP:
            x = qk * (own[:, None] if ROUND_Q else own)
            if HAS_SHIFT:
                x = x + shift[:, None]
            qk = _tanh(x)
            own = softcap * LOG2E
        if MASKED:
            keys = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, QK_LAYOUT))[None, :]
            most = gl.minimum(rows + band_right, seqlen_kv - 1) - start
            if not HAS_RIGHT:
                most = rows * 0 + (seqlen_kv - 1 - start)
            allowed = keys <= _not_before(most)[:, None]
            if HAS_LEFT:
                allowed = allowed & (keys >= _not_before(rows - band_left - start)[:, None])
            qk = gl.where(allowed, qk, float("-inf"))
        new_peak = gl.maximum(peak, gl.max(qk, 1) * own)
        weights = gl.exp2(qk * (own[:, None] if ROUND_Q and not SOFTCAP else own) - (new_peak - WEIGHT)[:, None])
        decay = gl.exp2(peak - new_peak)
        total = total * decay + gl.sum(weights, 1)
        peak = new_peak
        if SCALE_BLOCK > 0:
            decay = decay * (descale_v / own_v)
            descale_v = own_v
        ordered = weights.reshape([ROWS, BLOCK_N // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([ROWS, BLOCK_N])
        operand = gl.convert_layout(
            ordered.to(v_tiles.dtype), gl.DotOperandLayout(0, OUT_LAYOUT, k_width=4), assert_trivial=True
        )
        mbarrier.wait(v_full.index(stage), phase)
        v = v_tiles.index(stage).reshape([HEAD_DIM_V, BLOCK_N]).permute([1, 0])
        # Summed in float32 after each tile: tensor cores keep some 14 bits.
        part = warpgroup_mma(operand, v, no_out, use_acc=False)
        mbarrier.arrive(v_empty.index(stage))
        out = out * gl.convert_layout(decay, gl.SliceLayout(1, OUT_LAYOUT), assert_trivial=True)[:, None] + part
    return peak, total, out, descale_v


@gluon.jit
def _round_queries(q, given, HEAD_DIM_QK: gl.constexpr, ROW: gl.constexpr):
    """A warpgroup's, from where the copy engine put them. Gives each row's descale."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD_DIM_QK, 16]
    )
    LARGEST: gl.constexpr = 127.0 if q.dtype == gl.int8 else (448.0 if q.dtype == gl.float8e4nv else 57344.0)
    x = given.load(LAYOUT).to(gl.float32)
    largest = gl.max(gl.abs(x), 1)
    scale = LARGEST / largest
    scale = gl.where((largest > 0.0) & (scale < float("inf")), scale, 1.0)
    y = x * scale[:, None]
    if q.dtype == gl.int8:
        y = gl.where(gl.abs(x) < float("inf"), y, 0.0) + _WHOLE - _WHOLE
    q.store(y.to(q.dtype))
    fence_async_shared()
    # Here, or the compiler puts one before each product.
    _barrier()
    return gl.convert_layout(1.0 / scale, ROW, assert_trivial=True)


@gluon.jit
def _compute(
    consumer: gl.constexpr, Out, Lse, DescaleQ, DescaleK, DescaleV, Shift, Sinks, tiles, barriers,
    batch, head, lse_row, start, last, count, scale, softcap, band_left, band_right, seqlen_q, seqlen_kv,
    HEAD_DIM_QK: gl.constexpr, HEAD_DIM_V: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    SCALE_BLOCK: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr,
    ROUND_Q: gl.constexpr,
):  # fmt: skip
    """64 queries of one head."""
    QK_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 32]
    )
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD_DIM_V, 32]
    )
    ROW: gl.constexpr = gl.SliceLayout(1, QK_LAYOUT)
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, OUT_LAYOUT)
    HAS_SHIFT: gl.constexpr = Shift is not None
    q_tiles, _, _, out_tiles, q_given = tiles
    q_full, _, _, _, _ = barriers
    first_row = start + consumer * ROWS
    rows = first_row + gl.arange(0, ROWS, layout=ROW)
    inside = rows < seqlen_q
    shift = gl.zeros([ROWS], gl.float32, layout=ROW)
    if HAS_SHIFT:
        shift = gl.load(Shift + lse_row + rows, mask=inside, other=0.0)
        if SOFTCAP:
            shift = shift * (scale / softcap)
    # What q kᵀ is multiplied by for logits in units of log 2, or for tanh's argument; up to k's descale where blocks have one.
    block = gl.minimum(first_row, seqlen_q - 1) // SCALE_BLOCK if SCALE_BLOCK > 0 and not ROUND_Q else 0
    factor = scale * gl.load(DescaleQ + block)
    if SCALE_BLOCK == 0:
        factor = factor * gl.load(DescaleK)
    factor = factor / softcap if SOFTCAP else factor * LOG2E
    if not ROUND_Q:
        factor = gl.maximum(factor, _LEAST_SCALE)

    # Tiles from the last one on: those beyond this warpgroup's queries, those with a mask, those in full, those with a left edge.
    skipped, full, edge = 0, 0, count
    if HAS_RIGHT:
        own_last = (gl.minimum(gl.maximum(first_row + ROWS + band_right, 1), seqlen_kv) + (BLOCK_N - 1)) // BLOCK_N - 1
        skipped = gl.minimum(gl.maximum(last - own_last, 0), count - 1)
        full = last + 1 - gl.maximum(gl.minimum(first_row + band_right + 1, seqlen_kv), 0) // BLOCK_N
    else:
        full = last + 1 - seqlen_kv // BLOCK_N
    full = gl.minimum(gl.maximum(full, skipped), count)
    if HAS_LEFT:
        first_full = (gl.maximum(first_row + (ROWS - 1) - band_left, 0) + (BLOCK_N - 1)) // BLOCK_N
        edge = gl.minimum(gl.maximum(last + 1 - first_full, full), count)

    peak = gl.full([ROWS], _NOTHING, gl.float32, layout=ROW)
    total = gl.zeros([ROWS], gl.float32, layout=ROW)
    out = gl.zeros([ROWS, HEAD_DIM_V], gl.float32, layout=OUT_LAYOUT)
    state = (peak, total, out, gl.load(DescaleV))
    mbarrier.wait(q_full.index(consumer), 0)
    q = q_tiles.index(consumer).reshape([ROWS, HEAD_DIM_QK])
    if ROUND_Q:
        descales = _round_queries(q, q_given.index(consumer).reshape([ROWS, HEAD_DIM_QK]), HEAD_DIM_QK, ROW)
        factor = gl.maximum(descales * factor, _LEAST_SCALE)
    _skip(0, skipped, barriers, STAGES)
    state = _tiles(
        skipped, full, state, q, tiles, barriers, DescaleK, DescaleV, last, rows, shift, factor, softcap,
        band_left, band_right, seqlen_kv, HEAD_DIM_QK, HEAD_DIM_V, BLOCK_N, STAGES,
        SCALE_BLOCK, HAS_LEFT, HAS_RIGHT, SOFTCAP, HAS_SHIFT, True, ROUND_Q, QK_LAYOUT, OUT_LAYOUT,
    )  # fmt: skip
    state = _tiles(
        full, edge, state, q, tiles, barriers, DescaleK, DescaleV, last, rows, shift, factor, softcap,
        band_left, band_right, seqlen_kv, HEAD_DIM_QK, HEAD_DIM_V, BLOCK_N, STAGES,
        SCALE_BLOCK, HAS_LEFT, HAS_RIGHT, SOFTCAP, HAS_SHIFT, False, ROUND_Q, QK_LAYOUT, OUT_LAYOUT,
    )  # fmt: skip
    if HAS_LEFT:
        state = _tiles(
            edge, count, state, q, tiles, barriers, DescaleK, DescaleV, last, rows, shift, factor, softcap,
            band_left, band_right, seqlen_kv, HEAD_DIM_QK, HEAD_DIM_V, BLOCK_N, STAGES,
            SCALE_BLOCK, HAS_LEFT, HAS_RIGHT, SOFTCAP, HAS_SHIFT, True, ROUND_Q, QK_LAYOUT, OUT_LAYOUT,
        )  # fmt: skip
    peak, total, out, descale_v = state

    if HAS_SHIFT and not SOFTCAP:
        # Of all keys the same, so it was left out so far.
        peak = peak + shift * (scale * LOG2E)
    if Sinks is not None:
        sink = gl.load(Sinks + head).to(gl.float32) * LOG2E
        with_sink = gl.maximum(peak, sink)
        decay = gl.exp2(peak - with_sink)
        total = total * decay + gl.exp2(sink - with_sink + WEIGHT)
        out = out * gl.convert_layout(decay, OUT_ROW, assert_trivial=True)[:, None]
        peak = with_sink
    empty = total == 0.0
    divisor = gl.where(empty, 1.0, total)
    lse = gl.where(empty, float("-inf"), (peak - WEIGHT) * LN2 + gl.log(divisor))
    gl.store(Lse + lse_row + rows, lse, mask=inside)
    out = out * gl.convert_layout(descale_v / divisor, OUT_ROW, assert_trivial=True)[:, None]
    own_tile = out_tiles.index(consumer)
    own_tile.reshape([ROWS, HEAD_DIM_V]).store(out.to(out_tiles.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(Out, [batch, head, first_row, 0], own_tile)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["section", "blocks", "heads_of_all"])
def attention_forward_fp8_sm90(
    Q, K, V, Out, Lse, DescaleQ, DescaleK, DescaleV, Shift, Sinks,
    descale_qb, descale_qh, descale_kb, descale_kh, descale_vb, descale_vh,
    heads_q, group, section, blocks, heads_of_all, seqlen_q, seqlen_kv, band_left, band_right, scale, softcap,
    HEAD_DIM_QK: gl.constexpr, HEAD_DIM_V: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    SCALE_BLOCK: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid: (blocks · heads_of_all,): `blocks` blocks of 192 queries, heads_of_all = B · Hq. num_warps: 4.

    `section` heads take turns block by block before the next ones do: their keys and values should fit the L2 cache.
    Q, K (FP8 or int8), V, Out: descriptors of logical BHSD (V: BHDS) with tiles of (1, 1, 64, D), (1, 1, BLOCK_N, D),
    (1, 1, Dv, BLOCK_N), (1, 1, 64, Dv), D and Dv powers of two: what is beyond a tensor is 0, or not written. Q may have Out's dtype: it
    is rounded here then, each row by a scale of its own. Lse: (B, Hq, Sq). Descales, Shift: as in forward_fp8.py. Sinks: (Hq,) or None.
    scale is positive. REGISTERS: of a thread that computes.
    """
    # Later blocks have more keys under a causal mask: they go first, so that the last programs to run are short.
    nth, within = gl.program_id(0) // (section * blocks), gl.program_id(0) % (section * blocks)
    together = gl.minimum(section, heads_of_all - nth * section)
    block = blocks - 1 - within // together
    row = nth * section + within % together
    head, batch = row % heads_q, row // heads_q
    head_kv = head // group
    start = block * (ROWS * CONSUMERS)
    ROUND_Q: gl.constexpr = Q.dtype != K.dtype
    q_tiles = gl.allocate_shared_memory(K.dtype, [CONSUMERS, 1, 1, ROWS, HEAD_DIM_QK], K.layout)
    k_tiles = gl.allocate_shared_memory(K.dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM_QK], K.layout)
    v_tiles = gl.allocate_shared_memory(V.dtype, [STAGES, 1, 1, HEAD_DIM_V, BLOCK_N], V.layout)
    out_tiles = gl.allocate_shared_memory(Out.dtype, [CONSUMERS, 1, 1, ROWS, HEAD_DIM_V], Out.layout)
    if not ROUND_Q:
        q_given = q_tiles
    elif HEAD_DIM_QK == HEAD_DIM_V:
        # The output is written long after they were read.
        q_given = out_tiles
    else:
        q_given = gl.allocate_shared_memory(Q.dtype, [CONSUMERS, 1, 1, ROWS, HEAD_DIM_QK], Q.layout)
    tiles = (q_tiles, k_tiles, v_tiles, out_tiles, q_given)
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    fence_async_shared()
    barriers = (q_full, k_full, k_empty, v_full, v_empty)

    end = seqlen_kv
    if HAS_RIGHT:
        # One tile at least, even if none of its keys is allowed.
        end = gl.minimum(end, gl.maximum(start + ROWS * CONSUMERS + band_right, 1))
    first = 0
    if HAS_LEFT:
        first = gl.maximum(gl.minimum(start - band_left, end - 1), 0) // BLOCK_N
    last = (end + (BLOCK_N - 1)) // BLOCK_N - 1
    count = last + 1 - first

    DescaleQ += batch * descale_qb + head * descale_qh
    DescaleK += batch * descale_kb + head_kv * descale_kh
    DescaleV += batch * descale_vb + head_kv * descale_vh
    lse_row = row.to(gl.int64) * seqlen_q
    gl.warp_specialize(
        [
            (_compute, (
                0, Out, Lse, DescaleQ, DescaleK, DescaleV, Shift, Sinks, tiles, barriers, batch, head, lse_row, start, last,
                count, scale, softcap, band_left, band_right, seqlen_q, seqlen_kv, HEAD_DIM_QK, HEAD_DIM_V, BLOCK_N,
                STAGES, SCALE_BLOCK, HAS_LEFT, HAS_RIGHT, SOFTCAP, ROUND_Q,
            )),
            (_compute, (
                1, Out, Lse, DescaleQ, DescaleK, DescaleV, Shift, Sinks, tiles, barriers, batch, head, lse_row, start, last,
                count, scale, softcap, band_left, band_right, seqlen_q, seqlen_kv, HEAD_DIM_QK, HEAD_DIM_V, BLOCK_N,
                STAGES, SCALE_BLOCK, HAS_LEFT, HAS_RIGHT, SOFTCAP, ROUND_Q,
            )),
            (_compute, (
                2, Out, Lse, DescaleQ, DescaleK, DescaleV, Shift, Sinks, tiles, barriers, batch, head, lse_row, start, last,
                count, scale, softcap, band_left, band_right, seqlen_q, seqlen_kv, HEAD_DIM_QK, HEAD_DIM_V, BLOCK_N,
                STAGES, SCALE_BLOCK, HAS_LEFT, HAS_RIGHT, SOFTCAP, ROUND_Q,
            )),
            (_fetch, (Q, K, V, tiles, barriers, batch, head, head_kv, start, last, count, BLOCK_N, STAGES)),
        ],
        [4, 4, 4],
        [REGISTERS, REGISTERS, _FEW],
    )  # fmt: skip
