"""Work on one tile by a warpgroup of Hopper's backward, in Gluon: products, weights, masks, and sums for dq."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from attn_compiler.lowerings.hopper.kernels.head_parts_sm90 import out_layout, scores_of, slices_of, width_of
from attn_compiler.lowerings.shared.kernels.optional import at_index
from attn_compiler.lowerings.shared.kernels.releases_sm90 import add_from_shared, barrier_of_threads
from attn_compiler.lowerings.shared.kernels.tile_parts import LOG2E
from attn_compiler.lowerings.shared.kernels.tiles_sm90 import ROWS, bits_set, distances_to, tanh, up_to

#: registers of a thread, summed over the three warpgroups
REGISTERS_OF_ALL = gl.constexpr(504)
#: more than any sequence's length
FAR = gl.constexpr(1 << 30)


@gluon.jit
def start_product(left, tile, HALF: gl.constexpr, DIMS: gl.constexpr, layouts: gl.constexpr):
    """Start the product of 64 keys (or values) and 64 queries (or rows of the output's gradient) of a tile, (keys, queries)."""
    none = gl.zeros([ROWS, ROWS], gl.float32, layout=layouts.SCORES)
    return scores_of(slices_of(left, DIMS), slices_of(tile.slice(HALF * ROWS, ROWS, dim=0), DIMS), none, DIMS)


@gluon.jit
def _allowed(weights, start, own, masks, sizes, layouts: gl.constexpr, how: gl.constexpr):
    """Return the weights (keys, queries) of a tile, 0 where a pair is not allowed."""
    SCORES: gl.constexpr = layouts.SCORES
    QUERIES: gl.constexpr = weights.shape[1]
    weights = gl.where(up_to(own.most - start, SCORES, QUERIES), weights, 0.0)
    if how.HAS_RIGHT:
        weights = gl.where(up_to(own.least - 1 - start, SCORES, QUERIES), 0.0, weights)
    QUERY: gl.constexpr = gl.SliceLayout(0, SCORES)
    if masks.Rows is not None:
        queries = start + gl.arange(0, QUERIES, layout=QUERY)
        inside = queries < sizes.seqlen_q
        lower = gl.load(masks.Rows + queries, mask=inside, other=0)
        weights = gl.where(own.keys[:, None] >= lower[None, :], weights, 0.0)
        upper = gl.load(masks.Rows + masks.rows_side + queries, mask=inside, other=0)
        weights = gl.where(own.keys[:, None] < upper[None, :], weights, 0.0)
    if own.document is not None:
        queries = start + gl.arange(0, QUERIES, layout=QUERY)
        document = gl.load(masks.Documents + queries, mask=queries < sizes.seqlen_q, other=0)
        weights = gl.where(own.document[:, None] == document[None, :], weights, 0.0)
    if masks.Bits is not None:
        weights = gl.where(bits_set(masks.Bits, own.bits, start // 32, SCORES, QUERIES), weights, 0.0)
    return weights


@gluon.jit
def weights_of(
    scores, start, IS_MASKED: gl.constexpr, base, bias, own, masks, sizes, layouts: gl.constexpr, how: gl.constexpr
):  # fmt: skip
    """Return the weights of a tile (keys, queries), and the factor of their gradients, which differs from them under a softcap. base: -lse,
    in units of log 2. bias: the tensor added to the scores, or None."""
    factor = own.factor
    if how.SOFTCAP:
        scores = tanh(scores * factor)
        factor = own.cap
    logits = scores * factor + base[None, :]
    if bias is not None:
        logits = logits + bias.to(gl.float32) * LOG2E
    if own.slope is not None:
        from_start = own.slope * (own.keys - start).to(gl.float32)
        logits = distances_to(logits, from_start, -own.slope, layouts.SCORES, scores.shape[1])
    weights = gl.exp2(logits)
    if IS_MASKED:
        weights = _allowed(weights, start, own, masks, sizes, layouts, how)
    through = weights
    if how.SOFTCAP:
        through = weights * (1.0 - scores * scores)
    return weights, through


@gluon.constexpr_function
def sum_width(consumer, how):
    """Return the columns of dq that a warpgroup multiplies: all that it has room for, or of a sum of two powers of two one of these."""
    return how.SUM_COLUMNS if how.QK == how.QK_ALL else width_of(how.QK, consumer)


@gluon.jit
def products_of_dq(consumer: gl.constexpr, grads, tiles, how: gl.constexpr):
    """Start the product of a tile's gradients of scores (keys, queries) for dq: half of the columns, or of 128 queries half of one half."""
    COLUMNS: gl.constexpr = sum_width(consumer, how)
    none = gl.zeros([ROWS, COLUMNS], gl.float32, layout=out_layout(COLUMNS, 0))
    grads_0, grads_1 = grads.slice(0, ROWS, dim=0), grads.slice(ROWS, ROWS, dim=0)
    k_0 = tiles.k.index(0).reshape([ROWS, how.QK_ALL])
    k_1 = tiles.k.index(1).reshape([ROWS, how.QK_ALL])
    if how.BLOCK_M == ROWS:
        START: gl.constexpr = consumer * how.SUM_COLUMNS
        k_0, k_1 = k_0.slice(START, COLUMNS, dim=1), k_1.slice(START, COLUMNS, dim=1)
    else:
        grads_0, grads_1 = grads_0.slice(consumer * ROWS, ROWS, dim=1), grads_1.slice(consumer * ROWS, ROWS, dim=1)
    sums = warpgroup_mma(grads_0.permute([1, 0]), k_0, none, use_acc=False, is_async=True)
    return warpgroup_mma(grads_1.permute([1, 0]), k_1, sums, is_async=True)


@gluon.jit
def add_to_dq(consumer: gl.constexpr, Sums, batch, head, start, n, sums, tiles, how: gl.constexpr):
    """Have the copy engine add the n-th tile to the sums in memory, from a buffer that has to be free. Columns beyond memory's are not
    added."""
    mine = tiles.sums.index(consumer)
    mine.reshape([ROWS, how.SUM_COLUMNS]).slice(0, sum_width(consumer, how), dim=1).store(sums)
    fence_async_shared()
    if how.IN_ORDER:
        ROOM: gl.constexpr = 2 * how.STAGES
        mbarrier.wait(tiles.turn_full.index(n % ROOM), (n // ROOM) & 1)
    barrier_of_threads()
    if how.BLOCK_M == ROWS:
        add_from_shared(Sums, [batch, head, start, consumer * how.SUM_COLUMNS], mine)
    else:
        add_from_shared(Sums, [batch, head, start + consumer * ROWS, 0], mine)


@gluon.jit
def keys_of_block(
    block, batch, consumer: gl.constexpr, masks, masking, sizes, layouts: gl.constexpr, how: gl.constexpr
):
    """Return keys, least and most of `KeyBlock`. Keys that nobody may use have no query."""
    KEY: gl.constexpr = gl.SliceLayout(1, layouts.SCORES)
    keys = block * how.BLOCK_N + consumer * ROWS + gl.arange(0, ROWS, layout=KEY)
    inside = keys < sizes.seqlen_kv
    least = keys * 0
    most = keys * 0 + FAR
    if how.HAS_RIGHT:
        least = keys - sizes.band_right
    if how.HAS_LEFT:
        most = keys + sizes.band_left
    used = inside
    if masks.Keys is not None:
        found = gl.load(at_index(masks.Keys, batch, masking.keys_b) + keys, mask=inside, other=0)
        used = found != 0
    return keys, least, gl.where(used, most, -1 - FAR)


@gluon.jit
def mark_nan(Flag, found, rows, length):
    """Raise the flag if a row of a gradient is NaN. found: the sum of each row."""
    gl.store(Flag + rows * 0, rows * 0 + 1, mask=(found != found) & (rows < length))
