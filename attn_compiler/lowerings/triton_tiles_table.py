"""Tile sizes of the Triton kernels, by machine, dtype, head dim and length: data, which `tiles` looks up.

Rows are tried in order. Not measured yet: these are the sizes that FlashAttention 2 and Triton's own tutorial start from.
"""

from __future__ import annotations

from dataclasses import dataclass

from attn_compiler.lowerings.triton_plan import Tile, Tiles
from attn_compiler.spec import AttentionSpec
from attn_compiler.target import Target


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Tiles of every spec whose element size is at most `bytes`, whose head dims are at most `head_dim`, with at most `seqlen_q`
    queries (None: any, or not known), on a GPU from `first_sm` on."""

    bytes: int
    head_dim: int
    seqlen_q: int | None = None
    first_sm: int = 0
    tiles: Tiles


def _tile(queries: int, keys: int, warps: int, stages: int) -> Tile:
    return Tile(queries=queries, keys=keys, warps=warps, stages=stages)


def _tiles(forward: Tile, grad_kv: Tile) -> Tiles:
    return Tiles(forward=forward, grad_q=forward, grad_kv=grad_kv)


ROWS: tuple[Row, ...] = (
    # few queries: a decoding step
    Row(bytes=2, head_dim=128, seqlen_q=32, tiles=_tiles(_tile(32, 64, 4, 3), _tile(32, 64, 4, 2))),
    Row(bytes=2, head_dim=256, seqlen_q=32, tiles=_tiles(_tile(32, 64, 4, 2), _tile(32, 64, 8, 1))),
    Row(bytes=4, head_dim=128, seqlen_q=32, tiles=_tiles(_tile(32, 32, 4, 2), _tile(32, 32, 4, 1))),
    Row(bytes=4, head_dim=256, seqlen_q=32, tiles=_tiles(_tile(32, 32, 4, 1), _tile(32, 32, 8, 1))),
    # half precision
    Row(bytes=2, head_dim=64, tiles=_tiles(_tile(128, 64, 4, 3), _tile(64, 128, 8, 2))),
    Row(bytes=2, head_dim=128, tiles=_tiles(_tile(128, 64, 8, 3), _tile(64, 128, 8, 2))),
    Row(bytes=2, head_dim=256, first_sm=90, tiles=_tiles(_tile(128, 64, 8, 2), _tile(64, 64, 8, 1))),
    Row(bytes=2, head_dim=256, tiles=_tiles(_tile(64, 64, 4, 2), _tile(64, 64, 8, 1))),
    # float32
    Row(bytes=4, head_dim=128, tiles=_tiles(_tile(64, 32, 4, 2), _tile(32, 64, 8, 1))),
    Row(bytes=4, head_dim=256, tiles=_tiles(_tile(32, 32, 4, 1), _tile(32, 32, 8, 1))),
)

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def tiles(spec: AttentionSpec, target: Target) -> Tiles:
    """The tiles of a spec that the Triton lowering takes. Raises LookupError where there is no row for it."""
    for row in ROWS:
        if _applies(row, spec, target):
            return row.tiles
    raise LookupError(f"no tiles for {spec.dtype} with head dims {spec.head_dim_qk} and {spec.head_dim_v}")


def _applies(row: Row, spec: AttentionSpec, target: Target) -> bool:
    head_dims, seqlen_q = (spec.head_dim_qk, spec.head_dim_v), spec.seqlen_q
    fits = all(isinstance(size, int) and size <= row.head_dim for size in head_dims)
    few = row.seqlen_q is None or (isinstance(seqlen_q, int) and seqlen_q <= row.seqlen_q)
    return fits and few and _BYTES.get(spec.dtype, 8) <= row.bytes and target.sm >= row.first_sm
