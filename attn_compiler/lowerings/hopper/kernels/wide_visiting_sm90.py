"""Blocks and tiles of the backward's kernels for wide heads, in Gluon: of queries, or by key of keys."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attn_compiler.lowerings.hopper.kernels.visiting import nth_shortest
from attn_compiler.lowerings.shared.kernels.optional import list_of
from attn_compiler.lowerings.shared.kernels.scheduling_sm90 import turn
from attn_compiler.lowerings.shared.kernels.tile_visits import keys_to_visit, queries_to_visit


@gluon.jit
def wide_block(nth, work, how: gl.constexpr):
    """Return whether this program has an nth block, then its number, batch row, head of queries, and that head's number among all batch
    rows."""
    is_one, block, row = turn(nth, work.section, work.blocks, work.heads_of_all)
    # Without an nth block, the first one's list is read.
    block, row = gl.where(is_one, block, 0), gl.where(is_one, row, 0)
    batch, head = row // work.sizes.heads_q, row % work.sizes.heads_q
    if how.ORDERED:
        shortest = nth_shortest(block // how.TOGETHER, work, batch, head)
        block = shortest * how.TOGETHER + block % how.TOGETHER
    else:
        if how.BY_KEY:
            # A block's length grows with its number for queries. For keys the first ones are the long ones.
            block = work.blocks - 1 - block
    return is_one, block, batch, head, row


@gluon.jit
def list_of_wide_block(work, batch, head, block, how: gl.constexpr):
    """Return the address of the list that TOGETHER blocks share, or None."""
    return list_of(work.Lists, batch, head, block // how.TOGETHER, work.lists)


@gluon.jit
def wide_visits(List, block, sizes, how: gl.constexpr):
    """Return partial, first, second, full_first and full_last of `Visits`: one tile at least, even if none of its pairs is allowed."""
    if how.BY_KEY:
        partial, first, second, full_first, full_last = queries_to_visit(List, block * how.BLOCK_N, sizes, how)
    else:
        partial, first, second, full_first, full_last = keys_to_visit(List, block * how.BLOCK_M, sizes, how)
    is_none = partial + full_last <= full_first
    return gl.where(is_none, 1, partial), gl.where(is_none, 0, first), second, full_first, full_last
