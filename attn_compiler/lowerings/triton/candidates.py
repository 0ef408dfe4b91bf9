"""Tiles that are worth measuring (options={"autotune": True}), by dtype, head dim and machine: data, which `candidates` looks up.

The candidates are the tiles that came close to the best when the table was made (shared/tile_table.py, docs/kernels.md), and their
neighbours. Each costs seconds to compile, so there are a handful; the table's own are always among them. What a machine has no room
for fails to compile, and is left out then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from attn_compiler.lowerings.base import Tile
from attn_compiler.lowerings.shared import parts, tile_table
from attn_compiler.spec import dims
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.dtypes import BYTES
from attn_compiler.spec.target import Target


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidates:
    """Tiles to measure, of each kernel. The first one is the table's. grad_q: where dq visits the forward's lists, each has queries
    and keys of one of the forward's."""

    forward: tuple[Tile, ...]
    grad_q: tuple[Tile, ...]
    grad_kv: tuple[Tile, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateRow:
    """For element sizes up to `bytes` and head dims up to `head_dim`, on a GPU from `first_sm` on. seqlen_q: for at most so many
    queries, where their number is known (None: any).

    listed_grad_q: further tiles for dq where it visits the forward's lists, and so needs queries and keys of a forward's tile.
    """

    bytes: int
    head_dim: int
    first_sm: int = 0
    seqlen_q: int | None = None
    forward: tuple[Tile, ...]
    grad_q: tuple[Tile, ...]
    grad_kv: tuple[Tile, ...]
    listed_grad_q: tuple[Tile, ...] = ()


def _tiles(*given: tuple[int, int, int, int], apart: bool = False, registers: int | None = None) -> tuple[Tile, ...]:
    return tuple(
        Tile(queries=q, keys=k, warps=warps, stages=stages, apart=apart, registers=registers)
        for q, k, warps, stages in given
    )


ROWS: tuple[CandidateRow, ...] = (
    # few queries
    CandidateRow(
        bytes=2,
        head_dim=256,
        seqlen_q=32,
        forward=_tiles((32, 32, 4, 2), (32, 64, 4, 2), (32, 64, 4, 3), (32, 128, 4, 2)),
        grad_q=_tiles((32, 32, 4, 2), (32, 64, 4, 2), (32, 64, 4, 3)),
        grad_kv=_tiles((32, 64, 4, 2), (32, 64, 8, 1), (32, 32, 4, 2)),
    ),
    # half precision
    CandidateRow(
        bytes=2,
        head_dim=64,
        forward=(
            *_tiles((64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 3)),
            *_tiles((64, 64, 4, 2), (64, 64, 4, 3), registers=128),
        ),
        grad_q=(
            *_tiles((64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2)),
            *_tiles((64, 64, 4, 3), registers=168),
        ),
        grad_kv=_tiles((64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 8, 2), (32, 128, 8, 2), (64, 128, 8, 3)),
        listed_grad_q=_tiles((128, 64, 4, 3), (128, 64, 8, 2), (128, 128, 8, 3)),
    ),
    CandidateRow(
        bytes=2,
        head_dim=96,
        first_sm=90,
        forward=(
            *_tiles((64, 64, 4, 2), (64, 64, 4, 3), registers=168),
            *_tiles((64, 64, 4, 2), registers=128),
            *_tiles((64, 64, 4, 3), (128, 64, 8, 3)),
        ),
        grad_q=(
            *_tiles((64, 64, 4, 2), registers=168),
            *_tiles((64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 3)),
        ),
        grad_kv=_tiles((64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 8, 3)),
        listed_grad_q=_tiles((128, 64, 8, 2)),
    ),
    CandidateRow(
        bytes=2,
        head_dim=128,
        first_sm=90,
        forward=_tiles((64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 3)),
        grad_q=_tiles((64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3)),
        grad_kv=_tiles(
            (64, 128, 8, 2),
            (64, 128, 8, 3),
            (64, 64, 4, 2),
            (64, 64, 4, 3),
            (32, 128, 8, 3),
            (32, 64, 8, 2),
            (32, 64, 4, 3),
        ),
        listed_grad_q=_tiles((128, 128, 8, 1), (128, 128, 8, 2)),
    ),
    CandidateRow(
        bytes=2,
        head_dim=128,
        forward=_tiles((64, 32, 4, 2), (64, 32, 4, 3), (64, 64, 4, 2), (128, 32, 4, 3), (128, 64, 8, 2)),
        grad_q=_tiles((64, 32, 4, 2), (64, 64, 4, 2), (128, 32, 8, 2)),
        grad_kv=_tiles((64, 64, 8, 1), (64, 64, 4, 2), (32, 64, 8, 2), (32, 128, 8, 2)),
        listed_grad_q=_tiles((64, 64, 4, 1), (128, 32, 4, 2), (128, 64, 8, 1)),
    ),
    CandidateRow(
        bytes=2,
        head_dim=256,
        first_sm=90,
        forward=_tiles((128, 64, 8, 2), (128, 32, 8, 2), (128, 32, 8, 3), (64, 64, 4, 2)),
        grad_q=_tiles((128, 32, 8, 2), (64, 32, 4, 1), (64, 32, 4, 2), (128, 64, 8, 1)),
        grad_kv=(
            *_tiles((32, 32, 4, 2), (32, 64, 8, 2)),
            *_tiles((32, 128, 8, 2), (32, 64, 4, 2), (64, 128, 8, 1), apart=True),
        ),
        listed_grad_q=_tiles((128, 32, 8, 1), (64, 64, 4, 1)),
    ),
    CandidateRow(
        bytes=2,
        head_dim=256,
        forward=_tiles((64, 32, 8, 2), (64, 32, 4, 2), (64, 64, 8, 1), (32, 32, 4, 2)),
        grad_q=_tiles((64, 32, 4, 1), (64, 32, 8, 1), (32, 32, 4, 2)),
        grad_kv=_tiles((32, 32, 8, 2), (32, 64, 8, 1), (32, 32, 4, 2)),
        listed_grad_q=_tiles((64, 64, 8, 1)),
    ),
    # float32
    CandidateRow(
        bytes=4,
        head_dim=64,
        forward=_tiles((64, 32, 8, 2), (64, 32, 4, 2), (32, 32, 8, 1), (64, 64, 8, 1)),
        grad_q=_tiles((32, 32, 8, 1), (64, 32, 8, 1), (64, 32, 4, 1)),
        grad_kv=_tiles((32, 64, 8, 1), (32, 32, 8, 1), (32, 32, 4, 1)),
        listed_grad_q=_tiles((64, 64, 8, 1)),
    ),
    CandidateRow(
        bytes=4,
        head_dim=256,
        forward=_tiles((32, 32, 8, 1), (32, 32, 4, 1), (32, 32, 8, 2), (64, 32, 8, 1)),
        grad_q=_tiles((32, 32, 8, 1), (32, 32, 4, 1), (64, 32, 8, 1)),
        grad_kv=_tiles((32, 32, 8, 1), (32, 64, 8, 1), (32, 32, 4, 1)),
    ),
)


def candidates(spec: AttentionSpec, target: Target) -> Candidates:
    """Of a spec that the Triton lowering takes. Raises LookupError where there are none."""
    table = tile_table.tiles(spec, target)
    row = next((row for row in ROWS if _applies(row, spec, target)), None)
    if row is None:
        raise LookupError(f"no candidates for {spec.dtype} with head dims {spec.head_dim_qk} and {spec.head_dim_v}")
    forward = _unique(table.forward, *row.forward)
    grad_q = _unique(table.grad_q, *row.grad_q)
    if parts.of(spec).tiles:
        visited = {(tile.queries, tile.keys) for tile in forward}
        grad_q = tuple(t for t in _unique(*grad_q, *row.listed_grad_q) if (t.queries, t.keys) in visited)
    return Candidates(forward=forward, grad_q=grad_q, grad_kv=_unique(table.grad_kv, *row.grad_kv))


def _applies(row: CandidateRow, spec: AttentionSpec, target: Target) -> bool:
    head_dims, most = (spec.head_dim_qk, spec.head_dim_v), dims.range_of(spec, spec.seqlen_q)[1]
    fits = all(isinstance(size, int) and size <= row.head_dim for size in head_dims)
    few = row.seqlen_q is None or (most is not None and most <= row.seqlen_q)
    size = BYTES.get(spec.dtype, math.inf)
    return fits and few and size <= row.bytes and tile_table.generation(target) >= row.first_sm


def _unique(*tiles: Tile) -> tuple[Tile, ...]:
    return tuple(dict.fromkeys(tiles))
