"""Functions of every Triton kernel for one tile of the scores: load, change and mask it, and find the tiles to visit.

Positions have a shape: queries (M, 1) and keys (1, N), or (1, M) and (N, 1) in a kernel that holds the scores transposed. So each
function here serves both orientations. Optional tensors are None where an attention has no such part, which a kernel is
compiled for.
"""

# ruff: noqa: RET502, RET505

from __future__ import annotations

import triton
import triton.language as tl

from attn_compiler.lowerings.shared.kernels.optional import (
    at_index,
    load_column,
    load_keys,
    load_row,
    load_upper,
    of_head,
    turned,
)
from attn_compiler.lowerings.shared.kernels.releases import of_tile
from attn_compiler.lowerings.shared.kernels.tuples import Pairs

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
#: Below it float32 numbers are 8 apart, and a score added to them is lost. Keys that all got one such number share the row equally.
LOW = tl.constexpr(-1e8)


@triton.jit
def load_tile(
    x, start, allowed, SIZE: tl.constexpr, FIRST: tl.constexpr, PART: tl.constexpr, HEAD_DIM: tl.constexpr,
    CHECK: tl.constexpr, ALIGN: tl.constexpr, order=None,
):  # fmt: skip
    """Load (SIZE, PART) elements of x, which is `Positions`: those from `start` on, head dims from FIRST. Zeros beyond the head dim and, if
    CHECK, beyond the length and where `allowed` (SIZE, 1) does not hold: values stored there may be NaN.

    ALIGN: every position begins at a multiple of so many elements, so a thread can load a vector at once.
    Offsets within the tile are of 32 bits, which `arguments.is_far` checks: 64 bits would take twice the registers.
    """
    local = tl.arange(0, SIZE)[:, None]
    if order is not None:
        local = order[:, None]
    dims = FIRST + tl.arange(0, PART)[None, :]
    first = tl.multiple_of(start.to(tl.int64) * x.stride, ALIGN)
    pointers = x.base + first + tl.multiple_of(local * x.stride, [ALIGN, ALIGN]) + dims
    if CHECK:
        inside = start + local < x.length
        if allowed is not None:
            inside = inside & allowed
        if FIRST + PART > HEAD_DIM:
            inside = inside & (dims < HEAD_DIM)
        tile = tl.load(pointers, mask=inside, other=0.0)
    elif FIRST + PART > HEAD_DIM:
        tile = tl.load(pointers, mask=dims < HEAD_DIM, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def at_head(base, batch, head, stride_b, stride_h, ALIGN: tl.constexpr):
    """Return the address of one batch row and head, a multiple of ALIGN elements after `base`."""
    return base + tl.multiple_of(batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h, ALIGN)


@triton.jit
def store_tile(
    x, start, tile, SIZE: tl.constexpr, FIRST: tl.constexpr, PART: tl.constexpr, HEAD_DIM: tl.constexpr, order=None
):  # fmt: skip
    """Store a tile in the dtype of the memory: the inverse of `load_tile`."""
    local = tl.arange(0, SIZE)[:, None]
    if order is not None:
        local = order[:, None]
    dims = FIRST + tl.arange(0, PART)[None, :]
    inside = start + local < x.length
    if FIRST + PART > HEAD_DIM:
        inside = inside & (dims < HEAD_DIM)
    pointers = x.base + start.to(tl.int64) * x.stride + local * x.stride + dims
    tl.store(pointers, tile.to(x.base.dtype.element_ty), mask=inside)


@triton.jit
def tanh(x, FAST: tl.constexpr):
    """Return tanh. FAST: the hardware's own, to 2**-11 (PTX tanh.approx.f32); else to a few units in the last place of 1."""
    if FAST:
        y = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)
    return y


@triton.jit
def load_pairs(base, queries, keys, stride_q, stride_k, seqlen_q, seqlen_kv, CHECK: tl.constexpr):
    """Load the element of each pair of the tile. Rows beyond the last query are undefined; CHECK: keys beyond the last one are 0."""
    rows = tl.minimum(queries, seqlen_q - 1).to(tl.int64) * stride_q
    # Keys are not clamped: their known contiguity is what makes this a load of whole vectors.
    columns = keys.to(tl.int64) * stride_k
    if CHECK:
        found = tl.load(base + rows + columns, mask=(keys < seqlen_kv) & (queries < seqlen_q), other=0)
    else:
        found = tl.load(base + rows + columns)
    return found


@triton.jit
def load_distances(base, queries, keys, phase, seqlen_q, seqlen_kv, CHECK: tl.constexpr):
    """Load the bias at each pair's distance, index k - q + Sq - 1 of a vector.

    base holds the vector 8 times, `phase` elements apart, the p-th moved to the left by p: so each row reads whole vectors, from
    an address that is a multiple of 8.
    """
    first = seqlen_q - 1 - tl.minimum(queries, seqlen_q - 1)
    remainder = first % 8
    rows = tl.multiple_of(first - remainder, [8, 8]) + remainder * phase
    if CHECK:
        found = tl.load(base + rows + keys, mask=(keys < seqlen_kv) & (queries < seqlen_q), other=0)
    else:
        found = tl.load(base + rows + keys)
    return found


@triton.jit
def load_bias(added, queries, keys, sizes, CHECK: tl.constexpr):
    """Load the bias of each pair of the tile, or return None. added: `Added`."""
    if added.bias.base is None:
        return
    else:
        return load_pairs(
            added.bias.base, queries, keys, added.bias.q, added.bias.k, sizes.seqlen_q, sizes.seqlen_kv, CHECK
        )


@triton.jit
def load_by_distance(added, queries, keys, sizes, CHECK: tl.constexpr):
    """Load the bias at each pair's distance, or return None. added: `Added`."""
    if added.Distances is None:
        return
    else:
        return load_distances(added.Distances, queries, keys, added.phase, sizes.seqlen_q, sizes.seqlen_kv, CHECK)


@triton.jit
def is_allowed(
    queries, keys, lower, upper, document_q, document_k, keys_allowed, mask, sizes, how: tl.constexpr
):  # fmt: skip
    """Return which pairs of the tile are allowed; none beyond the last key.

    lower, upper, document_q: of each query, in its shape; document_k, keys_allowed: of each key. mask: `Pairs` of the dense mask.
    """
    Mask = mask.base
    seqlen_q, seqlen_kv, band_left, band_right = sizes.seqlen_q, sizes.seqlen_kv, sizes.band_left, sizes.band_right
    allowed = (keys < seqlen_kv) & (queries < seqlen_q)
    if how.HAS_RIGHT:
        allowed = allowed & (keys <= queries + band_right)
    if how.HAS_LEFT:
        allowed = allowed & (keys >= queries - band_left)
    if lower is not None:
        allowed = allowed & (keys >= lower) & (keys < upper)
    if document_q is not None:
        allowed = allowed & (document_q == document_k)
    if keys_allowed is not None:
        allowed = allowed & keys_allowed
    if Mask is not None:
        allowed = allowed & (load_pairs(Mask, queries, keys, mask.q, mask.k, seqlen_q, seqlen_kv, True) != 0)
    return allowed


@triton.jit
def in_reach(positions, first, last, before, after, HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr):
    """Return which positions of one side see some position from `first` to `last` of the other side in the band: all from first - before to
    last + after. It follows from the positions alone, so that no load waits for another."""
    found = (positions >= 0) & of_tile(first <= last)
    if HAS_BEFORE:
        found = found & (positions >= first - before)
    if HAS_AFTER:
        found = found & (positions <= last + after)
    if HAS_BEFORE and HAS_AFTER:
        found = found & of_tile(before >= -after)
    return found


@triton.jit
def keys_in_use(start, rows, masks, sizes, how: tl.constexpr):
    """Return (N, 1): which keys of a tile, from `start` on, some query of a block uses. rows: `QueryRows`; masks: `KeyMasks`.

    No other key may enter a sum over keys: its values may be NaN, and 0 · NaN is NaN. The mask is evaluated a second time, as (N, M). The
    lanes of a warp then share the queries' numbers. Reducing `allowed` in the layout of the scores takes 100 registers.
    """
    keys = start + tl.arange(0, how.BLOCK_N)[:, None]
    inside = keys < sizes.seqlen_kv
    keys_allowed = load_keys(masks.Keys, keys, inside)
    document_k = load_row(masks.Documents, keys, inside)
    if rows.lower is not None or rows.document is not None or masks.mask.base is not None:
        allowed = is_allowed(
            tl.trans(rows.queries), keys, turned(rows.lower), turned(rows.upper), turned(rows.document), document_k,
            keys_allowed, masks.mask, sizes, how,
        )  # fmt: skip
        found = tl.max(allowed.to(tl.int32), 1)[:, None] > 0
    else:
        last_q = tl.minimum(rows.start + rows.queries.shape[0], sizes.seqlen_q) - 1
        found = in_reach(keys, rows.start, last_q, sizes.band_left, sizes.band_right, how.HAS_LEFT, how.HAS_RIGHT)
        if keys_allowed is not None:
            found = found & keys_allowed
    return found


@triton.jit
def queries_in_use(
    queries, keys, first_key, last_key, lower, upper, document_q, document_k, keys_allowed, mask, sizes, how: tl.constexpr
):  # fmt: skip
    """Return (M, 1): which queries of a tile use some key of it, for sums over queries; as `keys_in_use`.

    queries (M,); lower, upper, document_q: (1, M), or None; keys, document_k, keys_allowed: (N, 1), or None. first_key, last_key: of
    those that are allowed at all. mask: `Pairs`.
    """
    queries = queries[:, None]
    # With holes between the keys, a band that is bounded on both sides may lie inside a hole.
    holes: tl.constexpr = keys_allowed is not None and how.HAS_LEFT and how.HAS_RIGHT
    if holes or lower is not None or document_q is not None or mask.base is not None:
        allowed = is_allowed(
            queries, tl.trans(keys), turned(lower), turned(upper), turned(document_q), turned(document_k), turned(keys_allowed),
            mask, sizes, how,
        )  # fmt: skip
        found = tl.max(allowed.to(tl.int32), 1)[:, None] > 0
    else:
        found = in_reach(queries, first_key, last_key, sizes.band_right, sizes.band_left, how.HAS_RIGHT, how.HAS_LEFT)
    return found


@triton.jit
def allowed_at(
    start_q, start_k, batch, head, operands, masking, sizes, how: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Return which pairs of a tile (M, N) of any head and batch row are allowed, and load the inputs of `is_allowed`. operands:
    `MaskOperands` of all of them; masking: `MaskStrides`."""
    offsets = start_q + tl.arange(0, BLOCK_M)
    inside = offsets < sizes.seqlen_q
    keys = start_k + tl.arange(0, BLOCK_N)[None, :]
    Rows = at_index(operands.Rows, batch, masking.rows_b)
    lower = load_column(Rows, offsets, inside)
    upper = load_upper(Rows, masking.rows_side, offsets, inside)
    keys_allowed = load_keys(at_index(operands.Keys, batch, masking.keys_b), keys, keys < sizes.seqlen_kv)
    document_q = load_column(at_index(operands.DocumentsQ, batch, masking.documents_qb), offsets, inside)
    DocumentsK = at_index(operands.DocumentsK, batch, masking.documents_kb)
    document_k = load_row(DocumentsK, keys, keys < sizes.seqlen_kv)
    Mask = of_head(operands.Mask, batch, head, masking.mask_b, masking.mask_h)
    return is_allowed(
        offsets[:, None], keys, lower, upper, document_q, document_k, keys_allowed,
        Pairs(base=Mask, q=masking.mask_q, k=masking.mask_k), sizes, how,
    )  # fmt: skip


@triton.jit
def changed(qk, scale, number, CHANGE: tl.constexpr, FAST_TANH: tl.constexpr, UNIT: tl.constexpr):
    """Apply the pointwise change (score_changes.py) to q kᵀ. Returns the result, and its factor to logits. UNIT: as in `change`."""
    found, factor = qk, scale * UNIT
    if CHANGE == "softcap":
        found = tanh(qk * (scale / number), FAST_TANH)
        factor = number * UNIT
    return found, factor


@triton.jit
def through_change(grad, found, CHANGE: tl.constexpr):
    """Return the gradient of the scores before the change. grad: of those after it; found: the first result of `changed`."""
    if CHANGE == "softcap":
        grad *= 1.0 - found * found
    return grad


@triton.jit
def change(
    qk, queries, keys, bias, distances, slope, scale, number,
    CHANGE: tl.constexpr, FAST_TANH: tl.constexpr, PLAIN: tl.constexpr, base=None, UNIT: tl.constexpr = LOG2E,
):  # fmt: skip
    """Convert q kᵀ (float32) to logits in units of log 2, before the mask. Returns them, and the changed scores for `through_change`.

    UNIT: 1 for logits in natural units. The lowest number that a model adds is finite then; in units of log 2 it is -inf.

    bias, distances: numbers added to each pair, or None. slope: of this head. base: the start of each query's logits, in its shape, PLAIN
        or not; that costs nothing, as each further term is a product and a sum.

    PLAIN: nothing but a positive scale, which the caller applies together with the row's maximum: returns q kᵀ unchanged.
    """
    found = qk
    if PLAIN and base is None:
        logits = qk
    else:
        found, factor = changed(qk, scale, number, CHANGE, FAST_TANH, UNIT)
        # In this order no whole tile of sums is held in registers during the products.
        logits = found * factor
        if base is not None:
            logits += base
        if slope is not None:
            logits += (slope * UNIT) * (keys - queries).to(tl.float32)
        if distances is not None:
            logits += distances.to(tl.float32) * UNIT
        if bias is not None:
            logits = tl.fma(bias.to(tl.float32), UNIT, logits)
    return logits, found


@triton.jit
def head_and_batch(HEADS_LAST: tl.constexpr):
    """Return head and batch row of a program, whose grid is (blocks, heads, batch rows) or, HEADS_LAST, (blocks, batch rows, heads)."""
    if HEADS_LAST:
        head, batch = tl.program_id(2), tl.program_id(1)
    else:
        head, batch = tl.program_id(1), tl.program_id(2)
    return head, batch


@triton.jit
def kept(seed, head, queries, keys, dropout_p):
    """Return which weights dropout keeps: Philox with (key, query, head) as its counter, so every kernel draws the same."""
    queries, keys = tl.broadcast(queries, keys)
    zero = keys * 0
    bits, _, _, _ = tl.philox(seed, keys, queries, zero + head.to(tl.int32), zero)
    return tl.uint_to_uniform_float(bits) >= dropout_p


@triton.jit
def kept_scores(Scores, row, seqlen_kv, pitch):
    """Return the address of a head's stored scores' gradients: (Skv, pitch), of which the first Sq of each row are used."""
    return Scores + row * seqlen_kv * tl.multiple_of(pitch, 16)


@triton.jit
def load_kept_scores(scores, queries, keys, pitch, seqlen_q, seqlen_kv):
    """Load a tile of stored scores' gradients; undefined where no tile was written, and 0 beyond the last query and key."""
    inside = (queries < seqlen_q) & (keys < seqlen_kv)
    return tl.load(scores + keys.to(tl.int64) * tl.multiple_of(pitch, 16) + queries, mask=inside, other=0.0)
