"""Gradients of chunks of the state space for Hopper, in Gluon. Words and tensors are those of backward.py; rows have no norms.

Heads share q and k, so a program has one chunk of several heads, and adds up their gradients of q and k. As in backward_sm90.py, two
warpgroups multiply with states, turned, (K, C). A third one has pairs of tokens, turned, (C of k, C of q), and the gradient of v. A fourth
one loads columns of v ahead. beta's gradient is rows(dP P) + r k (D v): what is exact in it goes through no product for bfloat16.
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
from attn_compiler.lowerings.shared.kernels.releases_sm90 import async_load, barrier_of_threads, reinterpret
from attn_compiler.lowerings.shared.kernels.tile_parts import LOG2E

#: columns of v at once; registers of a thread of the pairs' warpgroup, with products of one part and of more, and of one that loads
_SLICE, _LESS, _MANY, _FEW = gl.constexpr(32), gl.constexpr(168), gl.constexpr(184), gl.constexpr(24)
#: Products are added to sums outside of tensor cores, in one part, too: else the assembler (13.1) has each instruction awaited.
_APART = gl.constexpr(3)

#: Tensors, as descriptors, or addresses of a chunk's first number.
_Memory = namedtuple("_Memory", "states afters grad v q k sums factors skip")
#: Buffers in shared memory. numbers: e, e, r, beta, -c in two parts, skip. grads: parts of do. lates: of D. bads: NaN where do is not
#: finite. lasts: of `last_bad`. sums: q (e do S), k (D v) and sum(D S). upper: 1 where i >= j. work: parts of pairs, where grads were.
_Tiles = namedtuple("_Tiles", "states afters grad v q k numbers grads lates bads lasts sums upper work")
#: Whether a slice, numbers of a head, and what warpgroups leave for each other, is full, or free to be overwritten.
_Barriers = namedtuple(
    "_Barriers", "full empty side_full side_empty g_full g_empty d_full d_empty v_full v_empty w_full once"
)
#: Addresses of a head's first gradients.
_Results = namedtuple("_Results", "q k v g beta skip")


@gluon.jit
def _split_gradients(to, tiles, barriers, n, token, length, heads, how: gl.constexpr):
    """Leave parts of do in shared memory, with 0 for what is not finite. Compute the gradient of skip."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [8, 1], [1, 0])
    bads = gl.zeros([how.C], gl.float32, layout=gl.SliceLayout(1, ROWS))
    dskip = bads
    for s in gl.static_range(how.WV // _SLICE):
        m = n * (how.WV // _SLICE) + s
        mbarrier.wait(barriers.full.index(m % how.STAGES), (m // how.STAGES) & 1)
        do = copied(tiles.grad.index(m % how.STAGES), ROWS)
        is_good = gl.abs(do) < float("inf")
        bads = gl.maximum(bads, gl.max(gl.where(is_good, 0.0, 1.0), 1))
        leave(split(gl.where(is_good, do, 0.0), how.PARTS), tiles.grads, s * how.PARTS, how.PARTS)
        dskip = dskip + gl.sum(do * copied(tiles.v.index(m % how.STAGES), ROWS), 1)
    tiles.bads.store(gl.where(bads > 0.0, float("nan"), 0.0))
    if to.skip is not None:
        row = token + gl.arange(0, how.C, layout=gl.SliceLayout(1, ROWS))
        gl.store(to.skip + (row.to(gl.int64) * heads + n), dskip, mask=row < length)
    hand_on(barriers.g_full.index(0))


@gluon.jit
def _keys(to, tiles, barriers, count, token, length, heads, stride, how: gl.constexpr):
    """Compute the gradients of q and k, and what the other warpgroup needs of each head."""
    C: gl.constexpr = how.C
    PARTS: gl.constexpr = how.PARTS
    SLICES: gl.constexpr = how.WV // _SLICE
    KEYS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, C, 16])
    PARTIAL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, _SLICE, 16])  # fmt: skip
    LEFT: gl.constexpr = gl.DotOperandLayout(0, KEYS, k_width=2)
    TOKEN: gl.constexpr = gl.SliceLayout(0, KEYS)
    none = gl.zeros([how.WK, C], gl.float32, layout=KEYS)
    dq, dk = none, none
    mbarrier.wait(barriers.once.index(0), 0)
    for n in range(count):
        of_q, of_u = none, none
        numbers = tiles.numbers.index(n % 2)
        ends = gl.zeros([how.WK], gl.float32, layout=gl.SliceLayout(1, PARTIAL))
        for s in range(SLICES):
            m = n * SLICES + s
            stage = m % how.STAGES
            mbarrier.wait(barriers.full.index(stage), (m // how.STAGES) & 1)
            parts = (tiles.afters.index(stage),)
            if PARTS > 1:
                parts = parts_of(copied(tiles.afters.index(stage), PARTIAL), KEYS, PARTS)
                mbarrier.wait(barriers.d_empty.index(0), (m & 1) ^ 1)
                leave(parts, tiles.lates, 0, how.OF_ROWS)
                hand_on(barriers.d_full.index(0))
            of_u = add(parts, tiles_of(tiles.v, stage, 1, True), of_u, PARTS, 1, _APART)
            # The other warpgroup needs these before further slices.
            if s == 0:
                mbarrier.wait(barriers.g_empty.index(0), (n & 1) ^ 1)
                _split_gradients(to, tiles, barriers, n, token, length, heads, how)
        mbarrier.wait(barriers.side_full.index(n % 2), (n // 2) & 1)
        late = numbers.slice(2 * C, C).load(TOKEN) * numbers.slice(3 * C, C).load(TOKEN)
        dk = dk + of_u * late[None, :]
        mbarrier.wait(barriers.v_empty.index(0), (n & 1) ^ 1)
        tiles.sums.slice(C, C).store(gl.sum(copied(tiles.k.permute([1, 0]), KEYS) * of_u, 0))
        for s in range(SLICES):
            stage = (n * SLICES + s) % how.STAGES
            state = copied(tiles.states.index(stage), PARTIAL).to(gl.float32)
            ends += gl.sum(state * copied(tiles.afters.index(stage), PARTIAL), 1)
            parts = (tiles.states.index(stage),)
            if PARTS > 1:
                parts = parts_of(state, KEYS, PARTS)
            of_q = add(parts, tiles_of(tiles.grads, s, PARTS, True), of_q, PARTS, PARTS, _APART)
            hand_on(barriers.empty.index(stage))
        of_q = of_q * numbers.slice(0, C).load(TOKEN)[None, :] + tiles.bads.load(TOKEN)[None, :]
        tiles.sums.slice(2 * C, how.WK).store(ends)
        tiles.sums.slice(0, C).store(gl.sum(copied(tiles.q.permute([1, 0]), KEYS) * of_q, 0))
        hand_on(barriers.v_full.index(0))
        mbarrier.arrive(barriers.side_empty.index(n % 2))
        dq = dq + of_q
    k = (gl.convert_layout(copied(tiles.k.permute([1, 0]), KEYS), LEFT, assert_trivial=True),)
    q = (gl.convert_layout(copied(tiles.q.permute([1, 0]), KEYS), LEFT, assert_trivial=True),)
    mbarrier.wait(barriers.w_full.index(0), 0)
    dq = times(k, tiles_of(tiles.work, 0, how.OF_ROWS, False), dq, 1, how.OF_ROWS, True)
    dk = times(q, tiles_of(tiles.work, 0, how.OF_ROWS, True), dk, 1, how.OF_ROWS, True)
    dq, dk = warpgroup_mma_wait(0, deps=(dq, dk))
    d, t = gl.arange(0, how.WK, layout=gl.SliceLayout(1, KEYS)), gl.arange(0, C, layout=TOKEN)
    at = (token + t[None, :]).to(gl.int64) * stride + d[:, None]
    is_in = (token + t[None, :] < length) & (d[:, None] >= 0)
    gl.store(to.q + at, dq, mask=is_in)
    gl.store(to.k + at, dk, mask=is_in)


@gluon.jit
def _of_after(tiles, barriers, m, none, how: gl.constexpr):
    """Return k D for the next columns of v."""
    if how.PARTS > 1:
        mbarrier.wait(barriers.d_full.index(0), m & 1)
        found = times((tiles.k,), tiles_of(tiles.lates, 0, how.OF_ROWS, False), none, 1, how.OF_ROWS, False)
        found = warpgroup_mma_wait(0, deps=(found,))
        hand_on(barriers.d_empty.index(0))
    else:
        stage = m % how.STAGES
        mbarrier.wait(barriers.full.index(stage), (m // how.STAGES) & 1)
        found = times((tiles.k,), (tiles.afters.index(stage),), none, 1, 1, False)
        found = warpgroup_mma_wait(0, deps=(found,))
    return found


@gluon.jit
def _pairs(to, tiles, barriers, count, token, length, heads, how: gl.constexpr):
    """Compute the gradients of pairs of tokens, of v, g and beta."""
    C: gl.constexpr = how.C
    PARTS: gl.constexpr = how.PARTS
    SLICES: gl.constexpr = how.WV // _SLICE
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, _SLICE, 16])  # fmt: skip
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, PAIRS)
    COLUMN: gl.constexpr = gl.SliceLayout(0, PAIRS)
    OF_VALUES: gl.constexpr = gl.SliceLayout(1, VALUES)
    # Parts of further columns of D come later, and do not take registers until then.
    EARLY: gl.constexpr = SLICES if PARTS == 1 else 1
    none = gl.zeros([C, C], gl.float32, layout=PAIRS)
    no_values = gl.zeros([C, _SLICE], gl.float32, layout=VALUES)
    first, second = gl.arange(0, C, layout=ROW), gl.arange(0, C, layout=COLUMN)
    tiles.upper.store(gl.where(first[:, None] >= second[None, :], 1.0, none).to(gl.bfloat16))
    weights = none
    mbarrier.wait(barriers.once.index(0), 0)
    for n in range(count):
        # 0, which the compiler cannot know: else it would keep all indices in registers.
        zero = n >> 30
        j, i = (gl.arange(0, C, layout=ROW) + zero)[:, None], (gl.arange(0, C, layout=COLUMN) + zero)[None, :]
        is_seen = i >= j
        dvs = ()
        for s in gl.static_range(EARLY):
            dvs += (_of_after(tiles, barriers, n * SLICES + s, no_values, how),)
        pairs = times((tiles.k,), (tiles.q.permute([1, 0]),), none, 1, 1, False)
        pairs = warpgroup_mma_wait(0, deps=(pairs,))
        mbarrier.wait(barriers.g_full.index(0), n & 1)
        numbers = tiles.numbers.index(n % 2)
        mbarrier.wait(barriers.side_full.index(n % 2), (n // 2) & 1)
        dp = none
        for s in gl.static_range(SLICES):
            m = n * SLICES + s
            stage = m % how.STAGES
            mbarrier.wait(barriers.full.index(stage), (m // how.STAGES) & 1)
            dp = add(tiles_of(tiles.v, stage, 1, False), tiles_of(tiles.grads, s, PARTS, True), dp, 1, PARTS, _APART)
        bads = tiles.bads.load(COLUMN)
        is_bad = gl.max(gl.where(bads == 0.0, 0, 1), 0) != 0
        for s in gl.static_range(SLICES):
            stage = (n * SLICES + s) % how.STAGES
            if is_bad:
                row = gl.arange(0, C, layout=gl.SliceLayout(1, ROWS))[:, None]
                do = copied(tiles.grad.index(stage), ROWS)
                lasts = gl.max(gl.where(gl.abs(do) < float("inf"), -1, row), 0)
                tiles.lasts.slice(s * _SLICE, _SLICE).store(lasts)
            hand_on(barriers.empty.index(stage))
        dp = dp + bads[None, :]
        decay = gl.where(is_seen, decays(numbers.slice(4 * C, 2 * C), is_seen, ROW, COLUMN, C), 0.0)
        pairs = gl.where(is_seen, pairs * decay, 0.0)
        beta = numbers.slice(3 * C, C).load(ROW)
        both = gl.where(is_seen, pairs * dp, 0.0)
        dbeta = gl.sum(both, 1)
        both = gl.where(i > j, both * beta[:, None], 0.0)
        weights = weights + gl.where(is_seen, dp * decay * beta[:, None], 0.0)
        pairs = pairs * beta[:, None]
        if to.skip is not None:
            pairs += gl.where(i == j, numbers.slice(6 * C, C).load(ROW)[:, None], 0.0)
        pairs = parts_of(pairs, VALUES, how.OF_ROWS)
        r = gl.arange(0, C, layout=OF_VALUES) + zero
        late = numbers.slice(2 * C, C).load(OF_VALUES) * numbers.slice(3 * C, C).load(OF_VALUES)
        for s in gl.static_range(SLICES):
            if s < EARLY:
                dv = dvs[s]
            else:
                dv = _of_after(tiles, barriers, n * SLICES + s, no_values, how)
            dv = dv * late[:, None]
            dv = times(pairs, tiles_of(tiles.grads, s, PARTS, False), dv, how.OF_ROWS, how.OF_ROWS, True)
            dv = warpgroup_mma_wait(0, deps=(dv,))
            e = gl.arange(0, _SLICE, layout=gl.SliceLayout(0, VALUES)) + s * _SLICE
            if is_bad:
                lasts = tiles.lasts.slice(s * _SLICE, _SLICE).load(gl.SliceLayout(0, VALUES))
                dv = gl.where(r[:, None] <= lasts[None, :], float("nan"), dv)
            to_v = ((token + r[:, None]).to(gl.int64) * heads + n) * how.WV + e[None, :]
            is_row = (token + r[:, None] < length) & (e[None, :] >= 0)
            gl.store(to.v + to_v, dv.to(to.v.dtype.element_ty), mask=is_row)
        hand_on(barriers.g_empty.index(0))
        is_good = gl.abs(both) < float("inf")
        sums = times(parts_of(gl.where(is_good, both, 0.0), PAIRS, PARTS), (tiles.upper,), none, PARTS, 1, False)
        last = gl.max(gl.where(is_good, -1, i), 1)
        sums = warpgroup_mma_wait(0, deps=(sums,))
        sums = gl.where(i <= last[:, None], float("nan"), sums)
        mbarrier.wait(barriers.v_full.index(0), n & 1)
        dc = tiles.sums.slice(0, C).load(ROW)
        kept = tiles.sums.slice(C, C).load(ROW) * numbers.slice(2 * C, C).load(ROW)
        ends = tiles.sums.slice(2 * C, C).load(ROW)
        for d in gl.static_range(1, how.WK // C):
            ends += tiles.sums.slice((2 + d) * C, C).load(ROW)
        ends = ends * gl.exp2(-number_of(numbers.slice(5 * C - 1, 1)) * LOG2E)
        dbeta += kept
        # A decay lies between all tokens before it and all others of the chunk.
        dg = gl.where(i > j, sums + (kept * beta)[:, None], dc[:, None]) + ends[:, None]
        of_g, of_beta = token + second + zero, token + first + zero
        dg = gl.sum(dg, 0).to(to.g.dtype.element_ty)
        gl.store(to.g + (of_g.to(gl.int64) * heads + n), dg, mask=of_g < length)
        dbeta = dbeta.to(to.beta.dtype.element_ty)
        gl.store(to.beta + (of_beta.to(gl.int64) * heads + n), dbeta, mask=of_beta < length)
        hand_on(barriers.v_empty.index(0))
        mbarrier.arrive(barriers.side_empty.index(n % 2))
    leave(split(weights, how.OF_ROWS), tiles.work, 0, how.OF_ROWS)
    hand_on(barriers.w_full.index(0))


@gluon.jit
def _fetch(memory, tiles, barriers, row, step, column, width, count, token, how: gl.constexpr):
    """Load slices ahead. row, step: of states, of the first head and from one to the next. column, width: of v."""
    NUMBERS: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    C: gl.constexpr = how.C
    SLICES: gl.constexpr = how.WV // _SLICE
    BYTES: gl.constexpr = 2 * memory.states.block_type.nbytes + memory.grad.block_type.nbytes + memory.v.block_type.nbytes  # fmt: skip
    few, many = gl.arange(0, 2 * C, layout=NUMBERS), gl.arange(0, 4 * C, layout=NUMBERS)
    once = barriers.once.index(0)
    mbarrier.expect(once, 2 * memory.q.block_type.nbytes)
    async_load(memory.q, [token, 0], once, tiles.q)
    async_load(memory.k, [token, 0], once, tiles.k)
    for n in range(count):
        sums = gl.load(memory.sums + (n * step * 2 * C + few))
        factors = gl.load(memory.factors + (n * step * 5 * C + many))
        numbers = tiles.numbers.index(n % 2)
        if memory.skip is not None:
            skip = gl.load(memory.skip + (n + gl.zeros([C], gl.int32, layout=NUMBERS))).to(gl.float32)
        mbarrier.wait(barriers.side_empty.index(n % 2), ((n // 2) & 1) ^ 1)
        numbers.slice(0, 4 * C).store(factors)
        numbers.slice(4 * C, 2 * C).store(-sums)
        if memory.skip is not None:
            numbers.slice(6 * C, C).store(skip)
        barrier_of_threads()
        mbarrier.arrive(barriers.side_full.index(n % 2))
        for s in range(SLICES):
            m = n * SLICES + s
            stage = m % how.STAGES
            full, at = barriers.full.index(stage), s * _SLICE
            mbarrier.wait(barriers.empty.index(stage), ((m // how.STAGES) & 1) ^ 1)
            mbarrier.expect(full, BYTES)
            async_load(memory.grad, [token, column + n * how.WV + at], full, tiles.grad.index(stage))
            async_load(memory.v, [token, n * width + at], full, tiles.v.index(stage))
            async_load(memory.afters, [(row + n * step) * how.WK, at], full, tiles.afters.index(stage))
            async_load(memory.states, [(row + n * step) * how.WK, at], full, tiles.states.index(stage))


@assembled_gluon(do_not_specialize=["length", "chunks", "pieces", "of_piece"])
def space_gradients_sm90(
    Q, K, V, Skip, Grad, Sums, Factors, States, Afters, Part_q, Part_k, Grad_v, Part_g, Part_beta, Part_skip,
    heads, group, length, chunks, pieces, of_piece, q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, HOW: gl.constexpr,
):  # fmt: skip
    """Grid: (chunks B pieces,); a program has `of_piece` heads that share q and k. num_warps: 8. Operands: those of `head_gradients`, in
    bfloat16, with rows of whole vectors. Grad: in float32. Part_q, Part_k: (B, S, pieces, DK). Part_g, Part_beta: (B, S, H). Part_skip:
    the same, in float32, or None."""
    how: gl.constexpr = members(HOW)
    C: gl.constexpr = how.C
    WK: gl.constexpr = how.WK
    WV: gl.constexpr = how.WV
    PARTS: gl.constexpr = how.PARTS
    STAGES: gl.constexpr = how.STAGES
    piece, chunk = gl.program_id(0) % pieces, gl.program_id(0) // pieces % chunks
    row, batch = gl.program_id(0) // pieces // chunks * heads, (gl.program_id(0) // pieces // chunks).to(gl.int64)
    head, token = piece * of_piece, chunk * C
    first, planes, shared = (row + head) * chunks + chunk, (row + heads) * chunks * WK, head // group
    at = first.to(gl.int64)
    memory = _Memory(
        states=rows_of(States, planes, WV, WK, WV, _SLICE), afters=rows_of(Afters, planes, WV, WK, WV, _SLICE),
        grad=rows_of(Grad + batch * length * heads * WV, length, heads * WV, C, heads * WV, _SLICE),
        v=rows_of(V + batch * v_b + head * v_h, length, v_s, C, (of_piece - 1) * v_h + WV, _SLICE),
        q=rows_of(Q + batch * q_b + shared * q_h, length, q_s, C, WK, WK),
        k=rows_of(K + batch * k_b + shared * k_h, length, k_s, C, WK, WK),
        sums=Sums + at * 2 * C, factors=Factors + at * 5 * C, skip=None if Skip is None else Skip + head,
    )  # fmt: skip
    NUMBERS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PAIRS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    OF_ROW: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, _SLICE], gl.bfloat16)
    OF_KEY: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WK, _SLICE], gl.bfloat16)
    # Tiles of wider rows begin at rounder addresses.
    work = gl.allocate_shared_memory(gl.bfloat16, [PARTS, C, C], PAIRS)
    tiles = _Tiles(
        states=room(memory.states, STAGES, WK, _SLICE), afters=room(memory.afters, STAGES, WK, _SLICE),
        grad=room(memory.grad, STAGES, C, _SLICE), v=room(memory.v, STAGES, C, _SLICE),
        q=room(memory.q, 1, C, WK).index(0), k=room(memory.k, 1, C, WK).index(0),
        numbers=gl.allocate_shared_memory(gl.float32, [2, 8 * C], NUMBERS),
        grads=reinterpret(work, gl.bfloat16, [PARTS * (WV // _SLICE), C, _SLICE], OF_ROW), work=work,
        lates=gl.allocate_shared_memory(gl.bfloat16, [how.OF_ROWS, WK, _SLICE], OF_KEY) if PARTS > 1 else work,
        bads=gl.allocate_shared_memory(gl.float32, [C], NUMBERS), lasts=gl.allocate_shared_memory(gl.int32, [WV], NUMBERS),
        sums=gl.allocate_shared_memory(gl.float32, [2 * C + WK], NUMBERS),
        upper=gl.allocate_shared_memory(gl.bfloat16, [C, C], PAIRS),
    )  # fmt: skip
    barriers = _Barriers(
        full=ring(STAGES, 1), empty=ring(STAGES, 2), side_full=ring(2, 1), side_empty=ring(2, 2), once=ring(1, 1),
        g_full=ring(1, 1), g_empty=ring(1, 1), d_full=ring(1, 1), d_empty=ring(1, 1), w_full=ring(1, 1),
        v_full=ring(1, 1), v_empty=ring(1, 1),
    )  # fmt: skip
    fence_async_shared()
    to_k, to_g = (batch * length * pieces + piece) * WK, batch * length * heads + head
    to = _Results(
        q=Part_q + to_k, k=Part_k + to_k, v=Grad_v + to_g * WV, g=Part_g + to_g, beta=Part_beta + to_g,
        skip=None if Part_skip is None else Part_skip + to_g,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_keys, (to, tiles, barriers, of_piece, token, length, heads, pieces * WK, how)),
            (_pairs, (to, tiles, barriers, of_piece, token, length, heads, how)),
            (_fetch, (memory, tiles, barriers, first, chunks, head * WV, v_h, of_piece, token, how)),
        ],
        [4, 1], [_LESS if PARTS == 1 else _MANY, _FEW],
    )  # fmt: skip
