"""Which tiles of the scores a kernel has to visit, as graph nodes: made once for each distinct mask of a graph, and no S × S tensor.

The mask is evaluated at (B|1, Hq|1, nQ, 32, nK, 32) and reduced over the two inner axes where it is computed. What larger tiles
hold follows from those of 32 × 32, and one op makes the lists from that (listing.py; see `Plan` for their form).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import fx

import attn_compiler.lowerings.shared.listing  # noqa: F401 (registers the op)
from attn_compiler.lowerings.base import Emitter, Tile, Tiles
from attn_compiler.lowerings.shared.kernel_plan import Band

aten = torch.ops.aten

#: queries and keys of the smallest tile: every tile is made of these
UNIT = 32

Size = int | fx.Node


@dataclass(frozen=True, kw_only=True)
class Masking:
    """A mask as the kernels apply it: its band, and the nodes of its operands (see `Plan`). All of it must hold."""

    device: torch.device
    seqlen_q: Size
    seqlen_kv: Size
    band: Band | None = None
    rows: fx.Node | None = None
    keys: fx.Node | None = None
    documents: tuple[fx.Node, fx.Node] | None = None
    mask: fx.Node | None = None

    @property
    def parts(self) -> tuple[object, ...]:
        """What makes two masks the same."""
        return self.seqlen_q, self.seqlen_kv, self.band, self.rows, self.keys, self.documents, self.mask


def lists(emitter: Emitter, masking: Masking, tiles: Tiles, *, by_key: bool) -> fx.Node:
    """int32 (B|1, Hq|1, n, m + 3): for each block of queries (by_key: of keys) which blocks of the other side to visit.

    Tiles are the forward's (by_key: those of the gradients of k and v). n and m are the numbers of blocks; for a symbolic size
    they may be some more, which have no allowed pair. The rest of a list means nothing.
    """
    tile = tiles.grad_kv if by_key else tiles.forward
    step = (math.lcm(tiles.forward.queries, tiles.grad_kv.queries), math.lcm(tiles.forward.keys, tiles.grad_kv.keys))
    key = ("triton tiles", masking.parts, step, tile.queries, tile.keys, by_key)
    return emitter.once(key, lambda: _Lists(emitter, masking, step).of(tile, by_key=by_key))


@dataclass(frozen=True, kw_only=True)
class _States:
    """bool (B|1, Hq|1, nQ, nK). some: a pair of the tile is allowed. holes: a query of it may not use a key, or there is no such key.

    A query that there is not counts for neither: kernels read zeros there. They read no keys beyond the last, so a tile that goes
    beyond it is none that is allowed in full.
    """

    some: fx.Node
    holes: fx.Node


class _Lists:
    """step: queries and keys that the grid of small tiles is filled up to, so that it divides into the larger ones."""

    def __init__(self, emitter: Emitter, masking: Masking, step: tuple[int, int]) -> None:
        self._emitter = emitter
        self._masking = masking
        self._step = step

    def of(self, tile: Tile, *, by_key: bool) -> fx.Node:
        states = self._grouped(self._units(), tile)
        return self._call(torch.ops.attn_compiler.tile_lists.default, states.some, states.holes, by_key)

    # ---- states ---------------------------------------------------------------------------------------------------

    def _units(self) -> _States:
        """Of the tiles of 32 × 32, reduced where the mask is computed: one kernel, shared by all tile sizes."""

        def once(name: str, make: Callable[[], fx.Node]) -> fx.Node:
            return self._once(name, (self._masking.parts, self._step), make)

        def reduced(pairs: fx.Node) -> fx.Node:
            there = self._call(torch.logical_and, pairs, once("inside", self._inside))
            return self._call(torch.any, there, dim=(3, 5))

        allowed = once("allowed", self._allowed)
        return _States(
            some=once("some", lambda: reduced(allowed)),
            holes=once("holes", lambda: reduced(self._call(torch.logical_not, allowed))),
        )

    def _grouped(self, units: _States, tile: Tile) -> _States:
        return _States(some=self._any_of(units.some, tile), holes=self._any_of(units.holes, tile))

    def _any_of(self, units: fx.Node, tile: Tile) -> fx.Node:
        """Whether it is so for any of the small tiles that make up a tile. Not by views: that they divide can't be told."""
        queries, keys = (
            self._indices(self._times(steps, step // length), length // UNIT)
            for steps, step, length in zip(self._all_steps(), self._step, (tile.queries, tile.keys), strict=True)
        )
        at = [None, None, self._unsqueezed(self._unsqueezed(queries)), keys]
        states = self._call(torch.any, self._call(aten.index.Tensor, units, at), dim=(3, 5))
        for axis, size, length in ((2, self._masking.seqlen_q, tile.queries), (3, self._masking.seqlen_kv, tile.keys)):
            if isinstance(size, int):
                states = self._narrowed(states, axis, -(-size // length))
        return states

    def _narrowed(self, states: fx.Node, axis: int, length: int) -> fx.Node:
        if self._emitter.value(states).shape[axis] == length:
            return states
        return self._call(aten.slice.Tensor, states, axis, 0, length)

    # ---- the mask -------------------------------------------------------------------------------------------------

    def _allowed(self) -> fx.Node:
        """bool, broadcasts to (B, Hq, nQ, 32, nK, 32): whether a pair is allowed; anything where there is no such query."""
        conditions = [*self._in_band(), *self._in_rows(), *self._among_keys(), *self._in_documents(), *self._in_mask()]
        there = self._call(torch.lt, self._key(), self._masking.seqlen_kv)
        return reduce(lambda a, b: self._call(torch.logical_and, a, b), conditions, there)

    def _in_band(self) -> list[fx.Node]:
        band = self._masking.band
        if band is None:
            return []
        query, key = self._query(), self._key()
        if band.from_end:
            query = self._call(torch.sub, self._call(torch.add, query, self._masking.seqlen_kv), self._masking.seqlen_q)
        found = []
        if band.left is not None:
            found.append(self._call(torch.ge, key, self._call(torch.sub, query, band.left)))
        if band.right is not None:
            found.append(self._call(torch.le, key, self._call(torch.add, query, band.right)))
        return found

    def _in_rows(self) -> list[fx.Node]:
        rows = self._masking.rows
        if rows is None:
            return []
        first, end = (self._of_queries(self._call(aten.select.int, rows, 0, i)) for i in range(2))
        key = self._key()
        return [self._call(torch.ge, key, first), self._call(torch.lt, key, end)]

    def _among_keys(self) -> list[fx.Node]:
        keys = self._masking.keys
        return [] if keys is None else [self._of_keys(keys)]

    def _in_documents(self) -> list[fx.Node]:
        documents = self._masking.documents
        if documents is None:
            return []
        return [self._call(torch.eq, self._of_queries(documents[0]), self._of_keys(documents[1]))]

    def _in_mask(self) -> list[fx.Node]:
        mask = self._masking.mask
        if mask is None:
            return []
        query, key = (self._clamped(index, mask, axis) for index, axis in ((self._query(), 2), (self._key(), 3)))
        return [self._call(aten.index.Tensor, mask, [None, None, query, key])]

    def _inside(self) -> fx.Node:
        """Which queries there are: the last tiles go beyond them."""
        return self._call(torch.lt, self._query(), self._masking.seqlen_q)

    def _of_queries(self, x: fx.Node) -> fx.Node:
        """(B|1, Sq) -> (B|1, 1, nQ, 32, 1, 1)"""
        found = self._call(aten.index.Tensor, x, [None, self._clamped(self._query(), x, 1)])
        return self._call(torch.unsqueeze, found, 1)

    def _of_keys(self, x: fx.Node) -> fx.Node:
        """(B|1, Skv) -> (B|1, 1, 1, 1, nK, 32)"""
        found = self._call(aten.index.Tensor, x, [None, self._clamped(self._key(), x, 1)])
        for _ in range(3):
            found = self._call(torch.unsqueeze, found, 1)
        return found

    # ---- indices --------------------------------------------------------------------------------------------------

    def _query(self) -> fx.Node:
        """int64 (nQ, 32, 1, 1)"""
        queries = self._indices(self._grid()[0], UNIT)
        return self._once("queries", (queries,), lambda: self._unsqueezed(self._unsqueezed(queries)))

    def _key(self) -> fx.Node:
        """int64 (nK, 32)"""
        return self._indices(self._grid()[1], UNIT)

    def _indices(self, blocks: Size, length: int) -> fx.Node:
        """int64 (blocks, length): 0, 1, …"""

        def make() -> fx.Node:
            starts = self._call(torch.mul, self._call(torch.arange, blocks, device=self._masking.device), length)
            inner = self._call(torch.arange, length, device=self._masking.device)
            return self._call(torch.add, self._unsqueezed(starts), inner)

        return self._once("indices", (blocks, length, self._masking.device), make)

    def _unsqueezed(self, x: fx.Node) -> fx.Node:
        return self._call(torch.unsqueeze, x, -1)

    def _clamped(self, index: fx.Node, x: fx.Node, axis: int) -> fx.Node:
        """An index that is inside of an axis of x, along which there may be one element for all."""
        size = self._emitter.value(x).shape[axis]
        last = size - 1 if isinstance(size, int) else self._call(operator.sub, self._size_of(x, axis), 1)
        return self._call(torch.clamp, index, max=last)

    # ---- sizes ----------------------------------------------------------------------------------------------------

    def _grid(self) -> tuple[Size, Size]:
        """How many tiles of 32 queries, and of 32 keys, the grid has."""
        queries, keys = (
            self._times(steps, step // UNIT) for steps, step in zip(self._all_steps(), self._step, strict=True)
        )
        return queries, keys

    def _all_steps(self) -> tuple[Size, Size]:
        return self._steps(self._masking.seqlen_q, self._step[0]), self._steps(self._masking.seqlen_kv, self._step[1])

    def _steps(self, size: Size, step: int) -> Size:
        """One more than needed for a symbolic size: an axis that may be of size one would be guarded on."""
        if isinstance(size, int):
            return -(-size // step)
        divided = self._number(operator.floordiv, self._number(operator.add, size, step - 1), step)
        return self._number(operator.add, divided, 1)

    def _times(self, size: Size, by: int) -> Size:
        return size * by if isinstance(size, int) else self._number(operator.mul, size, by)

    def _number(self, function: Callable[..., Any], size: fx.Node, by: int) -> fx.Node:
        """Numbers are made once, so that what is made from the same ones is the same too."""
        return self._once("number", (function, size, by), lambda: self._call(function, size, by))

    def _size_of(self, x: fx.Node, axis: int) -> fx.Node:
        return self._once("size", (x, axis), lambda: self._call(aten.sym_size.int, x, axis))

    def _once(self, name: str, made_from: tuple[object, ...], make: Callable[[], fx.Node]) -> fx.Node:
        return self._emitter.once((f"triton tiles: {name}", made_from), make)

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self._emitter.call(function, *args, **kwargs)
