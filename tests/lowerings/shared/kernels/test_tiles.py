"""Tiles: which a band visits, what all kernels do with one, in which order a thread has it, and lists of them."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings, strategies as st
from torch import Tensor

from attn_compiler.lowerings.shared.kernels import fragments, tile_parts, tile_visits
from attn_compiler.lowerings.shared.kernels.tuples import Added, Pairs
from attn_compiler.lowerings.shared.ops.listing import SURPLUS, TAIL, listed
from tests.lowerings import kernel_problems
from tests.lowerings.kernel_cases import Case
from tests.lowerings.kernel_problems import DEVICE, Problem, build
from tests.lowerings.shared.listed_masks import BANDS as LISTED_BANDS, PARTS, TILES, arguments, asked, masks
from tests.lowerings.shared.searched_tiles import Mask, read, tensors

# Which tiles a band visits, held against every pair.
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


# What all kernels do with one tile.

# ---- the tiles of a band ------------------------------------------------------------------------------------------


# ---- softcap ------------------------------------------------------------------------------------------------------


@triton.jit
def _tanh(X, Y, FAST: tl.constexpr):
    at = tl.arange(0, 1024)
    tl.store(Y + at, tile_parts.tanh(tl.load(X + at), FAST))


@pytest.mark.parametrize(
    ("fast", "allowed"), [(False, 4 * 2.0**-24), pytest.param(True, 2.0**-10.9, marks=pytest.mark.gpu)]
)
@pytest.mark.filterwarnings("ignore:overflow")
def test_tanh(fast: bool, allowed: float) -> None:
    x = torch.cat([torch.linspace(-12, 12, 1020), torch.tensor([torch.inf, -torch.inf, 1e30, -1e30])]).to(DEVICE)
    y = torch.empty_like(x)
    _tanh[(1,)](x, y, fast)
    assert (y.double() - x.double().tanh()).abs().max() <= allowed


# ---- dropout ------------------------------------------------------------------------------------------------------


def _dropped(seed: int, p: float = 0.25) -> tuple[Tensor, Tensor, Problem]:
    """The weights that were used, which is out where v is the identity; and those that would be without dropout."""
    case = Case(name="dropout_identity", heads_kv=2, seqlen_q=64, seqlen_kv=64, head_dim_v=64, dropout_p=p)
    problem = build(case)
    identity = torch.eye(64, device=problem.v.device).expand_as(problem.v).contiguous().requires_grad_()
    problem = dataclasses.replace(problem, v=identity)
    problem.named["seed"].fill_(seed)
    kept = dataclasses.replace(case, dropout_p=0.0)
    undropped = build(kept)
    used, _ = kernel_problems.outputs(problem)
    whole, _ = kernel_problems.outputs(dataclasses.replace(undropped, q=problem.q, k=problem.k, v=identity))
    return used.detach(), whole.detach(), problem


def test_dropout_drops_as_many_as_it_is_told_and_scales_the_rest() -> None:
    used, whole, problem = _dropped(1)
    kept = used != 0
    assert torch.equal(kept, kernel_problems.drawn(problem))
    # 16384 draws: four standard deviations of their mean.
    assert abs(kept.float().mean().item() - 0.75) < 4 * (0.75 * 0.25 / kept.numel()) ** 0.5
    assert torch.allclose(used, whole / 0.75 * kept, atol=1e-6)
    # Every query, key and head has draws of its own.
    for axis in (0, 1, 2, 3):
        first, second = kept.select(axis, 0), kept.select(axis, 1)
        assert not torch.equal(first, second)


def test_dropout_follows_the_seed_all_64_bits_of_it() -> None:
    first, again, low, high = (_dropped(seed)[0] for seed in (1, 1, 2, 1 + 2**32))
    assert torch.equal(first, again)
    assert not torch.equal(first != 0, low != 0)
    assert not torch.equal(first != 0, high != 0)


# The kernels that make lists of tiles against PyTorch's ops, and against a search through all pairs where there is a GPU.
launch = pytest.importorskip("attn_compiler.lowerings.shared.calls.listing_launch")


@settings(deadline=None, max_examples=30)
@given(masks(), st.sampled_from(TILES), st.booleans())
def test_the_kernel_against_ops(mask: Mask, tile: tuple[int, int], by_key: bool) -> None:
    given_ = arguments(asked(mask, tile, by_key=by_key))
    ours, theirs = launch.lists(*given_), listed(*given_)
    assert read(ours) == read(theirs)
    assert torch.equal(ours[:, :, :-SURPLUS, -TAIL:], theirs[:, :, :-SURPLUS, -TAIL:])


@pytest.mark.in_turns
@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("name", ["keys", "rows"])
def test_the_kernel_takes_many_blocks_in_several_steps(by_key: bool, name: str) -> None:
    length = 32 * 301 - 5
    have = tensors(*((length, 40) if by_key else (40, length)), (name,), seed=3)
    mask = Mask(seqlen_q=length if by_key else 40, seqlen_kv=40 if by_key else length, band=None, have=have)
    given_ = arguments(asked(mask, (32, 32), by_key=by_key))
    ours, theirs = launch.lists(*given_), listed(*given_)
    assert read(ours) == read(theirs)
    assert torch.equal(ours[:, :, :-SURPLUS, -TAIL:], theirs[:, :, :-SURPLUS, -TAIL:])


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(1, 1), (70, 150), (513, 4100), (4100, 513)])
@pytest.mark.parametrize("names", [*PARTS, tuple(itertools.chain(*PARTS))])
@pytest.mark.parametrize("by_key", [False, True])
def test_the_kernel_on_a_gpu(sizes: tuple[int, int], names: tuple[str, ...], by_key: bool) -> None:
    for band, tile in itertools.product(LISTED_BANDS, TILES):
        mask = Mask(seqlen_q=sizes[0], seqlen_kv=sizes[1], band=band, have=tensors(*sizes, names))
        given_ = arguments(asked(mask, tile, by_key=by_key))
        found = torch.ops.attn_compiler.tile_lists(*[x.cuda() if isinstance(x, Tensor) else x for x in given_])
        assert read(found.cpu()) == read(listed(*given_))


# Tiles in the order of a thread's fragments are what lies in memory, whichever machine spreads them how.
#: keys and queries of a tile
FRAGMENTS_TILES = ((16, 32), (64, 64), (128, 64), (32, 128))
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


@pytest.mark.parametrize(("n", "m"), FRAGMENTS_TILES)
def test_each_order_has_every_position_once(n: int, m: int) -> None:
    for found, size in zip(orders(n, m), (n, m), strict=True):
        assert torch.equal(found.sort().values, torch.arange(size))


def test_what_a_thread_holds_are_neighbours_in_memory() -> None:
    """Of a product's result, thread 0 has rows 0 and 8, and of those the columns 0, 1, 8, 9 ... (PTX ISA, wgmma, fragment D)."""
    keys, queries = orders(64, 64)
    assert keys[[0, 8]].tolist() == [0, 1]
    assert queries[[0, 1, 8, 9, 16, 17, 24, 25]].tolist() == list(range(8))


@pytest.mark.parametrize("start", STARTS, ids=str)
@pytest.mark.parametrize(("n", "m"), FRAGMENTS_TILES)
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
@pytest.mark.parametrize(("n", "m"), FRAGMENTS_TILES)
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
