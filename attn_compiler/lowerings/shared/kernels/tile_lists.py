"""The kernel that makes lists of tiles (shared/listing.py): one program for each row of tiles, `BLOCK` tiles at once.

No number is specialised on, so that one compiled kernel serves every model.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_compiler.lowerings.shared import listing

BLOCK = tl.constexpr(128)
HEAD = tl.constexpr(listing.HEAD)

_NUMBERS = (
    *("heads", "rows", "length"),
    *("some_batch", "some_head", "some_row", "some_tile"),
    *("holes_batch", "holes_head", "holes_row", "holes_tile"),
)


@triton.jit
def _later(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=_NUMBERS)
def tile_lists(
    some,
    holes,
    lists,
    heads,
    rows,
    length,
    some_batch,
    some_head,
    some_row,
    some_tile,
    holes_batch,
    holes_head,
    holes_row,
    holes_tile,
):
    """some, holes: uint8 (batch, heads, rows, length), by strides in elements. lists: int32 (batch, heads, rows, length + 3), packed.

    The run is the first of the longest ones. Tiles that need the mask come first in the list, in order; the others follow, in order.
    """
    at = tl.program_id(0).to(tl.int64)
    row, head, batch = at % rows, at // rows % heads, at // rows // heads
    some += batch * some_batch + head * some_head + row * some_row
    holes += batch * holes_batch + head * holes_head + row * holes_row
    lists += at * (length + HEAD)

    # The first pass: how many tiles have an allowed pair, and the longest run of those that have no hole.
    gap, longest, end, visited = -1, 0, 1, 0
    for start in range(0, length, BLOCK):
        tiles = start + tl.arange(0, BLOCK)
        there = tiles < length
        any_pair = tl.load(some + tiles.to(tl.int64) * some_tile, mask=there, other=0) != 0
        any_hole = tl.load(holes + tiles.to(tl.int64) * holes_tile, mask=there, other=1) != 0
        full = any_pair & (any_hole == 0)
        gaps = tl.maximum(tl.associative_scan(tl.where(full, -1, tiles), 0, _later), gap)
        so_far = tl.where(full, tiles - gaps, 0)
        top = tl.max(so_far, 0)
        end = tl.where(top > longest, start + tl.argmax(so_far, 0) + 1, end)
        longest = tl.maximum(longest, top)
        gap = tl.max(gaps, 0)
        visited += tl.sum(any_pair.to(tl.int32), 0)

    first, count = end - longest, visited - longest
    tl.store(lists, count)
    tl.store(lists + 1, first)
    tl.store(lists + 2, end)

    # The second pass: each tile goes to its place.
    before = 0
    for start in range(0, length, BLOCK):
        tiles = start + tl.arange(0, BLOCK)
        there = tiles < length
        any_pair = tl.load(some + tiles.to(tl.int64) * some_tile, mask=there, other=0) != 0
        partial = any_pair & ((tiles < first) | (tiles >= end))
        so_far = before + tl.cumsum(partial.to(tl.int32), 0)
        place = tl.where(partial, so_far - 1, count + tiles - so_far)
        tl.store(lists + HEAD + place, tiles, mask=there)
        before += tl.sum(partial.to(tl.int32), 0)
