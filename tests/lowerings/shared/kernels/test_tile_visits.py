"""Which tiles a band visits, held against every pair."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_compiler.lowerings.shared.kernels import tile_visits
from tests.lowerings.kernel_problems import DEVICE

BLOCK = 16


FAR = 1 << 30


@triton.jit
def _keys(Found, left, right, seqlen_q, seqlen_kv, M: tl.constexpr, N: tl.constexpr, L: tl.constexpr, R: tl.constexpr):
    start = tl.program_id(0) * M
    last_query = tl.minimum(start + M, seqlen_q) - 1
    first, full, full_end, end = tile_visits.keys_in_band(start, last_query, left, right, seqlen_kv, N, L, R)
    Found += tl.program_id(0) * 4
    tl.store(Found, first)
    tl.store(Found + 1, full)
    tl.store(Found + 2, full_end)
    tl.store(Found + 3, end)


@triton.jit
def _queries(
    Found, left, right, seqlen_q, seqlen_kv, M: tl.constexpr, N: tl.constexpr, L: tl.constexpr, R: tl.constexpr
):
    start = tl.program_id(0) * N
    last_key = tl.minimum(start + N, seqlen_kv) - 1
    first, full, full_end, end = tile_visits.queries_in_band(start, last_key, left, right, seqlen_q, M, L, R)
    Found += tl.program_id(0) * 4
    tl.store(Found, first)
    tl.store(Found + 1, full)
    tl.store(Found + 2, full_end)
    tl.store(Found + 3, end)


BANDS = (
    (None, None), (None, 0), (0, None), (None, -1), (0, 0), (15, 0), (16, 0), (17, 0), (40, 7), (5, 40), (None, 33), (100, None),
    (-20, None), (-3, 30), (None, -60), (-60, None), (16, 16), (31, -16),
)  # fmt: skip


SIZES = ((70, 70), (64, 64), (1, 50), (50, 1), (33, 101), (101, 33), (16, 16))


@pytest.mark.in_turns
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("by_key", [False, True])
def test_a_band_visits_tiles_with_an_allowed_pair_and_knows_the_full_ones(sizes: tuple[int, int], by_key: bool) -> None:
    for (left, right), block in itertools.product(BANDS, (BLOCK, 2 * BLOCK)):
        allowed = _allowed(sizes, left, right)
        allowed, own, other = (allowed.T, block, BLOCK) if by_key else (allowed, BLOCK, block)
        found = _tiles_of(sizes, left, right, block, by_key=by_key)
        for i, (rows, (first, full, full_end, end)) in enumerate(zip(allowed.split(own), found, strict=True)):
            tiles = list(enumerate(rows.split(other, dim=1)))
            # A tile beyond the last query may count as full, since kernels read zeros there; one beyond the last key may not.
            whole = [j for j, tile in tiles if tile.all() and (by_key or tile.shape[1] == other)]
            where = f"{left=} {right=} {block=} {i=}"
            some = [j for j, tile in tiles if tile.any()]
            # A block of keys that nothing may use may visit one tile in vain.
            assert list(range(first, end)) == some or (by_key and not some and end == first + 1), where
            assert list(range(full, full_end)) == whole, where
            assert first <= full <= full_end <= end, where


def _allowed(sizes: tuple[int, int], left: int | None, right: int | None) -> Tensor:
    queries, keys = torch.arange(sizes[0])[:, None], torch.arange(sizes[1])[None, :]
    return (keys >= queries - (FAR if left is None else left)) & (keys <= queries + (FAR if right is None else right))


def _tiles_of(sizes: tuple[int, int], left: int | None, right: int | None, block: int, *, by_key: bool) -> Any:
    """first, first full, end of the full, end: of each block of 16 queries in blocks of `block` keys, or of each block of `block`
    keys in blocks of 16 queries."""
    kernel, count = (_queries, -(-sizes[1] // block)) if by_key else (_keys, -(-sizes[0] // BLOCK))
    found = torch.empty((count, 4), dtype=torch.int32, device=DEVICE)
    bounds = (FAR if left is None else left, FAR if right is None else right)
    kernel[(count,)](found, *bounds, *sizes, BLOCK, block, left is not None, right is not None)
    return found.tolist()
