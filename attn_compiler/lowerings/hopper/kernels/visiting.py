"""The order in which a block of queries, or of keys, visits its tiles, in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attn_compiler.lowerings.shared.kernels.optional import list_of
from attn_compiler.lowerings.shared.kernels.tile_visits import partial_tile


@gluon.jit
def nth_tile(i, visits):
    """Return the number of a block's i-th tile."""
    tile = partial_tile(visits.List, i, visits.first, visits.second, visits.full_first, visits.full_last)
    return gl.where(i < visits.partial, tile, visits.full_first + i - visits.partial)


@gluon.jit
def nth_shortest(n, work, batch, head):
    """Return the block with the n-th shortest list of its head."""
    return gl.load(list_of(work.Lists, batch, head, n, work.lists) + (work.lists.tiles_row - 1))
