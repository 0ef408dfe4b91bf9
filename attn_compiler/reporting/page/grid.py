"""Data of a mask's drawing: the allowed pairs at some queries and keys, and the tiles that a kernel may skip."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from attn_compiler.index_expr.on_tensors import evaluate_on
from attn_compiler.reporting.page.examples import Drawable

#: queries, and keys, of a tile; a multiple for long sequences, so that there are no more than _MOST_TILES a side
TILE = 128
_MOST_TILES = 256
#: sampled queries, and keys, of the picture
_CELLS = 128
#: the most pairs times parts of the expression in all (a second or so), and the most pairs at once
_WORK, _AT_ONCE = 2**29, 2**20

SKIPPED, PARTLY, FULLY = range(3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Drawing data of one batch row and head.

    cells: for some queries, True for each allowed key of some keys; both are spread evenly.
    tile: queries, and keys, of a tile.
    tiles: for each row of tiles SKIPPED, PARTLY or FULLY.
    share: of allowed pairs.
    exact: every pair was evaluated; else some of each tile, its corners among them.
    """

    seqlen_q: int
    seqlen_kv: int
    cells: tuple[tuple[bool, ...], ...]
    tile: int
    tiles: tuple[tuple[int, ...], ...]
    share: float
    exact: bool

    def count(self, which: int) -> int:
        """Return the number of tiles that are SKIPPED, PARTLY or FULLY computed."""
        return sum(row.count(which) for row in self.tiles)

    @property
    def num_tiles(self) -> int:
        return sum(map(len, self.tiles))


def grid_of(mask: Drawable) -> Grid:
    """Evaluate the mask's expression, on the CPU."""
    tile = TILE
    while max(mask.seqlen_q, mask.seqlen_kv) > tile * _MOST_TILES:
        tile *= 2
    tiles_q, tiles_kv = -(-mask.seqlen_q // tile), -(-mask.seqlen_kv // tile)
    points = tile
    while points > 2 and tiles_q * tiles_kv * points**2 * mask.condition.facts.size > _WORK:
        points //= 2
    rows: list[tuple[int, ...]] = []
    taking_part = 0.0
    for some, every, share in _tile_rows(mask, tile, points):
        rows += [tuple(row) for row in (some.to(torch.int64) + every.to(torch.int64)).tolist()]
        taking_part += share
    queries, keys = (_spread(length, min(length, _CELLS)) for length in (mask.seqlen_q, mask.seqlen_kv))
    return Grid(
        seqlen_q=mask.seqlen_q,
        seqlen_kv=mask.seqlen_kv,
        cells=tuple(tuple(row) for row in _allowed(mask, queries, keys).tolist()),
        tile=tile,
        tiles=tuple(rows),
        share=taking_part / (mask.seqlen_q * mask.seqlen_kv),
        exact=points == tile,
    )


def _spread(length: int, count: int) -> torch.Tensor:
    """Return the middles of so many equal parts of 0 .. length - 1."""
    return (2 * torch.arange(count, device="cpu") + 1) * length // (2 * count)


def _tile_rows(mask: Drawable, tile: int, points: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
    """Yield, for batches of tile rows, the tiles with any allowed pair, those with all allowed, and the number of allowed pairs."""
    keys, key_weights = _points(mask.seqlen_kv, tile, points)
    queries, query_weights = _points(mask.seqlen_q, tile, points)
    at_once = max(1, _AT_ONCE // (keys.numel() * points))
    for begin in range(0, queries.shape[0], at_once):
        own, weights = queries[begin : begin + at_once], query_weights[begin : begin + at_once]
        allowed = _allowed(mask, own.flatten(), keys.flatten())
        of_queries = (allowed.to(torch.float32) @ key_weights.flatten()).to(torch.float64)
        by_tile = allowed.view(*own.shape, *keys.shape)
        yield by_tile.any(3).any(1), by_tile.all(3).all(1), float(of_queries @ weights.flatten().to(torch.float64))


def _points(length: int, tile: int, points: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sampled positions of each tile, with the first and the last one, and the weight of each position."""
    first = torch.arange(0, length, tile, device="cpu")[:, None]
    sizes = (length - first).clamp(max=tile)
    places = torch.arange(points, device="cpu")[None, :]
    if points == tile:
        return first + torch.minimum(places, sizes - 1), (places < sizes).to(torch.float32)
    spread = torch.div(places * (sizes - 1), points - 1, rounding_mode="floor")
    return first + spread, (sizes.to(torch.float32) / points).expand(-1, points).contiguous()


def _allowed(mask: Drawable, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    values: Mapping[str, int | torch.Tensor] = {
        **mask.sizes,
        "b": 0,
        "h": 0,
        "q": queries[:, None],
        "k": keys[None, :],
    }
    found = evaluate_on(mask.condition, values, {})
    return found.expand(queries.numel(), keys.numel()).contiguous()
