"""Kernels that make lists of tiles (shared/ops/listing.py): one reduces each block of queries and of keys, one makes the lists from that,
with one program for each list.

They are not specialised on any number: one compiled kernel serves every model whose masks have the same parts and whose kernels have the
    same
tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_compiler.lowerings.shared.ops import listing

HEAD = tl.constexpr(listing.HEAD)
TAIL = tl.constexpr(listing.TAIL)
SURPLUS = tl.constexpr(listing.SURPLUS)
UNIT = tl.constexpr(listing.UNIT)
SOME = tl.constexpr(listing.SOME)
HOLES = tl.constexpr(listing.HOLES)

#: larger than every position; sums with it fit into 32 bits
BEYOND = tl.constexpr(2**30)

OF_QUERIES, OF_KEYS = tl.constexpr(listing.OF_QUERIES), tl.constexpr(listing.OF_KEYS)

#: numbers of a block of queries: the intervals' bounds, and document numbers
LEAST_LOWER, MOST_LOWER, LEAST_UPPER, MOST_UPPER, LEAST_Q, MOST_Q = map(tl.constexpr, range(listing.OF_QUERIES))
#: numbers of a block of keys: whether any and all may be used, and document numbers
ANY_KEY, ALL_KEYS, LEAST_K, MOST_K = map(tl.constexpr, range(listing.OF_KEYS))

_BOUNDS_NUMBERS = (
    "blocks_q",
    "blocks_k",
    "seqlen_q",
    "seqlen_kv",
    "rows_side",
    "rows_b",
    "keys_b",
    "documents_qb",
    "documents_kb",
)
_LISTS_NUMBERS = (
    *("heads", "blocks_q", "blocks_k", "seqlen_q", "seqlen_kv", "band_left", "band_right"),
    *("units_b", "units_h", "units_q", "units_k"),
)


@triton.jit
def _sum_up_queries(
    Rows, Documents, to, block, blocks, seqlen, rows_side, rows_at, documents_at, QUERIES: tl.constexpr
):
    # Indices beyond the block (its size may be no power of two) or beyond the sequence are clamped to the last position.
    ALL: tl.constexpr = triton.next_power_of_2(QUERIES)
    at = tl.minimum(block * QUERIES + tl.minimum(tl.arange(0, ALL), QUERIES - 1), seqlen - 1)
    if Rows is not None:
        lower, upper = tl.load(Rows + rows_at + at), tl.load(Rows + rows_side + rows_at + at)
        is_empty = lower >= upper
        lower, upper = tl.where(is_empty, BEYOND, lower), tl.where(is_empty, -1, upper)
        tl.store(to + LEAST_LOWER * blocks, tl.min(lower, 0))
        tl.store(to + MOST_LOWER * blocks, tl.max(lower, 0))
        tl.store(to + LEAST_UPPER * blocks, tl.min(upper, 0))
        tl.store(to + MOST_UPPER * blocks, tl.max(upper, 0))
    if Documents is not None:
        documents = tl.load(Documents + documents_at + at)
        tl.store(to + LEAST_Q * blocks, tl.min(documents, 0))
        tl.store(to + MOST_Q * blocks, tl.max(documents, 0))


@triton.jit
def _sum_up_keys(Keys, Documents, to, block, blocks, seqlen, keys_at, documents_at, KEYS: tl.constexpr):
    at = tl.minimum(block * KEYS + tl.arange(0, KEYS), seqlen - 1)
    if Keys is not None:
        allowed = (tl.load(Keys + keys_at + at) != 0).to(tl.int32)
        tl.store(to + ANY_KEY * blocks, tl.max(allowed, 0))
        tl.store(to + ALL_KEYS * blocks, tl.min(allowed, 0))
    if Documents is not None:
        documents = tl.load(Documents + documents_at + at)
        tl.store(to + LEAST_K * blocks, tl.min(documents, 0))
        tl.store(to + MOST_K * blocks, tl.max(documents, 0))


@triton.jit(do_not_specialize=_BOUNDS_NUMBERS)
def tile_bounds(
    Rows,
    Keys,
    DocumentsQ,
    DocumentsK,
    OfQueries,
    OfKeys,
    blocks_q,
    blocks_k,
    seqlen_q,
    seqlen_kv,
    rows_side,
    rows_b,
    keys_b,
    documents_qb,
    documents_kb,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Reduce each block of queries and keys. Rows: int32 (2, batch, Sq). Keys: uint8 (batch, Skv). DocumentsQ, DocumentsK: int32 (batch,
    Sq), (batch, Skv). None: the mask has no such part. OfQueries, OfKeys: int32 (batch, OF_QUERIES, blocks_q), (batch, OF_KEYS, blocks_k),
    packed; only numbers of present parts are written.

    Operands are packed along their last axis; other axes go by strides in elements, 0 where one stands for all.
    A program reduces one block: those of queries come first. A query without keys has the bounds (BEYOND, -1).
    """
    block, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if block < blocks_q:
        to = OfQueries + batch * blocks_q * OF_QUERIES + block
        _sum_up_queries(
            Rows, DocumentsQ, to, block, blocks_q, seqlen_q, rows_side, batch * rows_b, batch * documents_qb, QUERIES
        )
    else:
        block -= blocks_q
        to = OfKeys + batch * blocks_k * OF_KEYS + block
        _sum_up_keys(Keys, DocumentsK, to, block, blocks_k, seqlen_kv, batch * keys_b, batch * documents_kb, KEYS)


@triton.jit
def _later(a, b):
    return tl.maximum(a, b)


@triton.jit
def _band(queries, keys, seqlen_q, seqlen_kv, band_left, band_right, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """Return (some, holes) of the band and of the scores' end: queries - band_left <= keys <= queries + band_right, keys < seqlen_kv."""
    first_q, first_k = queries * QUERIES, keys * KEYS
    last_q = tl.minimum(first_q + QUERIES, seqlen_q) - 1
    last_k = tl.minimum(first_k + KEYS, seqlen_kv) - 1
    some = (last_k >= first_q - band_left) & (first_k <= last_q + band_right)
    outside = (first_k < last_q - band_left) | (last_k > first_q + band_right)
    return some, outside | (first_k + KEYS > seqlen_kv)


@triton.jit
def _rows(bounds, queries, keys, blocks_q, seqlen_kv, inside, KEYS: tl.constexpr):
    """Return (some, holes) of tiles, by their queries' intervals of keys. some: a pair may be allowed; holes: a pair may be masked."""
    at = bounds + queries
    first_k = keys * KEYS
    last_k = tl.minimum(first_k + KEYS, seqlen_kv) - 1
    lower = tl.load(at + LEAST_LOWER * blocks_q, mask=inside, other=0)
    upper = tl.load(at + MOST_UPPER * blocks_q, mask=inside, other=0)
    some = (last_k >= lower) & (first_k < upper)
    lower = tl.load(at + MOST_LOWER * blocks_q, mask=inside, other=0)
    upper = tl.load(at + LEAST_UPPER * blocks_q, mask=inside, other=0)
    return some, (first_k < lower) | (last_k >= upper)


@triton.jit
def _keys(bounds, keys, blocks_k, inside):
    """Return (some, holes) of the truth values of keys."""
    some = tl.load(bounds + ANY_KEY * blocks_k + keys, mask=inside, other=0) != 0
    return some, tl.load(bounds + ALL_KEYS * blocks_k + keys, mask=inside, other=0) == 0


@triton.jit
def _documents(of_queries, of_keys, queries, keys, blocks_q, blocks_k, inside_q, inside_k):
    """Return (some, holes) of document numbers: some where the ranges of the numbers meet."""
    least_q = tl.load(of_queries + LEAST_Q * blocks_q + queries, mask=inside_q, other=0)
    most_q = tl.load(of_queries + MOST_Q * blocks_q + queries, mask=inside_q, other=0)
    least_k = tl.load(of_keys + LEAST_K * blocks_k + keys, mask=inside_k, other=0)
    most_k = tl.load(of_keys + MOST_K * blocks_k + keys, mask=inside_k, other=0)
    some = (least_q <= most_k) & (least_k <= most_q)
    return some, (least_q != most_q) | (least_k != most_k) | (least_q != least_k)


@triton.jit
def _units(Units, units_q, units_k, queries, keys, seqlen_q, seqlen_kv, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """Return (some, holes) of a dense mask, which `Units` summarises by UNIT × UNIT pairs."""
    inner = tl.arange(0, (QUERIES // UNIT) * (KEYS // UNIT))[None, :]
    unit_q = queries[:, None] * (QUERIES // UNIT) + inner // (KEYS // UNIT)
    unit_k = keys[:, None] * (KEYS // UNIT) + inner % (KEYS // UNIT)
    inside = (unit_q < tl.cdiv(seqlen_q, UNIT)) & (unit_k < tl.cdiv(seqlen_kv, UNIT))
    at = unit_q.to(tl.int64) * units_q + unit_k.to(tl.int64) * units_k
    states = tl.load(Units + at, mask=inside, other=0).to(tl.int32)
    return tl.max(states & SOME, 1) != 0, tl.max(states & HOLES, 1) != 0


@triton.jit
def _within_reach(
    row, seqlen_q, seqlen_kv, band_left, band_right, length, QUERIES: tl.constexpr, KEYS: tl.constexpr, BY_KEY: tl.constexpr
):  # fmt: skip
    """Return first and end of the blocks of the other side that hold everything that the band lets a block see."""
    if BY_KEY:
        first = row * KEYS - band_right
        last = tl.minimum(row * KEYS + KEYS, seqlen_kv) - 1 + band_left
        first, end = tl.maximum(first, 0) // QUERIES, tl.maximum(last, -1) // QUERIES + 1
    else:
        first = row * QUERIES - band_left
        last = tl.minimum(row * QUERIES + QUERIES, seqlen_q) - 1 + band_right
        first, end = tl.maximum(first, 0) // KEYS, tl.maximum(last, -1) // KEYS + 1
    return first, tl.minimum(end, length)


@triton.jit(do_not_specialize=_LISTS_NUMBERS)
def tile_lists(
    OfQueries,
    OfKeys,
    Units,
    Lists,
    heads,
    blocks_q,
    blocks_k,
    seqlen_q,
    seqlen_kv,
    band_left,
    band_right,
    units_b,
    units_h,
    units_q,
    units_k,
    HAS_ROWS: tl.constexpr,
    HAS_KEYS: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    BY_KEY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Make the lists. OfQueries, OfKeys: as `tile_bounds` has them. Units: uint8 (batch, heads, ⌈Sq/32⌉, ⌈Skv/32⌉), any strides, 0 where
    one stands for all, or None. Lists: int32 (batch, heads, rows + SURPLUS, length + HEAD + TAIL), packed: rows are the blocks of queries,
    BY_KEY of keys.

    Of several longest runs the first counts. Blocks that need the mask come in order. The rest of a list is undefined.
    """
    if BY_KEY:
        rows, length = blocks_k, blocks_q
    else:
        rows, length = blocks_q, blocks_k
    row, head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    Lists += ((batch * heads + head) * (rows + SURPLUS) + row) * (length + HEAD + TAIL)
    OfQueries += batch * blocks_q * OF_QUERIES
    OfKeys += batch * blocks_k * OF_KEYS
    reach, reach_end = _within_reach(row, seqlen_q, seqlen_kv, band_left, band_right, length, QUERIES, KEYS, BY_KEY)

    # The first pass: the state of each block, how many have an allowed pair, and the longest run of blocks without a hole.
    gap, longest, end, visited = reach - 1, 0, 1, 0
    for start in range(reach, reach_end, BLOCK):
        blocks = start + tl.arange(0, BLOCK)
        own = row + tl.zeros((1,), tl.int32)
        if BY_KEY:
            queries, keys = blocks, own
        else:
            queries, keys = own, blocks
        inside_q, inside_k = queries < blocks_q, keys < blocks_k
        some, holes = _band(queries, keys, seqlen_q, seqlen_kv, band_left, band_right, QUERIES, KEYS)
        if HAS_ROWS:
            found, lacking = _rows(OfQueries, queries, keys, blocks_q, seqlen_kv, inside_q, KEYS)
            some, holes = some & found, holes | lacking
        if HAS_KEYS:
            found, lacking = _keys(OfKeys, keys, blocks_k, inside_k)
            some, holes = some & found, holes | lacking
        if HAS_DOCUMENTS:
            found, lacking = _documents(OfQueries, OfKeys, queries, keys, blocks_q, blocks_k, inside_q, inside_k)
            some, holes = some & found, holes | lacking
        if Units is not None:
            found, lacking = _units(
                Units + batch * units_b + head * units_h, units_q, units_k, queries, keys, seqlen_q, seqlen_kv, QUERIES, KEYS
            )  # fmt: skip
            some, holes = some & found, holes | lacking
        there = blocks < reach_end
        some = some & there
        full = some & (holes == 0)
        tl.store(Lists + HEAD + blocks, some.to(tl.int32), mask=there)
        gaps = tl.maximum(tl.associative_scan(tl.where(full, -1, blocks), 0, _later), gap)
        so_far = tl.where(full, blocks - gaps, 0)
        top = tl.max(so_far, 0)
        end = tl.where(top > longest, start + tl.argmax(so_far, 0) + 1, end)
        longest = tl.maximum(longest, top)
        gap = tl.max(gaps, 0)
        visited += tl.sum(some.to(tl.int32), 0)

    first = end - longest
    tl.store(Lists, visited - longest)
    tl.store(Lists + 1, first)
    tl.store(Lists + 2, end)

    # The second pass: each block that needs the mask moves to its place, which is never behind the place of its state.
    before = 0
    tl.debug_barrier()
    for start in range(reach, reach_end, BLOCK):
        blocks = start + tl.arange(0, BLOCK)
        some = tl.load(Lists + HEAD + blocks, mask=blocks < reach_end, other=0) != 0
        tl.debug_barrier()
        is_partial = some & ((blocks < first) | (blocks >= end))
        place = before + tl.cumsum(is_partial.to(tl.int32), 0) - 1
        tl.store(Lists + HEAD + place, blocks, mask=is_partial)
        before += tl.sum(is_partial.to(tl.int32), 0)


@triton.jit
def _tiles_of(List, inside):
    """Return how many tiles each block visits."""
    partial = tl.load(List, mask=inside, other=0)
    return partial + tl.load(List + 2, mask=inside, other=0) - tl.load(List + 1, mask=inside, other=0)


@triton.jit(do_not_specialize=("rows", "width"))
def tile_order(Lists, rows, width, BLOCK: tl.constexpr):
    """Write behind the n-th list the block with the n-th shortest one; of equal ones the first comes first. Lists: of `tile_lists`, for
    `rows` blocks, `width` numbers each.

    Grid: (cdiv(rows, BLOCK), batch · heads). Each block counts the blocks before it, so the work grows with the square of their number.
    """
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    Lists += tl.program_id(1).to(tl.int64) * (rows + SURPLUS) * width
    tiles = _tiles_of(Lists + own.to(tl.int64) * width, own < rows)
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, rows, BLOCK):
        others = start + tl.arange(0, BLOCK)
        inside = others < rows
        theirs = _tiles_of(Lists + others.to(tl.int64) * width, inside)[None, :]
        is_before = (theirs < tiles[:, None]) | ((theirs == tiles[:, None]) & (others[None, :] < own[:, None]))
        before += tl.sum((is_before & inside[None, :]).to(tl.int32), 1)
    tl.store(Lists + (before.to(tl.int64) + 1) * width - TAIL, own, mask=own < rows)
