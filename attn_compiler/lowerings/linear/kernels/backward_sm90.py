"""Gradients of chunks for Hopper, in Gluon, with the delta rule and a decay a head. Words and tensors are those of backward.py.

Tiles with channels of k are turned, (K, C), so that states come from memory in float32 and go to the tensor cores in registers. Two
warpgroups compute gradients of q and k, each for a half of the channels. A third one computes those of pairs of tokens. A fourth one has
the copy engine (TMA) load columns of v ahead.
"""

from __future__ import annotations

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from attn_compiler.lowerings.linear.kernels.tiles_sm90 import (
    add,
    copied,
    decays,
    hand_on,
    leave,
    load_parts,
    number_of,
    parts_of,
    ring,
    room,
    rows_of,
    split,
    tiles_of,
    times,
)
from attn_compiler.lowerings.shared.kernels.releases import members
from attn_compiler.lowerings.shared.kernels.releases_assembler_sm90 import assembled_gluon
from attn_compiler.lowerings.shared.kernels.releases_sm90 import async_load, barrier_of_threads
from attn_compiler.lowerings.shared.kernels.tile_parts import LOG2E

#: columns of v at once; registers of a thread of the pairs' warpgroup, in three parts and in one, and of one that loads
_SLICE, _EXACT, _MANY, _FEW = gl.constexpr(32), gl.constexpr(168), gl.constexpr(184), gl.constexpr(24)

#: Tensors, as descriptors, or addresses of a head's first number. news, dys: u and dy.
_Memory = namedtuple("_Memory", "states afters news dys grad v q k norms sums factors")
#: Buffers in shared memory. numbers: b, a, c in two parts, e b, e a, r a, beta. lower: 1 where i <= j. work: parts of pairs.
_Tiles = namedtuple("_Tiles", "states afters news dys grad v q k numbers sums lower work")
#: Whether a slice, and what a chunk has once, is full, or free to be overwritten.
_Barriers = namedtuple("_Barriers", "full empty side_full side_empty w_full w_empty v_full v_empty")
#: Addresses of a head's first gradients.
_Results = namedtuple("_Results", "q k v g beta")


@gluon.jit
def _keys(to, tiles, barriers, first_chunk, count, length, stride, how: gl.constexpr):
    """Compute the gradients of q and k, and what the other warpgroup needs of them."""
    C: gl.constexpr = how.C
    PARTS: gl.constexpr = how.PARTS
    SLICES: gl.constexpr = how.WV // _SLICE
    KEYS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, C, 16])
    PARTIAL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, _SLICE, 16])  # fmt: skip
    LEFT: gl.constexpr = gl.DotOperandLayout(0, KEYS, k_width=2)
    TOKEN: gl.constexpr = gl.SliceLayout(0, KEYS)
    none = gl.zeros([how.WK, C], gl.float32, layout=KEYS)
    numbers = tiles.numbers
    for n in range(count):
        token = (first_chunk + n) * C
        # 0, which the compiler cannot know: else it would keep all indices in registers.
        zero = n >> 30
        of_q, of_u, of_dy = none, none, none
        ends = gl.zeros([how.WK], gl.float32, layout=gl.SliceLayout(1, PARTIAL))
        for s in range(SLICES):
            m = n * SLICES + s
            stage = m % how.STAGES
            mbarrier.wait(barriers.full.index(stage), (m // how.STAGES) & 1)
            state = copied(tiles.states.index(stage), PARTIAL)
            ends += gl.sum(state * copied(tiles.afters.index(stage), PARTIAL), 1)
            parts = parts_of(state, KEYS, PARTS)
            of_q = add(parts, tiles_of(tiles.grad, stage, 1, True), of_q, PARTS, 1, PARTS)
            of_dy = add(parts, tiles_of(tiles.dys, stage, PARTS, True), of_dy, PARTS, PARTS, PARTS)
            parts = parts_of(copied(tiles.afters.index(stage), PARTIAL), KEYS, PARTS)
            of_u = add(parts, tiles_of(tiles.news, stage, PARTS, True), of_u, PARTS, PARTS, PARTS)
            hand_on(barriers.empty.index(stage))
        mbarrier.wait(barriers.side_full.index(0), n & 1)
        mbarrier.wait(barriers.v_empty.index(0), (n & 1) ^ 1)
        tiles.sums.slice(4 * C, how.WK).store(ends)
        tiles.sums.slice(0, C).store(gl.sum(copied(tiles.q.permute([1, 0]), KEYS) * of_q, 0))
        tiles.sums.slice(C, C).store(gl.sum(copied(tiles.k.permute([1, 0]), KEYS) * of_dy, 0))
        tiles.sums.slice(2 * C, C).store(gl.sum(copied(tiles.k.permute([1, 0]), KEYS) * of_u, 0))
        barrier_of_threads()
        mbarrier.arrive(barriers.v_full.index(0))
        early = gl.exp2(numbers.slice(2 * C, C).load(TOKEN) * LOG2E)
        dq = of_q * early[None, :]
        early = early * numbers.slice(7 * C, C).load(TOKEN)
        end, least = number_of(numbers.slice(3 * C - 1, 1), 8), number_of(numbers.slice(4 * C - 1, 1), 8)
        late = (end - numbers.slice(2 * C, C).load(TOKEN)) + (least - numbers.slice(3 * C, C).load(TOKEN))
        dk = of_u * gl.exp2(late * LOG2E)[None, :] - of_dy * early[None, :]
        k = (gl.convert_layout(copied(tiles.k.permute([1, 0]), KEYS), LEFT, assert_trivial=True),)
        q = (gl.convert_layout(copied(tiles.q.permute([1, 0]), KEYS), LEFT, assert_trivial=True),)
        mbarrier.wait(barriers.w_full.index(0), 0)
        dq = times(k, tiles_of(tiles.work, 0, how.OF_ROWS, True), dq, 1, how.OF_ROWS, True)
        dk = times(q, tiles_of(tiles.work, 1, how.OF_ROWS, False), dk, 1, how.OF_ROWS, True)
        dq, dk = warpgroup_mma_wait(0, deps=(dq, dk))
        hand_on(barriers.w_empty.index(0))
        # Not before q and k have come: the copy engine would write over what is being read.
        mbarrier.arrive(barriers.side_empty.index(0))
        d = gl.arange(0, how.WK, layout=gl.SliceLayout(1, KEYS)) + zero
        t = gl.arange(0, C, layout=TOKEN) + zero
        at = (token + t[None, :]).to(gl.int64) * stride + d[:, None]
        is_in = (token + t[None, :] < length) & (d[:, None] >= 0)
        gl.store(to.q + at, dq, mask=is_in)
        mbarrier.wait(barriers.w_full.index(0), 1)
        dk = times(k, tiles_of(tiles.work, 0, how.OF_ROWS, True), dk, 1, how.OF_ROWS, True)
        dk = times(k, tiles_of(tiles.work, 1, how.OF_ROWS, False), dk, 1, how.OF_ROWS, True)
        dk = warpgroup_mma_wait(0, deps=(dk,))
        barrier_of_threads()
        mbarrier.arrive(barriers.w_empty.index(0))
        gl.store(to.k + at, dk, mask=is_in)


@gluon.jit
def _pairs(to, tiles, barriers, first_chunk, count, length, stride_v, stride_g, how: gl.constexpr):
    """Compute the gradients of pairs of tokens, of v, of g and of beta."""
    C: gl.constexpr = how.C
    PARTS: gl.constexpr = how.PARTS
    SLICES: gl.constexpr = how.WV // _SLICE
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C, 16])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    CHANNELS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    LEFT: gl.constexpr = gl.SliceLayout(1, PAIRS)
    RIGHT: gl.constexpr = gl.SliceLayout(0, PAIRS)
    none = gl.zeros([C, C], gl.float32, layout=PAIRS)
    first, second = gl.arange(0, C, layout=LEFT), gl.arange(0, C, layout=RIGHT)
    tiles.lower.store(gl.where(first[:, None] <= second[None, :], 1.0, none).to(gl.bfloat16))
    numbers = tiles.numbers
    for n in range(count):
        token = (first_chunk + n) * C
        zero = n >> 30
        r = gl.arange(0, C, layout=gl.SliceLayout(1, ROWS)) + zero
        e = gl.arange(0, _SLICE, layout=gl.SliceLayout(0, ROWS))
        dp, dl = none, none
        of_beta = gl.zeros([C], gl.float32, layout=gl.SliceLayout(1, ROWS))
        mbarrier.wait(barriers.side_full.index(0), n & 1)
        of_row = numbers.slice(7 * C, C).load(gl.SliceLayout(1, ROWS))
        for s in range(SLICES):
            m = n * SLICES + s
            stage = m % how.STAGES
            mbarrier.wait(barriers.full.index(stage), (m // how.STAGES) & 1)
            us = tiles_of(tiles.news, stage, PARTS, True)
            of_p = times(tiles_of(tiles.grad, stage, 1, False), us, dp, 1, PARTS, PARTS < 3)
            # The gradient of v, and beta's part of it.
            dy = copied(tiles.dys.index(stage * PARTS), ROWS).to(gl.float32)
            for p in gl.static_range(PARTS - 1):
                dy = dy + copied(tiles.dys.index(stage * PARTS + p + 1), ROWS)
            of_beta += gl.sum(dy * copied(tiles.v.index(stage), ROWS), 1)
            at = (token + r[:, None]).to(gl.int64) * stride_v + s * _SLICE + e[None, :]
            is_in = (token + r[:, None] < length) & (e[None, :] >= 0)
            gl.store(to.v + at, (dy * of_row[:, None]).to(to.v.dtype.element_ty), mask=is_in)
            of_p = warpgroup_mma_wait(0, deps=(of_p,))
            dp = of_p + dp if PARTS == 3 else of_p
            dl = add(tiles_of(tiles.dys, stage, PARTS, False), us, dl, PARTS, PARTS, PARTS)
            hand_on(barriers.empty.index(stage))
        i, j = gl.arange(0, C, layout=LEFT) + zero, gl.arange(0, C, layout=RIGHT) + zero
        is_seen, is_before = i[:, None] >= j[None, :], i[:, None] > j[None, :]
        decay = decays(numbers.slice(2 * C, 2 * C), is_seen, LEFT, RIGHT, C)
        dp = gl.where(is_seen, dp * decay, 0.0)
        dl = gl.where(is_before, -dl * decay, 0.0)
        b_i, a_i, a_j = numbers.slice(0, C).load(LEFT), numbers.slice(C, C).load(LEFT), numbers.slice(C, C).load(RIGHT)
        leave(split(dp * a_j[None, :], how.OF_ROWS), tiles.work, 0, how.OF_ROWS)
        leave(split(dp * b_i[:, None], how.OF_ROWS), tiles.work, how.OF_ROWS, how.OF_ROWS)
        hand_on(barriers.w_full.index(0))
        beta_i = numbers.slice(7 * C, C).load(LEFT)
        pairs = times((tiles.q,), (tiles.k.permute([1, 0]),), none, 1, 1, False)
        pairs = warpgroup_mma_wait(0, deps=(pairs,))
        both = gl.where(is_before, dp * pairs * (b_i[:, None] * a_j[None, :]), 0.0)
        lower = times((tiles.k,), (tiles.k.permute([1, 0]),), none, 1, 1, False)
        lower = warpgroup_mma_wait(0, deps=(lower,))
        lower = dl * lower * (a_i[:, None] * a_j[None, :])
        dbeta = gl.sum(lower, 1)
        both = both + lower * beta_i[:, None]
        dl = dl * beta_i[:, None]
        eb_j, ra_j = numbers.slice(4 * C, C).load(RIGHT), numbers.slice(6 * C, C).load(RIGHT)
        ea_i, beta_j = numbers.slice(5 * C, C).load(LEFT), numbers.slice(7 * C, C).load(RIGHT)
        end, ea_j = number_of(numbers.slice(3 * C - 1, 1)), numbers.slice(5 * C, C).load(RIGHT)
        hand_on(barriers.side_empty.index(0))
        mbarrier.wait(barriers.w_empty.index(0), 0)
        leave(split(dl * a_j[None, :], how.OF_ROWS), tiles.work, 0, how.OF_ROWS)
        leave(split(dl * a_i[:, None], how.OF_ROWS), tiles.work, how.OF_ROWS, how.OF_ROWS)
        hand_on(barriers.w_full.index(0))
        mbarrier.wait(barriers.v_full.index(0), n & 1)
        lost = tiles.sums.slice(C, C)
        dc = tiles.sums.slice(0, C).load(RIGHT) * eb_j - lost.load(RIGHT) * ea_j * beta_j
        kept = tiles.sums.slice(2 * C, C).load(RIGHT) * ra_j
        dbeta = dbeta - lost.load(LEFT) * ea_i + gl.convert_layout(of_beta, LEFT)
        dend = gl.sum(tiles.sums.slice(4 * C, how.WK).load(CHANNELS), 0)
        barrier_of_threads()
        mbarrier.arrive(barriers.v_empty.index(0))
        mbarrier.wait(barriers.w_empty.index(0), 1)
        is_good = gl.abs(both) < float("inf")
        leave(split(gl.where(is_good, both, 0.0), PARTS), tiles.work, 0, PARTS)
        tiles.work.index(PARTS).store(gl.where(is_good, 0.0, none + 1.0).to(gl.bfloat16))
        fence_async_shared()
        barrier_of_threads()
        sums = times((tiles.lower,), tiles_of(tiles.work, 0, PARTS, False), none, 1, PARTS, False)
        spoiled = times((tiles.lower,), (tiles.work.index(PARTS),), none, 1, 1, False)
        sums, spoiled = warpgroup_mma_wait(0, deps=(sums, spoiled))
        sums = gl.where(spoiled > 0.0, float("nan"), sums)
        # A decay lies between all tokens before it and all others of the chunk.
        dg = gl.sum(gl.where(is_before, sums + kept[None, :], gl.where(i[:, None] <= j[None, :], dc[None, :], 0.0)), 1)
        dg = dg + dend * gl.exp2(end * LOG2E)
        at = (token + i).to(gl.int64) * stride_g
        gl.store(to.g + at, dg.to(to.g.dtype.element_ty), mask=token + i < length)
        gl.store(to.beta + at, dbeta.to(to.beta.dtype.element_ty), mask=token + i < length)
        barrier_of_threads()


@gluon.jit
def _fetch(memory, tiles, barriers, first_chunk, count, how: gl.constexpr):
    """Load slices ahead."""
    NUMBERS: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    C: gl.constexpr = how.C
    PARTS: gl.constexpr = how.PARTS
    SLICES: gl.constexpr = how.WV // _SLICE
    BYTES: gl.constexpr = 2 * memory.states.block_type.nbytes + (2 * PARTS + 2) * memory.v.block_type.nbytes
    few, many = gl.arange(0, 2 * C, layout=NUMBERS), gl.arange(0, 4 * C, layout=NUMBERS)
    for n in range(count):
        chunk = first_chunk + n
        for s in range(SLICES):
            m = n * SLICES + s
            stage = m % how.STAGES
            full, column = barriers.full.index(stage), s * _SLICE
            mbarrier.wait(barriers.empty.index(stage), ((m // how.STAGES) & 1) ^ 1)
            mbarrier.expect(full, BYTES)
            async_load(memory.states, [chunk * how.WK, column], full, tiles.states.index(stage))
            async_load(memory.grad, [chunk * C, column], full, tiles.grad.index(stage))
            load_parts(memory.dys, chunk, full, tiles.dys, stage, PARTS, PARTS, C, column)
            async_load(memory.v, [chunk * C, column], full, tiles.v.index(stage))
            async_load(memory.afters, [chunk * how.WK, column], full, tiles.afters.index(stage))
            load_parts(memory.news, chunk, full, tiles.news, stage, PARTS, PARTS, C, column)
            # What a chunk has once is read until it ends, so slices of the next one go before.
            if s == how.STAGES - 1:
                norms, sums = (
                    gl.load(memory.norms + (chunk * 2 * C + few)),
                    gl.load(memory.sums + (chunk * 2 * C + few)),
                )
                factors = gl.load(memory.factors + (chunk * 5 * C + many))
                side = barriers.side_full.index(0)
                mbarrier.wait(barriers.side_empty.index(0), (n & 1) ^ 1)
                mbarrier.expect(side, 2 * memory.q.block_type.nbytes)
                async_load(memory.q, [chunk * C, 0], side, tiles.q)
                async_load(memory.k, [chunk * C, 0], side, tiles.k)
                tiles.numbers.slice(0, 2 * C).store(norms)
                tiles.numbers.slice(2 * C, 2 * C).store(sums)
                tiles.numbers.slice(4 * C, 4 * C).store(factors)
                barrier_of_threads()
                mbarrier.arrive(side)


@assembled_gluon(do_not_specialize=["length", "chunks", "pieces", "of_piece"])
def head_gradients_sm90(
    Q, K, V, Grad, Sums, Norms, Factors, States, Afters, Values, Grad_values, Part_q, Part_k, Grad_v, Part_g, Part_beta,
    heads, group, length, chunks, pieces, of_piece, q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, HOW: gl.constexpr,
):  # fmt: skip
    """Grid: (pieces B H,); a program has `of_piece` chunks. num_warps: 8. Operands: those of `head_gradients`, in bfloat16, with rows of
    whole vectors. Values, Grad_values: in parts. Part_g, Part_beta: (B, S, H)."""
    how: gl.constexpr = members(HOW)
    C: gl.constexpr = how.C
    WK: gl.constexpr = how.WK
    WV: gl.constexpr = how.WV
    PARTS: gl.constexpr = how.PARTS
    STAGES: gl.constexpr = how.STAGES
    row, piece = (gl.program_id(0) // pieces).to(gl.int64), gl.program_id(0) % pieces
    batch, head, at = row // heads, row % heads, row * chunks
    first_chunk = piece * of_piece
    count = gl.minimum(first_chunk + of_piece, chunks) - first_chunk
    planes = chunks * PARTS * C
    of_v = (batch * length * heads + head) * WV
    memory = _Memory(
        states=rows_of(States + at * WK * WV, chunks * WK, WV, WK, WV, _SLICE),
        afters=rows_of(Afters + at * WK * WV, chunks * WK, WV, WK, WV, _SLICE),
        news=rows_of(Values + at * PARTS * C * WV, planes, WV, C, WV, _SLICE),
        dys=rows_of(Grad_values + at * PARTS * C * WV, planes, WV, C, WV, _SLICE),
        grad=rows_of(Grad + of_v, length, heads * WV, C, WV, _SLICE),
        v=rows_of(V + batch * v_b + head * v_h, length, v_s, C, WV, _SLICE),
        q=rows_of(Q + batch * q_b + head // group * q_h, length, q_s, C, WK, WK),
        k=rows_of(K + batch * k_b + head // group * k_h, length, k_s, C, WK, WK),
        norms=Norms + at * 2 * C, sums=Sums + at * 2 * C, factors=Factors + at * 5 * C,
    )  # fmt: skip
    NUMBERS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PAIRS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    tiles = _Tiles(
        states=room(memory.states, STAGES, WK, _SLICE), afters=room(memory.afters, STAGES, WK, _SLICE),
        news=room(memory.news, STAGES * PARTS, C, _SLICE), dys=room(memory.dys, STAGES * PARTS, C, _SLICE),
        grad=room(memory.grad, STAGES, C, _SLICE), v=room(memory.v, STAGES, C, _SLICE),
        q=room(memory.q, 1, C, WK).index(0), k=room(memory.k, 1, C, WK).index(0),
        numbers=gl.allocate_shared_memory(gl.float32, [8 * C], NUMBERS),
        sums=gl.allocate_shared_memory(gl.float32, [8 * C], NUMBERS),
        lower=gl.allocate_shared_memory(gl.bfloat16, [C, C], PAIRS),
        work=gl.allocate_shared_memory(gl.bfloat16, [max(2 * how.OF_ROWS, PARTS + 1), C, C], PAIRS),
    )  # fmt: skip
    barriers = _Barriers(
        full=ring(STAGES, 1), empty=ring(STAGES, 2), side_full=ring(1, 2), side_empty=ring(1, 2),
        w_full=ring(1, 1), w_empty=ring(1, 1), v_full=ring(1, 1), v_empty=ring(1, 1),
    )  # fmt: skip
    fence_async_shared()
    to_k, to_g = (batch * length * heads + head) * WK, batch * length * heads + head
    to = _Results(q=Part_q + to_k, k=Part_k + to_k, v=Grad_v + of_v, g=Part_g + to_g, beta=Part_beta + to_g)
    gl.warp_specialize(
        [
            (_keys, (to, tiles, barriers, first_chunk, count, length, heads * WK, how)),
            (_pairs, (to, tiles, barriers, first_chunk, count, length, heads * WV, heads, how)),
            (_fetch, (memory, tiles, barriers, first_chunk, count, how)),
        ],
        [4, 1], [_EXACT if PARTS == 3 else _MANY, _FEW],
    )  # fmt: skip
