"""The pass backwards over gradients of states for Hopper, in Gluon. Words and tensors are those of backward.py; tiles are turned.

One warpgroup carries D from chunk to chunk, in registers. Another one computes what does not need D. A third one has the copy engine (TMA)
load chunks ahead.
"""

from __future__ import annotations

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from attn_compiler.lowerings.linear.kernels.forward_sm90 import COLUMNS
from attn_compiler.lowerings.linear.kernels.tiles_sm90 import (
    copied,
    hand_on,
    leave,
    load_parts,
    number_of,
    parts_of,
    ring,
    room,
    rows_of,
    split,
    store_parts,
    tiles_of,
    times,
)
from attn_compiler.lowerings.shared.kernels.releases import members
from attn_compiler.lowerings.shared.kernels.releases_assembler_sm90 import assembled_gluon
from attn_compiler.lowerings.shared.kernels.releases_sm90 import async_load, barrier_of_threads

#: registers of a thread that computes what needs no D, and of one that loads
_MANY, _FEW = gl.constexpr(152), gl.constexpr(24)

#: Tensors, as descriptors, or addresses of a head's first number.
_Memory = namedtuple("_Memory", "keys queries grad inverse pairs dys afters factors")
#: Buffers in shared memory. weighted: parts of b e do. base: Pᵀ do. lasts: of `last_bad`.
_Tiles = namedtuple("_Tiles", "keys queries grad inverse pairs dys factors weighted base lasts")
#: Whether a chunk's tiles, its P, and what the second warpgroup makes are full, or free to be overwritten.
_Barriers = namedtuple("_Barriers", "full empty p_full p_empty made_full made_empty")


@gluon.jit
def _carry(
    Last, First, memory, tiles, barriers, end_chunk, count, column, last_k, last_v, first_k, first_v, is_first, how: gl.constexpr
):  # fmt: skip
    """Carry D, (columns, K), over chunks backwards."""
    C: gl.constexpr = how.C
    PARTS: gl.constexpr = how.PARTS
    STATE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, how.WK, 16])
    TOKENS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C, 16])
    OF_TOKEN: gl.constexpr = gl.SliceLayout(0, TOKENS)
    d = gl.arange(0, how.WK, layout=gl.SliceLayout(0, STATE))
    e = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, STATE))
    i = gl.arange(0, C, layout=OF_TOKEN)
    no_tokens = gl.zeros([COLUMNS, C], gl.float32, layout=TOKENS)
    no_state = gl.zeros([COLUMNS, how.WK], gl.float32, layout=STATE)
    after = gl.load(Last + (d[None, :] * last_k + e[:, None] * last_v)).to(gl.float32)
    for n in range(count):
        stage, chunk = n % how.STAGES, end_chunk - 1 - n
        parts = parts_of(after, TOKENS, PARTS)
        mbarrier.wait(barriers.full.index(stage), (n // how.STAGES) & 1)
        factors = tiles.factors.index(stage)
        seen = times(parts, tiles_of(tiles.keys, stage, 1, True), no_tokens, PARTS, 1, False)
        gl.store(memory.afters + (chunk * (how.WK * how.WV) + column + d[None, :] * how.WV + e[:, None]), after)
        mbarrier.wait(barriers.made_full.index(0), n & 1)
        base, last = tiles.base.load(TOKENS), tiles.lasts.load(gl.SliceLayout(1, TOKENS))
        seen = warpgroup_mma_wait(0, deps=(seen,))
        queries = tiles_of(tiles.queries, stage, 1, False)
        change = times(tiles_of(tiles.weighted, 0, PARTS, False), queries, no_state, PARTS, 1, False)
        du = base + seen * factors.slice(C, C).load(OF_TOKEN)[None, :]
        inverse = tiles_of(tiles.inverse, stage, PARTS, False)
        dx = times(parts_of(du, TOKENS, PARTS), inverse, no_tokens, PARTS, PARTS, False)
        # All but the products of dx.
        change = warpgroup_mma_wait(6 if PARTS == 3 else 1, deps=(change,))
        kept = after * number_of(factors.slice(3 * C + 1, 1)) + change
        dx = warpgroup_mma_wait(0, deps=(dx,))
        hand_on(barriers.made_empty.index(0))
        dx = gl.where(i[None, :] <= last[:, None], float("nan"), dx)
        early = factors.slice(0, C).load(OF_TOKEN) * factors.slice(2 * C, C).load(OF_TOKEN)
        lost = parts_of(-dx * early[None, :], STATE, PARTS)
        change = times(lost, tiles_of(tiles.keys, stage, 1, False), no_state, PARTS, 1, False)
        store_parts(dx, memory.dys, tiles.dys, chunk, column, C, PARTS)
        change = warpgroup_mma_wait(0, deps=(change,))
        after = kept + change
        hand_on(barriers.empty.index(stage))
    tma.store_wait(0)
    if First is not None:
        if is_first:
            gl.store(First + (d[None, :] * first_k + e[:, None] * first_v), after.to(First.dtype.element_ty))


@gluon.jit
def _prepare(tiles, barriers, count, how: gl.constexpr):
    """Compute Pᵀ do, and leave parts of b e do in shared memory."""
    C: gl.constexpr = how.C
    TOKENS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C, 16])
    i = gl.arange(0, C, layout=gl.SliceLayout(0, TOKENS))
    no_tokens = gl.zeros([COLUMNS, C], gl.float32, layout=TOKENS)
    for n in range(count):
        stage = n % how.STAGES
        mbarrier.wait(barriers.full.index(stage), (n // how.STAGES) & 1)
        do = copied(tiles.grad.index(stage).permute([1, 0]), TOKENS).to(gl.float32)
        grown = tiles.factors.index(stage).slice(4 * how.C, how.C).load(gl.SliceLayout(0, TOKENS))
        # A gradient that is not finite reaches no token after its own.
        is_good = gl.abs(do) < float("inf")
        clean = parts_of(gl.where(is_good, do, 0.0), TOKENS, 1)
        last = gl.max(gl.where(is_good, -1, i[None, :]), 1)
        mbarrier.wait(barriers.p_full.index(0), n & 1)
        base = times(clean, tiles_of(tiles.pairs, 0, how.PARTS, False), no_tokens, 1, how.PARTS, False)
        weighted = split(do * grown[None, :], how.PARTS)
        base = warpgroup_mma_wait(0, deps=(base,))
        barrier_of_threads()
        mbarrier.arrive(barriers.p_empty.index(0))
        mbarrier.wait(barriers.made_empty.index(0), (n & 1) ^ 1)
        leave(weighted, tiles.weighted, 0, how.PARTS)
        tiles.base.store(base)
        tiles.lasts.store(last)
        hand_on(barriers.made_full.index(0))


@gluon.jit
def _fetch(memory, tiles, barriers, end_chunk, count, column, how: gl.constexpr):
    """Load chunks ahead."""
    NUMBERS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    C: gl.constexpr = how.C
    SQUARES: gl.constexpr = how.PARTS * memory.pairs.block_type.nbytes
    BYTES: gl.constexpr = 2 * memory.keys.block_type.nbytes + memory.grad.block_type.nbytes + SQUARES
    own, few = gl.arange(0, 4 * C, layout=NUMBERS), gl.arange(0, C, layout=NUMBERS)
    for n in range(count):
        stage, phase, chunk = n % how.STAGES, (n // how.STAGES) & 1, end_chunk - 1 - n
        factors = gl.load(memory.factors + (chunk * 5 * C + C + own))
        grown = gl.load(memory.factors + (chunk * 5 * C + few))
        full = barriers.full.index(stage)
        mbarrier.wait(barriers.empty.index(stage), phase ^ 1)
        mbarrier.expect(full, BYTES)
        async_load(memory.keys, [chunk * C, 0], full, tiles.keys.index(stage))
        async_load(memory.grad, [chunk * C, column], full, tiles.grad.index(stage))
        async_load(memory.queries, [chunk * C, 0], full, tiles.queries.index(stage))
        load_parts(memory.inverse, chunk, full, tiles.inverse, stage, how.PARTS, how.PARTS, C)
        tiles.factors.index(stage).slice(0, 4 * C).store(factors)
        tiles.factors.index(stage).slice(4 * C, C).store(grown)
        barrier_of_threads()
        mbarrier.arrive(full)
        mbarrier.wait(barriers.p_empty.index(0), (n & 1) ^ 1)
        mbarrier.expect(barriers.p_full.index(0), SQUARES)
        load_parts(memory.pairs, chunk, barriers.p_full.index(0), tiles.pairs, 0, how.PARTS, how.PARTS, C)


@assembled_gluon(do_not_specialize=["length", "chunks", "pieces", "of_piece"])
def reverse_pass_sm90(
    Q, K, Grad, Inverse, Pairs, Factors, Grad_last, Afters, Grad_values, Grad_first,
    heads, group, length, chunks, pieces, of_piece,
    q_b, q_s, q_h, k_b, k_s, k_h, last_b, last_h, last_k, last_v, last_p, first_b, first_h, first_k, first_v, HOW: gl.constexpr,
):  # fmt: skip
    """Grid: (V / 64 pieces B H,). num_warps: 4. Operands: those of `reverse_pass`, in bfloat16, with rows of whole vectors. Grad_values: in
    parts."""
    how: gl.constexpr = members(HOW)
    C: gl.constexpr = how.C
    DIMS: gl.constexpr = how.WK
    PARTS: gl.constexpr = how.PARTS
    STAGES: gl.constexpr = how.STAGES
    blocks: gl.constexpr = how.WV // COLUMNS
    column = gl.program_id(0) % blocks * COLUMNS
    row, piece = (gl.program_id(0) // blocks // pieces).to(gl.int64), gl.program_id(0) // blocks % pieces
    batch, head, at = row // heads, row % heads, row * chunks
    end_chunk = gl.minimum(piece * of_piece + of_piece, chunks)
    planes = chunks * PARTS * C
    memory = _Memory(
        keys=rows_of(K + batch * k_b + head // group * k_h, length, k_s, C, DIMS, DIMS),
        queries=rows_of(Q + batch * q_b + head // group * q_h, length, q_s, C, DIMS, DIMS),
        grad=rows_of(Grad + (batch * length * heads + head) * how.WV, length, heads * how.WV, C, how.WV, COLUMNS),
        inverse=rows_of(Inverse + at * PARTS * C * C, planes, C, C, C, C),
        pairs=rows_of(Pairs + at * PARTS * C * C, planes, C, C, C, C),
        dys=rows_of(Grad_values + at * PARTS * C * how.WV, planes, how.WV, C, how.WV, COLUMNS),
        afters=Afters + at * DIMS * how.WV, factors=Factors + at * 5 * C,
    )  # fmt: skip
    NUMBERS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLUMNS, C], gl.bfloat16)
    BASE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLUMNS, C], gl.float32)
    tiles = _Tiles(
        keys=room(memory.keys, STAGES, C, DIMS), queries=room(memory.queries, STAGES, C, DIMS),
        grad=room(memory.grad, STAGES, C, COLUMNS), inverse=room(memory.inverse, STAGES * PARTS, C, C),
        pairs=room(memory.pairs, PARTS, C, C), dys=room(memory.dys, PARTS, C, COLUMNS),
        factors=gl.allocate_shared_memory(gl.float32, [STAGES, 8 * C], NUMBERS),
        weighted=gl.allocate_shared_memory(gl.bfloat16, [PARTS, COLUMNS, C], VALUES),
        base=gl.allocate_shared_memory(gl.float32, [COLUMNS, C], BASE),
        lasts=gl.allocate_shared_memory(gl.int32, [COLUMNS], NUMBERS),
    )  # fmt: skip
    barriers = _Barriers(
        full=ring(STAGES, 2), empty=ring(STAGES, 1), p_full=ring(1, 1), p_empty=ring(1, 1),
        made_full=ring(1, 1), made_empty=ring(1, 1),
    )  # fmt: skip
    fence_async_shared()
    last = Grad_last + (batch * last_b + head * last_h + piece * last_p + column * last_v)
    first, count = Grad_first, end_chunk - piece * of_piece
    if Grad_first is not None:
        first = Grad_first + (batch * first_b + head * first_h + column * first_v)
    own = (last, first, memory, tiles, barriers, end_chunk, count, column, last_k, last_v, first_k, first_v, piece == 0, how)  # fmt: skip
    given = (memory, tiles, barriers, end_chunk, count, column, how)
    gl.warp_specialize([(_carry, own), (_prepare, (tiles, barriers, count, how)), (_fetch, given)], [4, 4], [_MANY, _FEW])  # fmt: skip
