"""The pass over states for Hopper, in Gluon. Words and tensors are those of forward.py; tiles are turned, as there.

A chunk has to wait for the state before it, and its outputs wait for nobody's sake. So one warpgroup carries the state from chunk to chunk,
in registers. It leaves parts of S and of u in shared memory, from which another one computes the outputs. A third one has the copy engine
(TMA) load chunks ahead.
"""

from __future__ import annotations

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attn_compiler.lowerings.shared.kernels.releases import members
from attn_compiler.lowerings.shared.kernels.releases_assembler_sm90 import assembled_gluon
from attn_compiler.lowerings.shared.kernels.releases_sm90 import async_load, async_store, barrier_of_threads
from attn_compiler.lowerings.shared.kernels.tile_parts import LOG2E

#: columns of v of a program, which a warpgroup's tensor cores take at once
COLUMNS = gl.constexpr(64)
#: registers of a thread that computes outputs, and of one that loads
_MANY, _FEW = gl.constexpr(168), gl.constexpr(24)

#: Constants, as in forward.py. STAGES: chunks in shared memory.
PassSwitches = namedtuple("PassSwitches", "C WK WV PARTS OF_OUT DELTA CHANNEL STAGES")
#: Tensors, as descriptors, or addresses of a head's first number. early, later: k, or with CHANNEL what is multiplied with S and u.
_Memory = namedtuple("_Memory", "early later queries v inverse pairs out factors sums skip head")
#: Buffers in shared memory. states, news: parts of S and u. firsts: of `first_bad`. decays: of CHANNEL; of the state space, c in two parts.
_Tiles = namedtuple("_Tiles", "early later queries v inverse pairs out factors decays states news firsts")
#: Whether tiles of the state's warpgroup, of the outputs', S and u are full, or free to be overwritten.
_Barriers = namedtuple("_Barriers", "full empty q_full q_empty s_full s_empty u_full u_empty")


@gluon.constexpr_function
def _pair(left, right, n):
    """Return which parts are multiplied nth, i and j as 4 i + j, or -1: those of `tiles.product`, of three the smallest first."""
    most = max(left, right)
    found = [(i, j) for i in range(left) for j in range(right) if i + j < most]
    if most == 3:
        found.sort(key=lambda pair: -sum(pair))
    return 4 * found[n][0] + found[n][1] if n < len(found) else -1


@gluon.jit
def _product(left, right, to, AT: gl.constexpr, ADDS: gl.constexpr):
    if AT >= 0:
        to = warpgroup_mma(left[AT // 4], right[AT % 4], to, use_acc=ADDS, is_async=True)
    return to


@gluon.jit
def _times(left, right, to, LEFT: gl.constexpr, RIGHT: gl.constexpr, ADDS: gl.constexpr):
    """Start a product of parts; ADDS: on top of `to`."""
    for n in gl.static_range(6):
        to = _product(left, right, to, _pair(LEFT, RIGHT, n), ADDS or n > 0)
    return to


@gluon.jit
def _parts_of(x, LAYOUT: gl.constexpr, PARTS: gl.constexpr):
    """Split a float32 tile into a sum of bfloat16, as left factors. Two numbers at once: the compiler would take pairs apart again."""
    SPLIT: gl.constexpr = (
        "{ .reg .b32 low, high; cvt.rn.bf16x2.f32 $0, $4, $3; shl.b32 low, $0, 16; and.b32 high, $0, 0xffff0000; "
        "sub.f32 $1, $3, low; sub.f32 $2, $4, high; }"
    )
    found = ()
    for _ in gl.static_range(PARTS):
        part, x = gl.inline_asm_elementwise(
            SPLIT, "=r,=f,=f,f,f", [x], dtype=(gl.bfloat16, gl.float32), is_pure=True, pack=2
        )
        found += (gl.convert_layout(part, gl.DotOperandLayout(0, LAYOUT, k_width=2), assert_trivial=True),)
    return found


@gluon.jit
def _tiles_of(tiles, stage, COUNT: gl.constexpr, TURNED: gl.constexpr):
    """Return the parts of a tile in shared memory."""
    found = ()
    for n in gl.static_range(COUNT):
        tile = tiles.index(stage * COUNT + n)
        found += (tile.permute([1, 0]) if TURNED else tile,)
    return found


@gluon.jit
def _hand_over(parts, tiles, full, PARTS: gl.constexpr):
    """Leave parts in shared memory for the tensor cores of the other warpgroup."""
    for n in gl.static_range(PARTS):
        tiles.index(n).store(parts[n])
    fence_async_shared()
    barrier_of_threads()
    mbarrier.arrive(full)


@gluon.jit
def _without_bad(u, i, C: gl.constexpr):
    """Return u with 0 for what is not finite, and the first token of each column that is not, or C."""
    is_good = gl.abs(u) < float("inf")
    return gl.where(is_good, u, 0.0), C - gl.max(gl.where(is_good, 0, C - i[None, :]), 1)


@gluon.jit
def _number(tile):
    return gl.max(tile.load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _carry(First, Last, tiles, barriers, count, first_k, first_v, last_k, last_v, is_last, how: gl.constexpr):
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
        stage = n % how.STAGES
        parts = _parts_of(state, TOKENS, how.PARTS)
        mbarrier.wait(barriers.full.index(stage), (n // how.STAGES) & 1)
        factors = tiles.factors.index(stage)
        is_bad = _number(factors.slice(3 * how.C, 1)) != 0.0
        if how.DELTA:
            seen = _times(parts, _tiles_of(tiles.early, stage, OF_KEYS, True), no_tokens, how.PARTS, OF_KEYS, False)
        mbarrier.wait(barriers.s_empty.index(0), (n & 1) ^ 1)
        _hand_over(parts, tiles.states, barriers.s_full.index(0), how.OF_OUT)
        u = tiles.v.index(stage).permute([1, 0]).load(TOKENS).to(gl.float32)
        if how.DELTA:
            seen = warpgroup_mma_wait(0, deps=(seen,))
            if not how.CHANNEL:
                seen = seen * factors.slice(0, how.C).load(OF_TOKEN)[None, :]
            u = u - seen
        u = u * factors.slice(2 * how.C, how.C).load(OF_TOKEN)[None, :]
        if how.DELTA:
            first = gl.full([COLUMNS], how.C, gl.int32, layout=gl.SliceLayout(1, TOKENS))
            if is_bad:
                u, first = _without_bad(u, i, how.C)
            inverse = _tiles_of(tiles.inverse, stage, how.PARTS, True)
            u = _times(_parts_of(u, TOKENS, how.PARTS), inverse, no_tokens, how.PARTS, how.PARTS, False)
            u = warpgroup_mma_wait(0, deps=(u,))
            if is_bad:
                u = gl.where(i[None, :] >= first[:, None], float("nan"), u)
        if how.CHANNEL:
            late = u
            kept = state * tiles.decays.index(stage).load(gl.SliceLayout(0, STATE))[None, :]
        else:
            late = u * factors.slice(how.C, how.C).load(OF_TOKEN)[None, :]
            kept = state * _number(factors.slice(3 * how.C + 1, 1))
        keys = _tiles_of(tiles.later, stage, OF_KEYS, False)
        state = _times(_parts_of(late, STATE, how.PARTS), keys, kept, how.PARTS, OF_KEYS, how.PARTS < 3)
        # What the outputs need goes while the tensor cores run.
        mbarrier.wait(barriers.u_empty.index(0), (n & 1) ^ 1)
        if is_bad:
            u, first_of_u = _without_bad(u, i, how.C)
            tiles.firsts.store(first_of_u)
        _hand_over(_parts_of(u, TOKENS, how.OF_OUT), tiles.news, barriers.u_full.index(0), how.OF_OUT)
        state = warpgroup_mma_wait(0, deps=(state,))
        if how.PARTS == 3:
            state = state + kept
        barrier_of_threads()
        mbarrier.arrive(barriers.empty.index(stage))
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
    async_store(memory.out, [token, column], tiles.out)


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
        queries = _tiles_of(tiles.queries, stage, OF_QUERIES, True)
        out = _times(_tiles_of(tiles.states, 0, PARTS, False), queries, none, PARTS, OF_QUERIES, False)
        out = warpgroup_mma_wait(0, deps=(out,))
        barrier_of_threads()
        mbarrier.arrive(barriers.s_empty.index(0))
        if not how.CHANNEL:
            out = out * of_chunk[None, :]
        mbarrier.wait(barriers.u_full.index(0), n & 1)
        pairs = _tiles_of(tiles.pairs, stage, PARTS, True)
        out = _times(_tiles_of(tiles.news, 0, PARTS, False), pairs, out, PARTS, PARTS, True)
        out = warpgroup_mma_wait(0, deps=(out,))
        if is_bad:
            out = gl.where(i[None, :] >= tiles.firsts.load(gl.SliceLayout(1, OUT))[:, None], float("nan"), out)
        _write(memory, tiles, barriers, (first_chunk + n) * how.C, column, stage, tiles.out.permute([1, 0]), out)
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
        queries = _tiles_of(tiles.queries, stage, 1, False)
        pairs = _times(queries, _tiles_of(tiles.early, stage, 1, True), none, 1, 1, False)
        factors, sums = tiles.factors.index(stage), tiles.decays.index(stage)
        c, less = sums.slice(0, how.C), sums.slice(how.C, how.C)
        decay = (c.load(ROW)[:, None] - c.load(COLUMN)[None, :]) + (
            less.load(ROW)[:, None] - less.load(COLUMN)[None, :]
        )
        decay = gl.exp2(gl.where(i >= j, decay, 0.0) * LOG2E)
        pairs = warpgroup_mma_wait(0, deps=(pairs,))
        pairs = _parts_of(gl.where(i >= j, pairs * decay, 0.0), OUT, how.OF_OUT)
        mbarrier.wait(barriers.s_full.index(0), n & 1)
        out = _times(queries, _tiles_of(tiles.states, 0, how.OF_OUT, True), none, 1, how.OF_OUT, False)
        out = warpgroup_mma_wait(0, deps=(out,))
        barrier_of_threads()
        mbarrier.arrive(barriers.s_empty.index(0))
        out = out * factors.slice(0, how.C).load(ROW)[:, None]
        mbarrier.wait(barriers.u_full.index(0), n & 1)
        more = _times(pairs, _tiles_of(tiles.news, 0, how.OF_OUT, True), none, how.OF_OUT, how.OF_OUT, False)
        out = out + warpgroup_mma_wait(0, deps=(more,))
        if _number(factors.slice(3 * how.C, 1)) != 0.0:
            out = gl.where(i >= tiles.firsts.load(COLUMN)[None, :], float("nan"), out)
        if memory.skip is not None:
            v = tiles.v.index(stage).load(OUT).to(gl.float32)
            out = out + v * gl.load(memory.skip + memory.head).to(gl.float32)
        _write(memory, tiles, barriers, (first_chunk + n) * how.C, column, stage, tiles.out, out)
        mbarrier.arrive(barriers.empty.index(stage))
    tma.store_wait(0)


@gluon.jit
def _load_parts(memory, chunk, barrier, tiles, stage, COUNT: gl.constexpr, PARTS: gl.constexpr, C: gl.constexpr):
    """Load the first parts of a tile of a chunk, which has PARTS of them in memory."""
    for n in gl.static_range(COUNT):
        async_load(memory, [(chunk * PARTS + n) * C, 0], barrier, tiles.index(stage * COUNT + n))


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
        chunk = first_chunk + n
        factors = gl.load(memory.factors + (chunk * 5 * how.C + how.C + own))
        if how.CHANNEL:
            decays = gl.exp2(gl.load(memory.sums + (chunk * how.C * how.WK + (how.C - 1) * how.WK + d)) * LOG2E)
        if not how.DELTA:
            decays = gl.load(memory.sums + (chunk * 2 * how.C + d))
        mbarrier.wait(barriers.empty.index(stage), phase ^ 1)
        mbarrier.expect(full, BYTES)
        _load_parts(memory.early, chunk, full, tiles.early, stage, OF_KEYS, OF_KEYS, how.C)
        _load_parts(memory.later, chunk, full, tiles.later, stage, LATER, how.PARTS, how.C)
        async_load(memory.v, [chunk * how.C, column], full, tiles.v.index(stage))
        _load_parts(memory.inverse, chunk, full, tiles.inverse, stage, INVERSE, how.PARTS, how.C)
        tiles.factors.index(stage).store(factors)
        if how.CHANNEL or not how.DELTA:
            tiles.decays.index(stage).store(decays)
        barrier_of_threads()
        mbarrier.arrive(full)
        mbarrier.wait(barriers.q_empty.index(stage), phase ^ 1)
        mbarrier.expect(q_full, OF_QUERIES * KEYS + OF_PAIRS * SQUARE)
        _load_parts(memory.queries, chunk, q_full, tiles.queries, stage, OF_QUERIES, OF_KEYS, how.C)
        _load_parts(memory.pairs, chunk, q_full, tiles.pairs, stage, OF_PAIRS, how.PARTS, how.C)


@gluon.jit
def _rows_of(X, length, stride, SIZE: gl.constexpr, DIMS: gl.constexpr, TILE: gl.constexpr):
    """Describe rows of one head. Reads beyond them are 0, and writes do nothing."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SIZE, TILE], X.dtype.element_ty)
    return tma.make_tensor_descriptor(X, [length, DIMS], [stride, 1], [SIZE, TILE], LAYOUT)


@gluon.jit
def _room(of, COUNT: gl.constexpr, SIZE: gl.constexpr, WIDTH: gl.constexpr):
    """Allocate tiles of a descriptor."""
    return gl.allocate_shared_memory(of.dtype, [COUNT, SIZE, WIDTH], of.layout)


@gluon.jit
def _ring(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Make barriers."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(COUNT):
        mbarrier.init(barriers.index(n), count=ARRIVALS)
    return barriers


@assembled_gluon(do_not_specialize=["length", "chunks", "pieces", "of_piece"])
def state_pass_sm90(
    Q, K, V, Skip, Inverse, Pairs, Sums, Factors, Queries, Early, Later, First, Out, Last,
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
    blocks: gl.constexpr = how.WV // COLUMNS
    column = gl.program_id(0) % blocks * COLUMNS
    row, piece = (gl.program_id(0) // blocks // pieces).to(gl.int64), gl.program_id(0) // blocks % pieces
    batch, head, at = row // heads, row % heads, row * chunks
    first_chunk = piece * of_piece
    count = gl.minimum(first_chunk + of_piece, chunks) - first_chunk
    planes = chunks * PARTS * C
    if how.CHANNEL:
        early = _rows_of(Early + at * PARTS * C * DIMS, planes, DIMS, C, DIMS, DIMS)
        later = _rows_of(Later + at * PARTS * C * DIMS, planes, DIMS, C, DIMS, DIMS)
        queries = _rows_of(Queries + at * PARTS * C * DIMS, planes, DIMS, C, DIMS, DIMS)
    else:
        early = _rows_of(K + batch * k_b + head // group * k_h, length, k_s, C, DIMS, DIMS)
        later = early
        queries = _rows_of(Q + batch * q_b + head // group * q_h, length, q_s, C, DIMS, DIMS)
    of_inverse, of_pairs = early, early
    if how.DELTA:
        of_pairs = _rows_of(Pairs + at * PARTS * C * C, planes, C, C, C, C)
        of_inverse = _rows_of(Inverse + at * PARTS * C * C, planes, C, C, C, C)
    memory = _Memory(
        early=early, later=later, queries=queries, v=_rows_of(V + batch * v_b + head * v_h, length, v_s, C, how.WV, COLUMNS),
        inverse=of_inverse, pairs=of_pairs,
        out=_rows_of(Out + (batch * length * heads + head) * how.WV, length, heads * how.WV, C, how.WV, COLUMNS),
        factors=Factors + at * 5 * C, sums=Sums + at * (C * DIMS if how.CHANNEL else 2 * C), skip=Skip, head=head,
    )  # fmt: skip
    NUMBERS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    STATES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLUMNS, DIMS], gl.bfloat16)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLUMNS, C], gl.bfloat16)
    of_keys = _room(early, STAGES * OF_KEYS, C, DIMS)
    tiles = _Tiles(
        early=of_keys, later=_room(later, STAGES * OF_KEYS, C, DIMS) if how.CHANNEL else of_keys,
        queries=_room(queries, STAGES * (how.OF_OUT if how.CHANNEL else 1), C, DIMS), v=_room(memory.v, STAGES, C, COLUMNS),
        inverse=_room(of_inverse, STAGES * PARTS, C, C) if how.DELTA else of_keys,
        pairs=_room(of_pairs, STAGES * how.OF_OUT, C, C) if how.DELTA else of_keys,
        out=_room(memory.out, 1, C, COLUMNS).index(0),
        factors=gl.allocate_shared_memory(gl.float32, [STAGES, 4 * C], NUMBERS),
        decays=gl.allocate_shared_memory(gl.float32, [STAGES, DIMS if how.DELTA else 2 * C], NUMBERS),
        states=gl.allocate_shared_memory(gl.bfloat16, [how.OF_OUT, COLUMNS, DIMS], STATES),
        news=gl.allocate_shared_memory(gl.bfloat16, [how.OF_OUT, COLUMNS, C], VALUES),
        firsts=gl.allocate_shared_memory(gl.int32, [COLUMNS], NUMBERS),
    )  # fmt: skip
    barriers = _Barriers(
        full=_ring(STAGES, 2), empty=_ring(STAGES, 1 if how.DELTA else 2), q_full=_ring(STAGES, 1), q_empty=_ring(STAGES, 1),
        s_full=_ring(1, 1), s_empty=_ring(1, 1), u_full=_ring(1, 1), u_empty=_ring(1, 1),
    )  # fmt: skip
    fence_async_shared()
    first, last = First, Last + (row * DIMS * how.WV + column * last_v)
    if First is not None:
        first = First + (batch * first_b + head * first_h + piece * first_p + column * first_v)
    own = (first, last, tiles, barriers, count, first_k, first_v, last_k, last_v, piece == pieces - 1, how)
    given = (memory, tiles, barriers, first_chunk, count, column, how)
    gl.warp_specialize([(_carry, own), (_outputs if how.DELTA else _by_decays, given), (_fetch, given)], [4, 4], [_MANY, _FEW])  # fmt: skip
