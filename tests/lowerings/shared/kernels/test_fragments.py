"""Tiles in the order of a thread's fragments are what lies in memory, whichever machine spreads them how."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_compiler.lowerings.shared.kernels import fragments
from attn_compiler.lowerings.shared.kernels.tuples import Added, Pairs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: keys and queries of a tile
TILES = ((16, 32), (64, 64), (128, 64), (32, 128))
#: of which a tile at (start_q, start_k) goes beyond the end
SEQLEN_Q, SEQLEN_KV = 150, 133
STARTS = ((0, 0), (64, 32), (128, 128))


@triton.jit
def _orders(Keys, Queries, Moved, N: tl.constexpr, M: tl.constexpr):
    tl.store(Keys + tl.arange(0, N), fragments.key_order(N))
    tl.store(Queries + tl.arange(0, M), fragments.query_order(M))
    tl.store(Moved + tl.arange(0, M), fragments.in_query_order(tl.arange(0, M), M))


class Lengths(NamedTuple):
    """Those of `Sizes` that these functions ask for."""

    seqlen_q: Any
    seqlen_kv: Any


@triton.jit
def _load(
    Elements, Distances, Tile, Sums, start_q, start_k, stride_q, stride_k, phase, sizes, N: tl.constexpr, M: tl.constexpr
):  # fmt: skip
    at = tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :]
    pairs = Pairs(base=Elements, q=stride_q, k=stride_k)
    added = Added(bias=pairs, Distances=Distances, phase=phase, slope=None)
    tl.store(Tile + at, fragments.load_fragments(pairs, start_q, start_k, sizes, N, M))
    tl.store(Sums + at, fragments.load_distance_fragments(added, start_q, start_k, sizes, N, M))


@triton.jit
def _store(Tile, Scores, start_q, start_k, pitch, sizes, N: tl.constexpr, M: tl.constexpr):
    tile = tl.load(Tile + tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :])
    fragments.store_fragments(Scores, tile, start_q, start_k, pitch, sizes, N, M)


LENGTHS = Lengths(SEQLEN_Q, SEQLEN_KV)


def orders(n: int, m: int) -> tuple[Tensor, Tensor]:
    """Which keys and queries of a block a tile's rows and columns are."""
    keys, queries, moved = (torch.empty(size, dtype=torch.int32, device=DEVICE) for size in (n, m, m))
    _orders[(1,)](keys, queries, moved, N=n, M=m)
    assert torch.equal(moved, queries)
    return keys.cpu().long(), queries.cpu().long()


def padded(x: Tensor, rows: int, columns: int) -> Tensor:
    """x with zeros beyond its end."""
    made = torch.zeros(rows, columns, dtype=x.dtype)
    made[: x.shape[0], : x.shape[1]] = x
    return made


@pytest.mark.parametrize(("n", "m"), TILES)
def test_each_order_has_every_position_once(n: int, m: int) -> None:
    for found, size in zip(orders(n, m), (n, m), strict=True):
        assert torch.equal(found.sort().values, torch.arange(size))


def test_what_a_thread_holds_are_neighbours_in_memory() -> None:
    """Of a product's result, thread 0 has rows 0 and 8, and of those the columns 0, 1, 8, 9 ... (PTX ISA, wgmma, fragment D)."""
    keys, queries = orders(64, 64)
    assert keys[[0, 8]].tolist() == [0, 1]
    assert queries[[0, 1, 8, 9, 16, 17, 24, 25]].tolist() == list(range(8))


@pytest.mark.parametrize("start", STARTS, ids=str)
@pytest.mark.parametrize(("n", "m"), TILES)
def test_loads(n: int, m: int, start: tuple[int, int]) -> None:
    start_q, start_k = start
    keys, queries = orders(n, m)
    pairs = torch.randn(SEQLEN_Q, SEQLEN_KV, generator=torch.Generator().manual_seed(n))
    distances = torch.randn(288 + 7, generator=torch.Generator().manual_seed(m))
    copies = distances.unfold(0, 288, 1).contiguous()
    tile, sums = (torch.empty(n, m, device=DEVICE) for _ in range(2))
    given: Any = (start_q, start_k, pairs.stride(0), pairs.stride(1), copies.stride(0), LENGTHS)
    _load[(1,)](pairs.to(DEVICE), copies.to(DEVICE), tile, sums, *given, N=n, M=m)

    rows, columns = start_q + queries, start_k + keys
    assert torch.equal(tile.cpu(), padded(pairs, 512, 512)[rows[None, :], columns[:, None]])
    inside = (rows[None, :] < SEQLEN_Q) & (columns[:, None] < SEQLEN_KV)
    expected = distances[(columns[:, None] - rows[None, :] + SEQLEN_Q - 1).clamp(0, 287)]
    assert torch.equal(sums.cpu(), torch.where(inside, expected, 0.0))


@pytest.mark.parametrize("start", STARTS, ids=str)
@pytest.mark.parametrize(("n", "m"), TILES)
def test_stores(n: int, m: int, start: tuple[int, int]) -> None:
    start_q, start_k = start
    keys, queries = orders(n, m)
    pitch = 160
    tile = torch.randn(n, m, generator=torch.Generator().manual_seed(n + m))
    scores = torch.full((SEQLEN_KV, pitch), -9.0, device=DEVICE)
    _store[(1,)](tile.to(DEVICE), scores, start_q, start_k, pitch, LENGTHS, N=n, M=m)

    expected = torch.full((512, 512), -9.0)
    expected[(start_k + keys)[:, None], (start_q + queries)[None, :]] = tile
    expected = expected[:SEQLEN_KV, :pitch].clone()
    expected[:, SEQLEN_Q:] = -9.0
    assert torch.equal(scores.cpu(), expected)
