"""Attention forward on FP8 tensors for Hopper, in Gluon: a band, softcap, sinks. Its numbers are those of forward_fp8.py, which says why.

As FlashAttention-3 (https://arxiv.org/abs/2407.08608): one warpgroup has the copy engine (TMA) fetch tiles, the others compute 64 queries
each. Of one tile of keys the scores are multiplied while the weights of the tile before, which have been rounded, are multiplied with v;
between warpgroups softmax and products overlap. Triton's own language keeps products and softmax in turn.

Weights become the operand of the next product where they are: v lies in the order that each thread has them in (fp8_rounding.in_order).
Four of them are one word, since between iterations Triton would take bytes apart.
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

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
#: log2 of what weights are rounded at: forward_fp8.WEIGHT
WEIGHT = gl.constexpr(8.0)
#: queries of a warpgroup: what its tensor cores take at once
ROWS = gl.constexpr(64)
#: A maximum of nothing. Finite, so that differences are.
_NOTHING = gl.constexpr(-1e30)
#: Never 0, which -inf would turn into NaN.
_LEAST_SCALE = gl.constexpr(1e-30)
#: registers of a thread that only fetches
_FEW = gl.constexpr(24)


@gluon.jit
def _fetch(
    Q, K, V, tiles, barriers, batch, head, head_kv, start, last, count,
    BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The queries of every warpgroup, then tiles of keys and values, the last ones first."""
    q_tiles, k_tiles, v_tiles, _ = tiles
    q_full, k_full, k_empty, v_full, v_empty = barriers
    for consumer in gl.static_range(CONSUMERS):
        full = q_full.index(consumer)
        mbarrier.expect(full, Q.block_type.nbytes)
        tma.async_copy_global_to_shared(Q, [batch, head, start + consumer * ROWS, 0], full, q_tiles.index(consumer))
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
def _words(x, E4M3: gl.constexpr):
    """Of each four elements that a thread has the first becomes a word of all four, in FP8."""
    if E4M3:
        words = gl.inline_asm_elementwise(
            "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $5, $4; cvt.rn.satfinite.e4m3x2.f32 b, $7, $6; "
            "mov.b32 $0, {a, b}; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; }",
            "=r,=r,=r,=r,f,f,f,f", [x], dtype=gl.int32, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        words = gl.inline_asm_elementwise(
            "{ .reg .b16 a, b; cvt.rn.satfinite.e5m2x2.f32 a, $5, $4; cvt.rn.satfinite.e5m2x2.f32 b, $7, $6; "
            "mov.b32 $0, {a, b}; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; }",
            "=r,=r,=r,=r,f,f,f,f", [x], dtype=gl.int32, is_pure=True, pack=4,
        )  # fmt: skip
    return words


@gluon.jit
def _operand(words, LAYOUT: gl.constexpr, E4M3: gl.constexpr):
    """The inverse of `_words`, as tensor cores take it."""
    if E4M3:
        x = gl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r,r,r,r", [words], dtype=gl.float8e4nv, is_pure=True, pack=4
        )
    else:
        x = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [words], dtype=gl.float8e5, is_pure=True, pack=4)
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def _masked(
    qk, first, first_row, rows, band_left, band_right, seqlen_kv,
    BLOCK_N: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """-inf where a key is not allowed. Most tiles have no such key, which costs a comparison."""
    is_partial = first + BLOCK_N > seqlen_kv
    if HAS_RIGHT:
        is_partial = is_partial | (first + (BLOCK_N - 1) > first_row + band_right)
    if HAS_LEFT:
        is_partial = is_partial | (first < first_row + (ROWS - 1) - band_left)
    if is_partial:
        keys = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
        if HAS_RIGHT:
            most = gl.minimum(rows + band_right, seqlen_kv - 1) - first
            qk = gl.where(keys[None, :] <= most[:, None], qk, float("-inf"))
        else:
            qk = gl.where((keys < seqlen_kv - first)[None, :], qk, float("-inf"))
        if HAS_LEFT:
            least = rows - band_left - first
            qk = gl.where(keys[None, :] >= least[:, None], qk, float("-inf"))
    return qk


@gluon.jit
def _softmax(qk, peak, total, factor, BLOCK_N: gl.constexpr, E4M3: gl.constexpr):
    """One tile of the online softmax: its weights as words in v's order, the new maximum and sum, and what sums so far shrink by."""
    new_peak = gl.maximum(peak, gl.max(qk, 1) * factor)
    weights = gl.exp2(qk * factor - (new_peak - WEIGHT)[:, None])
    decay = gl.exp2(peak - new_peak)
    total = total * decay + gl.sum(weights, 1)
    ordered = weights.reshape([ROWS, BLOCK_N // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([ROWS, BLOCK_N])
    return _words(ordered, E4M3), new_peak, total, decay


@gluon.jit
def _compute(
    consumer: gl.constexpr, Out, Lse, DescaleK, DescaleV, Shift, Sinks, tiles, barriers,
    batch, head, lse_row, start, last, count, factor, scale, softcap, band_left, band_right, seqlen_q, seqlen_kv,
    HEAD_DIM_QK: gl.constexpr, HEAD_DIM_V: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    SCALE_BLOCK: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """64 queries of one head. factor: what q kᵀ is multiplied by for logits in units of log 2, up to k's descale where blocks have one.

    Under a softcap it is what leads to tanh's argument.
    """
    QK_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 32]
    )
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD_DIM_V, 32]
    )
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT_LAYOUT, k_width=4)
    ROW: gl.constexpr = gl.SliceLayout(1, QK_LAYOUT)
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, OUT_LAYOUT)
    q_tiles, k_tiles, v_tiles, out_tiles = tiles
    q_full, k_full, k_empty, v_full, v_empty = barriers
    E4M3: gl.constexpr = v_tiles.dtype == gl.float8e4nv
    q = q_tiles.index(consumer).reshape([ROWS, HEAD_DIM_QK])
    first_row = start + consumer * ROWS
    rows = first_row + gl.arange(0, ROWS, layout=ROW)
    inside = rows < seqlen_q
    shift = gl.zeros([ROWS], gl.float32, layout=ROW)
    if Shift is not None:
        shift = gl.load(Shift + lse_row + rows, mask=inside, other=0.0)
    peak = gl.full([ROWS], _NOTHING, gl.float32, layout=ROW)
    total = gl.zeros([ROWS], gl.float32, layout=ROW)
    decay = total
    out = gl.zeros([ROWS, HEAD_DIM_V], gl.float32, layout=OUT_LAYOUT)
    SUM: gl.constexpr = gl.int32 if q_tiles.dtype == gl.int8 else gl.float32
    no_scores = gl.zeros([ROWS, BLOCK_N], SUM, layout=QK_LAYOUT)
    no_out = gl.zeros([ROWS, HEAD_DIM_V], gl.float32, layout=OUT_LAYOUT)
    weights = gl.zeros([ROWS, BLOCK_N], gl.int32, layout=QK_LAYOUT)
    # Of the newest tile that was multiplied, in which units sums are kept; and of the one before.
    descale_v, descale_before = 1.0, 1.0
    mbarrier.wait(q_full.index(consumer), 0)

    # The first tile has no weights before it.
    own = factor
    if SCALE_BLOCK > 0:
        own = gl.maximum(factor * gl.load(DescaleK + last * BLOCK_N // SCALE_BLOCK), _LEAST_SCALE)
        descale_v = gl.load(DescaleV + last * BLOCK_N // SCALE_BLOCK)
        descale_before = descale_v
    mbarrier.wait(k_full.index(0), 0)
    k = k_tiles.index(0).reshape([BLOCK_N, HEAD_DIM_QK]).permute([1, 0])
    qk = warpgroup_mma(q, k, no_scores, use_acc=False).to(gl.float32)
    mbarrier.arrive(k_empty.index(0))
    if SOFTCAP:
        x = qk * own
        if Shift is not None:
            x = x + (shift * (scale / softcap))[:, None]
        qk = _tanh(x)
        own = softcap * LOG2E
    qk = _masked(
        qk, last * BLOCK_N, first_row, rows, band_left, band_right, seqlen_kv, BLOCK_N, HAS_LEFT, HAS_RIGHT, QK_LAYOUT
    )
    weights, peak, total, decay = _softmax(qk, peak, total, own, BLOCK_N, E4M3)

    for i in range(1, count):
        stage, phase = i % STAGES, (i // STAGES) & 1
        before, phase_before = (i - 1) % STAGES, ((i - 1) // STAGES) & 1
        tile = last - i
        own, next_descale_v = factor, 1.0
        if SCALE_BLOCK > 0:
            own = gl.maximum(factor * gl.load(DescaleK + tile * BLOCK_N // SCALE_BLOCK), _LEAST_SCALE)
            next_descale_v = gl.load(DescaleV + tile * BLOCK_N // SCALE_BLOCK)
        mbarrier.wait(k_full.index(stage), phase)
        k = k_tiles.index(stage).reshape([BLOCK_N, HEAD_DIM_QK]).permute([1, 0])
        qk_later = warpgroup_mma(q, k, no_scores, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before), phase_before)
        v = v_tiles.index(before).reshape([HEAD_DIM_V, BLOCK_N]).permute([1, 0])
        # Summed in float32 after each tile: tensor cores keep some 14 bits.
        part_later = warpgroup_mma(_operand(weights, WEIGHTS, E4M3), v, no_out, use_acc=False, is_async=True)
        qk = warpgroup_mma_wait(1, deps=(qk_later,))
        mbarrier.arrive(k_empty.index(stage))
        qk = qk.to(gl.float32)
        if SOFTCAP:
            x = qk * own
            if Shift is not None:
                x = x + (shift * (scale / softcap))[:, None]
            qk = _tanh(x)
            own = softcap * LOG2E
        qk = _masked(
            qk, tile * BLOCK_N, first_row, rows, band_left, band_right, seqlen_kv,
            BLOCK_N, HAS_LEFT, HAS_RIGHT, QK_LAYOUT,
        )  # fmt: skip
        new_weights, peak, total, new_decay = _softmax(qk, peak, total, own, BLOCK_N, E4M3)
        part = warpgroup_mma_wait(0, deps=(part_later,))
        mbarrier.arrive(v_empty.index(before))
        if SCALE_BLOCK > 0:
            decay = decay * (descale_before / descale_v)
        out = out * gl.convert_layout(decay, OUT_ROW, assert_trivial=True)[:, None] + part
        weights, decay, descale_before, descale_v = new_weights, new_decay, descale_v, next_descale_v

    before = (count - 1) % STAGES
    mbarrier.wait(v_full.index(before), ((count - 1) // STAGES) & 1)
    v = v_tiles.index(before).reshape([HEAD_DIM_V, BLOCK_N]).permute([1, 0])
    part = warpgroup_mma(_operand(weights, WEIGHTS, E4M3), v, no_out, use_acc=False)
    if SCALE_BLOCK > 0:
        decay = decay * (descale_before / descale_v)
    out = out * gl.convert_layout(decay, OUT_ROW, assert_trivial=True)[:, None] + part

    if Shift is not None and not SOFTCAP:
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
    share = (descale_v if SCALE_BLOCK > 0 else gl.load(DescaleV)) / divisor
    out = out * gl.convert_layout(share, OUT_ROW, assert_trivial=True)[:, None]
    own_tile = out_tiles.index(consumer)
    own_tile.reshape([ROWS, HEAD_DIM_V]).store(out.to(out_tiles.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(Out, [batch, head, first_row, 0], own_tile)
    tma.store_wait(0)


@gluon.jit
def attention_forward_fp8_sm90(
    Q, K, V, Out, Lse, DescaleQ, DescaleK, DescaleV, Shift, Sinks,
    descale_qb, descale_qh, descale_kb, descale_kh, descale_vb, descale_vh,
    heads_q, group, seqlen_q, seqlen_kv, band_left, band_right, scale, softcap,
    HEAD_DIM_QK: gl.constexpr, HEAD_DIM_V: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    SCALE_BLOCK: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid: (blocks of 128 queries, Hq, B). num_warps: 4.

    Q, K (FP8 or int8), V, Out: descriptors of logical BHSD (V: BHDS) with tiles of (1, 1, 64, D), (1, 1, BLOCK_N, D),
    (1, 1, Dv, BLOCK_N), (1, 1, 64, Dv), D and Dv powers of two: what is beyond a tensor is 0, or not written. Lse: (B, Hq, Sq).
    Descales, Shift: as in forward_fp8.py. Sinks: (Hq,) or None. scale is positive. REGISTERS: of a thread that computes.
    """
    CONSUMERS: gl.constexpr = 2
    # Later blocks have more keys under a causal mask: they go first, so that the last programs to run are short.
    block = gl.num_programs(0) - 1 - gl.program_id(0)
    head, batch = gl.program_id(1), gl.program_id(2)
    head_kv = head // group
    start = block * (ROWS * CONSUMERS)
    tiles = (
        gl.allocate_shared_memory(Q.dtype, [CONSUMERS, 1, 1, ROWS, HEAD_DIM_QK], Q.layout),
        gl.allocate_shared_memory(K.dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM_QK], K.layout),
        gl.allocate_shared_memory(V.dtype, [STAGES, 1, 1, HEAD_DIM_V, BLOCK_N], V.layout),
        gl.allocate_shared_memory(Out.dtype, [CONSUMERS, 1, 1, ROWS, HEAD_DIM_V], Out.layout),
    )
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

    DescaleK += batch * descale_kb + head_kv * descale_kh
    DescaleV += batch * descale_vb + head_kv * descale_vh
    factor = scale * gl.load(
        DescaleQ + batch * descale_qb + head * descale_qh + (start // SCALE_BLOCK if SCALE_BLOCK > 0 else 0)
    )
    if SCALE_BLOCK == 0:
        factor = factor * gl.load(DescaleK)
    factor = gl.maximum(factor / softcap if SOFTCAP else factor * LOG2E, _LEAST_SCALE)
    lse_row = (batch.to(gl.int64) * heads_q + head) * seqlen_q
    gl.warp_specialize(
        [
            (_compute, (
                0, Out, Lse, DescaleK, DescaleV, Shift, Sinks, tiles, barriers, batch, head, lse_row, start, last, count,
                factor, scale, softcap, band_left, band_right, seqlen_q, seqlen_kv, HEAD_DIM_QK, HEAD_DIM_V, BLOCK_N,
                STAGES, SCALE_BLOCK, HAS_LEFT, HAS_RIGHT, SOFTCAP,
            )),
            (_compute, (
                1, Out, Lse, DescaleK, DescaleV, Shift, Sinks, tiles, barriers, batch, head, lse_row, start, last, count,
                factor, scale, softcap, band_left, band_right, seqlen_q, seqlen_kv, HEAD_DIM_QK, HEAD_DIM_V, BLOCK_N,
                STAGES, SCALE_BLOCK, HAS_LEFT, HAS_RIGHT, SOFTCAP,
            )),
            (_fetch, (
                Q, K, V, tiles, barriers, batch, head, head_kv, start, last, count, BLOCK_N, CONSUMERS, STAGES,
            )),
        ],
        [4, 4],
        [REGISTERS, _FEW],
    )  # fmt: skip
