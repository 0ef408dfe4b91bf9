"""Lists of the tiles of the scores that a kernel has to visit, as graph nodes: made once for each distinct mask of a graph.

One op makes the lists from the operands that the kernels read anyway (listing.py; see `Plan` for their form). Only a dense mask is
evaluated pair by pair: as (B|1, Hq|1, nQ, 32, nK, 32), reduced over the two inner axes by the kernel that reads it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from attn_compiler.lowerings.base import Emitter, Tile, Tiles
from attn_compiler.lowerings.shared.ops.listing import HOLES, OPEN, SOME, UNIT
from attn_compiler.lowerings.shared.parts.kernel_plan import Band

aten = torch.ops.aten

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
        """Key for which two masks are equal."""
        return self.seqlen_q, self.seqlen_kv, self.band, self.rows, self.keys, self.documents, self.mask


def lists(emitter: Emitter, masking: Masking, tiles: Tiles, *, by_key: bool, ordered: bool = False) -> fx.Node:
    """Return int32 (B|1, Hq|1, n + 1, m + 4): for each block of queries (by_key: of keys) which blocks of the other side to visit.

    Tiles are the forward's (by_key: those of the gradients of k and v). n and m are the numbers of blocks; the last list means nothing.
    ordered: the kernel is persistent, and reads which lists are long.
    """
    tile = tiles.grad_kv if by_key else tiles.forward
    key = ("triton tiles", masking.parts, tile.queries, tile.keys, by_key, ordered)
    return emitter.once(key, lambda: _listed(emitter, masking, tile, by_key=by_key, ordered=ordered))


def _listed(emitter: Emitter, masking: Masking, tile: Tile, *, by_key: bool, ordered: bool) -> fx.Node:
    units = None
    if masking.mask is not None:
        key = ("triton tiles: units", masking.mask, masking.seqlen_q, masking.seqlen_kv)
        units = emitter.once(key, lambda: _Units(emitter, masking).summarise(masking.mask))
    documents = (None, None) if masking.documents is None else masking.documents
    band = Band() if masking.band is None else masking.band
    left, right = (OPEN if side is None else max(-OPEN, min(side, OPEN)) for side in (band.left, band.right))
    return emitter.call(
        torch.ops.attn_compiler.tile_lists.default,
        *(masking.rows, masking.keys, *documents, units),
        *(masking.seqlen_q, masking.seqlen_kv, left, right, band.from_end),
        *(tile.queries, tile.keys, by_key, ordered),
    )


class _Units:
    """Summary of a dense mask for each UNIT × UNIT pairs: one kernel, shared by all tile sizes."""

    def __init__(self, emitter: Emitter, masking: Masking) -> None:
        self._emitter = emitter
        self._device = masking.device
        self._sizes = (masking.seqlen_q, masking.seqlen_kv)

    def summarise(self, mask: Any) -> fx.Node:
        """Summarise bool (B|1, Hq|1, Sq|1, Skv|1) by `SOME` and `HOLES`: uint8 (B|1, Hq|1, nQ, nK), one more for a symbolic size."""
        queries, keys = (self._clamped(self._indices(size), mask, 2 + i) for i, size in enumerate(self._sizes))
        queries = self._call(torch.unsqueeze, self._call(torch.unsqueeze, queries, -1), -1)
        pairs = self._call(aten.index.Tensor, mask, [None, None, queries, keys])
        holes = self._call(torch.logical_not, pairs)
        return self._call(torch.add, self._any(pairs, SOME), self._any(holes, HOLES))

    def _any(self, pairs: fx.Node, bit: int) -> fx.Node:
        found = self._call(torch.any, pairs, dim=(3, 5))
        return self._call(torch.mul, self._call(torch.Tensor.to, found, torch.uint8), bit)

    def _indices(self, size: Size) -> fx.Node:
        """Return positions, int64 (units, UNIT): 0, 1, …"""

        def make() -> fx.Node:
            starts = self._call(torch.mul, self._call(torch.arange, self._units(size), device=self._device), UNIT)
            inner = self._call(torch.arange, UNIT, device=self._device)
            return self._call(torch.add, self._call(torch.unsqueeze, starts, -1), inner)

        return self._once("indices", (size, self._device), make)

    def _units(self, size: Size) -> Size:
        """Return the number of units, and one more for a symbolic size: an axis that may be of size one would be guarded on."""
        if isinstance(size, int):
            return -(-size // UNIT)
        return self._number(operator.floordiv, self._number(operator.add, size, 2 * UNIT - 1), UNIT)

    def _clamped(self, index: fx.Node, x: fx.Node, axis: int) -> fx.Node:
        """Clamp an index to an axis of x, which may have one element for all."""
        size = self._emitter.value(x).shape[axis]
        if isinstance(size, int):
            return self._call(torch.clamp, index, max=size - 1)
        node = self._once("size", (x, axis), lambda: self._call(aten.sym_size.int, x, axis))
        return self._call(torch.clamp, index, max=self._number(operator.sub, node, 1))

    def _number(self, function: Callable[..., Any], size: fx.Node, by: int) -> fx.Node:
        """Compute a size once, so that nodes made from equal sizes are shared, too."""
        return self._once("number", (function, size, by), lambda: self._call(function, size, by))

    def _once(self, name: str, made_from: tuple[object, ...], make: Callable[[], fx.Node]) -> fx.Node:
        return self._emitter.once((f"triton tiles: {name}", made_from), make)

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self._emitter.call(function, *args, **kwargs)
