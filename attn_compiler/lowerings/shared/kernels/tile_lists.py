"""The kernel that makes lists of tiles (shared/listing.py): one program for each list.

A program reads what each part of the mask says of its own block and, `BLOCK` at once, of the blocks of the other side. No number is
specialised on: one compiled kernel serves every model whose masks have the same parts and whose kernels have the same tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_compiler.lowerings.shared import listing

HEAD = tl.constexpr(listing.HEAD)
SURPLUS = tl.constexpr(listing.SURPLUS)
UNIT = tl.constexpr(listing.UNIT)
SOME = tl.constexpr(listing.SOME)
HOLES = tl.constexpr(listing.HOLES)

#: beyond every position, and sums with it are of 32 bits
BEYOND = tl.constexpr(2**30)

_NUMBERS = (
    *("heads", "rows", "length", "seqlen_q", "seqlen_kv", "band_left", "band_right"),
    *("rows_side", "rows_b", "keys_b", "documents_qb", "documents_kb"),
    *("units_b", "units_h", "units_q", "units_k"),
)


@triton.jit
def _later(a, b):
    return tl.maximum(a, b)


@triton.jit
def _positions(blocks, seqlen, LENGTH: tl.constexpr):
    """(blocks, LENGTH): the positions in each block. The last position stands for those beyond it."""
    return tl.minimum(blocks[:, None] * LENGTH + tl.arange(0, LENGTH)[None, :], seqlen - 1)


@triton.jit
def _band(queries, keys, seqlen_q, seqlen_kv, band_left, band_right, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """(some, holes) of the band and of the scores' end: queries - band_left <= keys <= queries + band_right, keys < seqlen_kv."""
    first_q, first_k = queries * QUERIES, keys * KEYS
    last_q = tl.minimum(first_q + QUERIES, seqlen_q) - 1
    last_k = tl.minimum(first_k + KEYS, seqlen_kv) - 1
    some = (last_k >= first_q - band_left) & (first_k <= last_q + band_right)
    outside = (first_k < last_q - band_left) | (last_k > first_q + band_right)
    return some, outside | (first_k + KEYS > seqlen_kv)


@triton.jit
def _rows(Rows, rows_side, queries, keys, seqlen_q, seqlen_kv, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """(some, holes) of the queries' intervals of keys."""
    at = _positions(queries, seqlen_q, QUERIES)
    lower, upper = tl.load(Rows + at), tl.load(Rows + rows_side + at)
    is_empty = lower >= upper
    lower, upper = tl.where(is_empty, BEYOND, lower), tl.where(is_empty, -1, upper)
    first_k = keys * KEYS
    last_k = tl.minimum(first_k + KEYS, seqlen_kv) - 1
    some = (last_k >= tl.min(lower, 1)) & (first_k < tl.max(upper, 1))
    return some, (first_k < tl.max(lower, 1)) | (last_k >= tl.min(upper, 1))


@triton.jit
def _keys(Keys, keys, seqlen_kv, KEYS: tl.constexpr):
    """(some, holes) of the truth values of keys."""
    allowed = (tl.load(Keys + _positions(keys, seqlen_kv, KEYS)) != 0).to(tl.int32)
    return tl.max(allowed, 1) != 0, tl.min(allowed, 1) == 0


@triton.jit
def _documents(DocumentsQ, DocumentsK, queries, keys, seqlen_q, seqlen_kv, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """(some, holes) of document numbers: some where the ranges of the numbers meet."""
    of_queries = tl.load(DocumentsQ + _positions(queries, seqlen_q, QUERIES))
    of_keys = tl.load(DocumentsK + _positions(keys, seqlen_kv, KEYS))
    least_q, most_q, least_k, most_k = (
        tl.min(of_queries, 1),
        tl.max(of_queries, 1),
        tl.min(of_keys, 1),
        tl.max(of_keys, 1),
    )
    some = (least_q <= most_k) & (least_k <= most_q)
    return some, (least_q != most_q) | (least_k != most_k) | (least_q != least_k)


@triton.jit
def _units(Units, units_q, units_k, queries, keys, seqlen_q, seqlen_kv, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """(some, holes) of a dense mask, of which `Units` says what each UNIT × UNIT pairs hold."""
    inner = tl.arange(0, (QUERIES // UNIT) * (KEYS // UNIT))[None, :]
    unit_q = queries[:, None] * (QUERIES // UNIT) + inner // (KEYS // UNIT)
    unit_k = keys[:, None] * (KEYS // UNIT) + inner % (KEYS // UNIT)
    inside = (unit_q < tl.cdiv(seqlen_q, UNIT)) & (unit_k < tl.cdiv(seqlen_kv, UNIT))
    at = unit_q.to(tl.int64) * units_q + unit_k.to(tl.int64) * units_k
    states = tl.load(Units + at, mask=inside, other=0).to(tl.int32)
    return tl.max(states & SOME, 1) != 0, tl.max(states & HOLES, 1) != 0


@triton.jit(do_not_specialize=_NUMBERS)
def tile_lists(
    Rows,
    Keys,
    DocumentsQ,
    DocumentsK,
    Units,
    Lists,
    heads,
    rows,
    length,
    seqlen_q,
    seqlen_kv,
    band_left,
    band_right,
    rows_side,
    rows_b,
    keys_b,
    documents_qb,
    documents_kb,
    units_b,
    units_h,
    units_q,
    units_k,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    BY_KEY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows: int32 (2, batch, Sq). Keys: uint8 (batch, Skv). DocumentsQ, DocumentsK: int32 (batch, Sq), (batch, Skv). Units: uint8 (batch,
    heads, ⌈Sq/32⌉, ⌈Skv/32⌉). None: the mask has no such part. Lists: int32 (batch, heads, rows + SURPLUS, length + HEAD), packed.

    All but Units lie packed along their last axis; other axes go by strides in elements, 0 where one stands for all.
    A run is the first of the longest ones. Blocks that need the mask come in order. Behind them stands anything.
    """
    at = tl.program_id(0).to(tl.int64)
    row, head, batch = (at % rows).to(tl.int32), at // rows % heads, at // rows // heads
    Lists += ((batch * heads + head) * (rows + SURPLUS) + row) * (length + HEAD)

    # The first pass: what each block holds, how many have an allowed pair, and the longest run of those that have no hole.
    gap, longest, end, visited = -1, 0, 1, 0
    for start in range(0, length, BLOCK):
        blocks = start + tl.arange(0, BLOCK)
        own = row + tl.zeros((1,), tl.int32)
        if BY_KEY:
            queries, keys = blocks, own
        else:
            queries, keys = own, blocks
        some, holes = _band(queries, keys, seqlen_q, seqlen_kv, band_left, band_right, QUERIES, KEYS)
        if Rows is not None:
            found, lacking = _rows(Rows + batch * rows_b, rows_side, queries, keys, seqlen_q, seqlen_kv, QUERIES, KEYS)
            some, holes = some & found, holes | lacking
        if Keys is not None:
            found, lacking = _keys(Keys + batch * keys_b, keys, seqlen_kv, KEYS)
            some, holes = some & found, holes | lacking
        if DocumentsQ is not None:
            found, lacking = _documents(
                DocumentsQ + batch * documents_qb, DocumentsK + batch * documents_kb, queries, keys, seqlen_q, seqlen_kv, QUERIES, KEYS
            )  # fmt: skip
            some, holes = some & found, holes | lacking
        if Units is not None:
            found, lacking = _units(
                Units + batch * units_b + head * units_h, units_q, units_k, queries, keys, seqlen_q, seqlen_kv, QUERIES, KEYS
            )  # fmt: skip
            some, holes = some & found, holes | lacking
        there = blocks < length
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

    # The second pass: each block that needs the mask goes to its place, which is not behind where its state stands.
    before = 0
    tl.debug_barrier()
    for start in range(0, length, BLOCK):
        blocks = start + tl.arange(0, BLOCK)
        some = tl.load(Lists + HEAD + blocks, mask=blocks < length, other=0) != 0
        tl.debug_barrier()
        is_partial = some & ((blocks < first) | (blocks >= end))
        place = before + tl.cumsum(is_partial.to(tl.int32), 0) - 1
        tl.store(Lists + HEAD + place, blocks, mask=is_partial)
        before += tl.sum(is_partial.to(tl.int32), 0)
