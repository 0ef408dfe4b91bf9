"""The pass over states for Hopper, in Gluon. Words and tensors are those of forward.py; tiles are turned, as there.

A chunk has to wait for the state before it, and its outputs wait for nobody's sake. So one warpgroup carries the state from chunk to chunk,
in registers. It leaves parts of S and of u in shared memory, from which another one computes the outputs. A third one has the copy engine
(TMA) load chunks ahead.

The state space's gradients of states are such a pass, too, backwards, with q, do and e b in place of k, v and β r a.
"""

from __future__ import annotations

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from attn_compiler.lowerings.linear.kernels.tiles_sm90 import (
    decays,
    hand_on,
    leave,
    load_parts,
    number_of,
    parts_of,
    ring,
    room,
    rows_of,
    store_parts,
    tiles_of,
    times,
)
from attn_compiler.lowerings.shared.kernels.releases import members
from attn_compiler.lowerings.shared.kernels.releases_assembler_sm90 import assembled_gluon
from attn_compiler.lowerings.shared.kernels.releases_sm90 import async_load, async_store, barrier_of_threads
from attn_compiler.lowerings.shared.kernels.tile_parts import LOG2E

#: columns of v of a program, which a warpgroup's tensor cores take at once
COLUMNS = gl.constexpr(64)
#: registers of a thread that computes outputs, and of one that loads
_MANY, _FEW = gl.constexpr(168), gl.constexpr(24)

#: Tensors, as descriptors, or addresses of a head's first number. early, later: k, or with CHANNEL what is multiplied with S and u.
#: states: with KEEPS, where the state before each chunk goes. out: there, of u, or of those states in bfloat16.
_Memory = namedtuple("_Memory", "early later queries v inverse pairs out factors sums skip head states")
#: Buffers in shared memory. states, news: parts of S and u. firsts: of `first_bad`. decays: of CHANNEL; of the state space, c in two parts.
_Tiles = namedtuple("_Tiles", "early later queries v inverse pairs out factors decays states news firsts")
#: Whether tiles of the state's warpgroup, of the outputs', S and u are full, or free to be overwritten.
_Barriers = namedtuple("_Barriers", "full empty q_full q_empty s_full s_empty u_full u_empty")


@gluon.jit
def _without_bad(u, i, C: gl.constexpr):
    """Return u with 0 for what is not finite, and the first token of each column that is not, or C."""
    is_good = gl.abs(u) < float("inf")
    return gl.where(is_good, u, 0.0), C - gl.max(gl.where(is_good, 0, C - i[None, :]), 1)


@gluon.jit
def _carry(
    First, Last, memory, tiles, barriers, first_chunk, count, column, first_k, first_v, last_k, last_v, is_last, how: gl.constexpr
):  # fmt: skip
    """Carry the state, (columns, K), over chunks."""
    STATE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, how.WK, 16])
    TOKENS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, how.C, 16])
    OF_TOKEN: gl.constexpr = gl.SliceLayout(0, TOKENS)
    OF_KEYS: gl.constexpr = how.PARTS if how.CHANNEL else 1
    d = gl.arange(0, how.WK, layout=gl.SliceLayout(0, STATE))
    e = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, STATE))
    i = gl.arange(0, how.C, layout=OF_TOKEN)
    no_tokens = gl.zeros([COLUMNS, how.C], gl.float32, layout=TOKENS)
    state = gl.zeros([COLUMNS, how.WK], gl.float32, layout=STATE)
    if First is not None:
        state = gl.load(First + (d[None, :] * first_k + e[:, None] * first_v)).to(gl.float32)
    for n in range(count):
        stage, chunk = n % how.STAGES, first_chunk + (count - 1 - n if how.REVERSED else n)
        parts = parts_of(state, TOKENS, how.PARTS)
        mbarrier.wait(barriers.full.index(stage), (n // how.STAGES) & 1)
        factors = tiles.factors.index(stage)
        is_bad = number_of(factors.slice(3 * how.C, 1)) != 0.0
        if how.DELTA:
            seen = times(parts, tiles_of(tiles.early, stage, OF_KEYS, True), no_tokens, how.PARTS, OF_KEYS, False)
        if how.KEEPS and memory.states.dtype.element_ty == gl.bfloat16:
            store_parts(state, memory.out, tiles.out, chunk, column, how.WK, 1)
        elif how.KEEPS:
            at = chunk * (how.WK * how.WV) + column
            gl.store(memory.states + (at + d[None, :] * how.WV + e[:, None]), state)
        else:
            mbarrier.wait(barriers.s_empty.index(0), (n & 1) ^ 1)
            leave(parts, tiles.states, 0, how.OF_OUT)
            hand_on(barriers.s_full.index(0))
        u = tiles.v.index(stage).permute([1, 0]).load(TOKENS).to(gl.float32)
        if how.DELTA:
            seen = warpgroup_mma_wait(0, deps=(seen,))
            if not how.CHANNEL:
                seen = seen * factors.slice(0, how.C).load(OF_TOKEN)[None, :]
            u = u - seen
        u = u * factors.slice(0 if how.REVERSED else 2 * how.C, how.C).load(OF_TOKEN)[None, :]
        if how.DELTA:
            first = gl.full([COLUMNS], how.C, gl.int32, layout=gl.SliceLayout(1, TOKENS))
            if is_bad:
                u, first = _without_bad(u, i, how.C)
            inverse = tiles_of(tiles.inverse, stage, how.PARTS, True)
            u = times(parts_of(u, TOKENS, how.PARTS), inverse, no_tokens, how.PARTS, how.PARTS, False)
            u = warpgroup_mma_wait(0, deps=(u,))
            if is_bad:
                u = gl.where(i[None, :] >= first[:, None], float("nan"), u)
        if how.CHANNEL:
            late = u
            kept = state * tiles.decays.index(stage).load(gl.SliceLayout(0, STATE))[None, :]
        else:
            late = u if how.REVERSED else u * factors.slice(how.C, how.C).load(OF_TOKEN)[None, :]
            kept = state * number_of(factors.slice(3 * how.C + 1, 1))
        keys = tiles_of(tiles.later, stage, OF_KEYS, False)
        state = times(parts_of(late, STATE, how.PARTS), keys, kept, how.PARTS, OF_KEYS, how.PARTS < 3)
        # What the outputs need goes while the tensor cores run.
        if how.KEEPS:
            if how.DELTA:
                store_parts(u, memory.out, tiles.out, chunk, column, how.C, how.PARTS)
            else:
                fence_async_shared()
        else:
            mbarrier.wait(barriers.u_empty.index(0), (n & 1) ^ 1)
            if is_bad:
                u, first_of_u = _without_bad(u, i, how.C)
                tiles.firsts.store(first_of_u)
            leave(parts_of(u, TOKENS, how.OF_OUT), tiles.news, 0, how.OF_OUT)
            hand_on(barriers.u_full.index(0))
        state = warpgroup_mma_wait(0, deps=(state,))
        if how.PARTS == 3:
            state = state + kept
        barrier_of_threads()
        mbarrier.arrive(barriers.empty.index(stage))
    if how.KEEPS:
        tma.store_wait(0)
    if Last is not None:
        if is_last:
            gl.store(Last + (d[None, :] * last_k + e[:, None] * last_v), state.to(Last.dtype.element_ty))


@gluon.jit
def _write(memory, tiles, barriers, token, column, stage, tile, out):
    """Write outputs of a chunk through a tile in shared memory, once those of the chunk before are read."""
    tma.store_wait(0)
    barrier_of_threads()
    mbarrier.arrive(barriers.u_empty.index(0))
    mbarrier.arrive(barriers.q_empty.index(stage))
    tile.store(out.to(tile.dtype))
    fence_async_shared()
    barrier_of_threads()
    async_store(memory.out, [token, column], tiles.out.index(0))


@gluon.jit
def _outputs(memory, tiles, barriers, first_chunk, count, column, how: gl.constexpr):
    """Compute o, (columns, C)."""
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, how.C, 16])
    PARTS: gl.constexpr = how.OF_OUT
    OF_QUERIES: gl.constexpr = PARTS if how.CHANNEL else 1
    i = gl.arange(0, how.C, layout=gl.SliceLayout(0, OUT))
    none = gl.zeros([COLUMNS, how.C], gl.float32, layout=OUT)
    factors = memory.factors + first_chunk * 5 * how.C
    flag, grown = gl.load(factors + 4 * how.C), gl.load(factors + i)
    for n in range(count):
        stage = n % how.STAGES
        is_bad, of_chunk = flag != 0.0, grown
        # A chunk ahead.
        factors = memory.factors + (first_chunk + gl.minimum(n + 1, count - 1)) * 5 * how.C
        flag, grown = gl.load(factors + 4 * how.C), gl.load(factors + i)
        mbarrier.wait(barriers.q_full.index(stage), (n // how.STAGES) & 1)
        mbarrier.wait(barriers.s_full.index(0), n & 1)
        queries = tiles_of(tiles.queries, stage, OF_QUERIES, True)
        out = times(tiles_of(tiles.states, 0, PARTS, False), queries, none, PARTS, OF_QUERIES, False)
        out = warpgroup_mma_wait(0, deps=(out,))
        barrier_of_threads()
        mbarrier.arrive(barriers.s_empty.index(0))
        if not how.CHANNEL:
            out = out * of_chunk[None, :]
        mbarrier.wait(barriers.u_full.index(0), n & 1)
        pairs = tiles_of(tiles.pairs, stage, PARTS, True)
        out = times(tiles_of(tiles.news, 0, PARTS, False), pairs, out, PARTS, PARTS, True)
        out = warpgroup_mma_wait(0, deps=(out,))
        if is_bad:
            out = gl.where(i[None, :] >= tiles.firsts.load(gl.SliceLayout(1, OUT))[:, None], float("nan"), out)
        _write(
            memory, tiles, barriers, (first_chunk + n) * how.C, column, stage, tiles.out.index(0).permute([1, 0]), out
        )
    tma.store_wait(0)


@gluon.jit
def _by_decays(memory, tiles, barriers, first_chunk, count, column, how: gl.constexpr):
    """Compute o, (C, columns), of the state space. P is made of q, k and c, while the state arrives."""
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, how.C, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    COLUMN: gl.constexpr = gl.SliceLayout(0, OUT)
    i, j = gl.arange(0, how.C, layout=ROW)[:, None], gl.arange(0, how.C, layout=COLUMN)[None, :]
    none = gl.zeros([how.C, COLUMNS], gl.float32, layout=OUT)
    for n in range(count):
        stage, phase = n % how.STAGES, (n // how.STAGES) & 1
        mbarrier.wait(barriers.full.index(stage), phase)
        mbarrier.wait(barriers.q_full.index(stage), phase)
        queries = tiles_of(tiles.queries, stage, 1, False)
        pairs = times(queries, tiles_of(tiles.early, stage, 1, True), none, 1, 1, False)
        factors, decay = tiles.factors.index(stage), decays(tiles.decays.index(stage), i >= j, ROW, COLUMN, how.C)
        pairs = warpgroup_mma_wait(0, deps=(pairs,))
        pairs = parts_of(gl.where(i >= j, pairs * decay, 0.0), OUT, how.OF_OUT)
        mbarrier.wait(barriers.s_full.index(0), n & 1)
        out = times(queries, tiles_of(tiles.states, 0, how.OF_OUT, True), none, 1, how.OF_OUT, False)
        out = warpgroup_mma_wait(0, deps=(out,))
        barrier_of_threads()
        mbarrier.arrive(barriers.s_empty.index(0))
        out = out * factors.slice(0, how.C).load(ROW)[:, None]
        mbarrier.wait(barriers.u_full.index(0), n & 1)
        more = times(pairs, tiles_of(tiles.news, 0, how.OF_OUT, True), none, how.OF_OUT, how.OF_OUT, False)
        out = out + warpgroup_mma_wait(0, deps=(more,))
        if number_of(factors.slice(3 * how.C, 1)) != 0.0:
            out = gl.where(i >= tiles.firsts.load(COLUMN)[None, :], float("nan"), out)
        if memory.skip is not None:
            v = tiles.v.index(stage).load(OUT).to(gl.float32)
            out = out + v * gl.load(memory.skip + memory.head).to(gl.float32)
        _write(memory, tiles, barriers, (first_chunk + n) * how.C, column, stage, tiles.out.index(0), out)
        mbarrier.arrive(barriers.empty.index(stage))
    tma.store_wait(0)


@gluon.jit
def _fetch(memory, tiles, barriers, first_chunk, count, column, how: gl.constexpr):
    """Load chunks ahead."""
    NUMBERS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    OF_KEYS: gl.constexpr = how.PARTS if how.CHANNEL else 1
    LATER: gl.constexpr = how.PARTS if how.CHANNEL else 0
    OF_QUERIES: gl.constexpr = how.OF_OUT if how.CHANNEL else 1
    INVERSE: gl.constexpr = how.PARTS if how.DELTA else 0
    OF_PAIRS: gl.constexpr = how.OF_OUT if how.DELTA else 0
    KEYS: gl.constexpr = memory.queries.block_type.nbytes
    SQUARE: gl.constexpr = memory.pairs.block_type.nbytes
    BYTES: gl.constexpr = (OF_KEYS + LATER) * KEYS + INVERSE * SQUARE + memory.v.block_type.nbytes
    WIDTH: gl.constexpr = how.WK if how.CHANNEL else 2 * how.C
    own, d = gl.arange(0, 4 * how.C, layout=NUMBERS), gl.arange(0, WIDTH, layout=NUMBERS)
    for n in range(count):
        stage, phase = n % how.STAGES, (n // how.STAGES) & 1
        full, q_full = barriers.full.index(stage), barriers.q_full.index(stage)
        chunk = first_chunk + (count - 1 - n if how.REVERSED else n)
        factors = gl.load(memory.factors + (chunk * 5 * how.C + how.C + own))
        if how.CHANNEL:
            numbers = gl.exp2(gl.load(memory.sums + (chunk * how.C * how.WK + (how.C - 1) * how.WK + d)) * LOG2E)
        if not how.DELTA:
            numbers = gl.load(memory.sums + (chunk * 2 * how.C + d))
        mbarrier.wait(barriers.empty.index(stage), phase ^ 1)
        mbarrier.expect(full, BYTES)
        load_parts(memory.early, chunk, full, tiles.early, stage, OF_KEYS, OF_KEYS, how.C)
        load_parts(memory.later, chunk, full, tiles.later, stage, LATER, how.PARTS, how.C)
        async_load(memory.v, [chunk * how.C, column], full, tiles.v.index(stage))
        load_parts(memory.inverse, chunk, full, tiles.inverse, stage, INVERSE, how.PARTS, how.C)
        tiles.factors.index(stage).store(factors)
        if how.CHANNEL or not how.DELTA:
            tiles.decays.index(stage).store(numbers)
        barrier_of_threads()
        mbarrier.arrive(full)
        if not how.KEEPS:
            mbarrier.wait(barriers.q_empty.index(stage), phase ^ 1)
            mbarrier.expect(q_full, OF_QUERIES * KEYS + OF_PAIRS * SQUARE)
            load_parts(memory.queries, chunk, q_full, tiles.queries, stage, OF_QUERIES, OF_KEYS, how.C)
            load_parts(memory.pairs, chunk, q_full, tiles.pairs, stage, OF_PAIRS, how.PARTS, how.C)


@assembled_gluon(do_not_specialize=["length", "chunks", "pieces", "of_piece"])
def state_pass_sm90(
    Q, K, V, Skip, Inverse, Pairs, Sums, Factors, Queries, Early, Later, First, Out, Last, States, Values,
    heads, group, length, chunks, pieces, of_piece,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, first_b, first_h, first_k, first_v, first_p, last_k, last_v, HOW: gl.constexpr,
):  # fmt: skip
    """Grid: (V / 64 pieces B H,). num_warps: 4. Operands: those of `state_pass`, in bfloat16, with rows of whole vectors."""
    how: gl.constexpr = members(HOW)
    C: gl.constexpr = how.C
    DIMS: gl.constexpr = how.WK
    PARTS: gl.constexpr = how.PARTS
    STAGES: gl.constexpr = how.STAGES
    OF_KEYS: gl.constexpr = PARTS if how.CHANNEL else 1
    # With it there are states alone.
    BARE: gl.constexpr = how.KEEPS and not how.DELTA
    blocks: gl.constexpr = how.WV // COLUMNS
    column = gl.program_id(0) % blocks * COLUMNS
    row, piece = (gl.program_id(0) // blocks // pieces).to(gl.int64), gl.program_id(0) // blocks % pieces
    batch, head, at = row // heads, row % heads, row * chunks
    first_chunk = piece * of_piece
    count = gl.minimum(first_chunk + of_piece, chunks) - first_chunk
    planes = chunks * PARTS * C
    if how.CHANNEL:
        early = rows_of(Early + at * PARTS * C * DIMS, planes, DIMS, C, DIMS, DIMS)
        later = rows_of(Later + at * PARTS * C * DIMS, planes, DIMS, C, DIMS, DIMS)
        queries = rows_of(Queries + at * PARTS * C * DIMS, planes, DIMS, C, DIMS, DIMS)
    else:
        early = rows_of(K + batch * k_b + head // group * k_h, length, k_s, C, DIMS, DIMS)
        later = early
        queries = early if BARE else rows_of(Q + batch * q_b + head // group * q_h, length, q_s, C, DIMS, DIMS)
    of_inverse, of_pairs = early, early
    if how.DELTA:
        of_pairs = rows_of(Pairs + at * PARTS * C * C, planes, C, C, C, C)
        of_inverse = rows_of(Inverse + at * PARTS * C * C, planes, C, C, C, C)
    of_v = rows_of(V + batch * v_b + head * v_h, length, v_s, C, how.WV, COLUMNS)
    if BARE and PARTS > 1:
        out = of_v
    elif BARE:
        out = rows_of(States + at * DIMS * how.WV, chunks * DIMS, how.WV, DIMS, how.WV, COLUMNS)
    elif how.KEEPS:
        out = rows_of(Values + at * PARTS * C * how.WV, planes, how.WV, C, how.WV, COLUMNS)
    else:
        out = rows_of(Out + (batch * length * heads + head) * how.WV, length, heads * how.WV, C, how.WV, COLUMNS)
    memory = _Memory(
        early=early, later=later, queries=queries, v=of_v, inverse=of_inverse, pairs=of_pairs, out=out,
        factors=Factors + at * 5 * C, sums=Sums + at * (C * DIMS if how.CHANNEL else 2 * C), skip=Skip, head=head,
        states=States + at * DIMS * how.WV if how.KEEPS else None,
    )  # fmt: skip
    NUMBERS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    STATES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLUMNS, DIMS], gl.bfloat16)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLUMNS, C], gl.bfloat16)
    of_keys = room(early, STAGES * OF_KEYS, C, DIMS)
    tiles = _Tiles(
        early=of_keys, later=room(later, STAGES * OF_KEYS, C, DIMS) if how.CHANNEL else of_keys,
        queries=of_keys if BARE else room(queries, STAGES * (how.OF_OUT if how.CHANNEL else 1), C, DIMS),
        v=room(memory.v, STAGES, C, COLUMNS),
        inverse=room(of_inverse, STAGES * PARTS, C, C) if how.DELTA else of_keys,
        pairs=room(of_pairs, STAGES * how.OF_OUT, C, C) if how.DELTA else of_keys,
        out=room(out, PARTS if how.KEEPS else 1, DIMS if BARE else C, COLUMNS) if PARTS == 1 or not BARE else of_keys,
        factors=gl.allocate_shared_memory(gl.float32, [STAGES, 4 * C], NUMBERS),
        decays=gl.allocate_shared_memory(gl.float32, [STAGES, DIMS if how.DELTA else 2 * C], NUMBERS),
        states=of_keys if BARE else gl.allocate_shared_memory(gl.bfloat16, [how.OF_OUT, COLUMNS, DIMS], STATES),
        news=of_keys if BARE else gl.allocate_shared_memory(gl.bfloat16, [how.OF_OUT, COLUMNS, C], VALUES),
        firsts=gl.allocate_shared_memory(gl.int32, [COLUMNS], NUMBERS),
    )  # fmt: skip
    barriers = _Barriers(
        full=ring(STAGES, 2), empty=ring(STAGES, 1 if how.DELTA or BARE else 2), q_full=ring(STAGES, 1), q_empty=ring(STAGES, 1),
        s_full=ring(1, 1), s_empty=ring(1, 1), u_full=ring(1, 1), u_empty=ring(1, 1),
    )  # fmt: skip
    fence_async_shared()
    first, last = First, Last
    if Last is not None:
        last = Last + (row * DIMS * how.WV + column * last_v)
    if First is not None:
        first = First + (batch * first_b + head * first_h + piece * first_p + column * first_v)
    is_last = piece == (0 if how.REVERSED else pieces - 1)
    given = (memory, tiles, barriers, first_chunk, count, column, how)
    own = (
        first, last, memory, tiles, barriers, first_chunk, count, column, first_k, first_v, last_k, last_v, is_last, how
    )  # fmt: skip
    if how.KEEPS:
        gl.warp_specialize([(_carry, own), (_fetch, given)], [4], [_FEW])
    else:
        gl.warp_specialize(
            [(_carry, own), (_outputs if how.DELTA else _by_decays, given), (_fetch, given)], [4, 4], [_MANY, _FEW]
        )
