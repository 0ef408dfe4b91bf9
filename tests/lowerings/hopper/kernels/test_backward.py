"""Parts of the backward for Hopper and of wide heads, run in PyTorch (gluon_in_torch.py); the kernels around it in Triton's interpreter."""

from __future__ import annotations

import math
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_compiler.lowerings.hopper.kernels import (
    around_backward,
    grad_fetching_sm90,
    grad_tiles_sm90,
    in_order_sm90,
    visiting,
)
from attn_compiler.lowerings.hopper.kernels.tuples import Visits
from attn_compiler.lowerings.shared.calls.arguments import strides
from attn_compiler.lowerings.shared.kernels.tuples import ListStrides
from tests.lowerings.shared.kernels import gluon_in_torch

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

# The kernels around Hopper's backward, in Triton's interpreter.
BATCH, HEADS, LENGTH, HEAD_DIM, ROWS = 2, 3, 70, 72, 128
BLOCK = 64


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def test_row_stats_and_zeros() -> None:
    out, grad_out = _random(BATCH, HEADS, LENGTH, HEAD_DIM), 2 * _random(BATCH, HEADS, LENGTH, HEAD_DIM)
    lse, grad_lse = _random(BATCH, HEADS, LENGTH), 3 * _random(BATCH, HEADS, LENGTH)
    out[0, 0, 5], lse[0, 0, 5], grad_out[0, 0, 5] = 0.0, -torch.inf, torch.nan
    stats = torch.full((BATCH, HEADS, 2, ROWS), torch.nan)
    sums = torch.full((BATCH, HEADS, LENGTH, HEAD_DIM), torch.nan)
    flag = torch.tensor([7, 9], dtype=torch.int32)
    turns = torch.full((BATCH, HEADS, ROWS // BLOCK), 5, dtype=torch.int32)
    around_backward.attention_before_backward[ROWS // BLOCK, HEADS, BATCH](
        out, grad_out, lse, grad_lse, stats, sums, flag, turns, strides("o", out)["stride_o"], strides("g", grad_out)["stride_g"],
        HEADS, LENGTH, ROWS, BLOCK, HEAD_DIM, 128, HEAD_DIM, 128, 1,
    )  # fmt: skip
    wanted = (out * grad_out.nan_to_num()).sum(-1) - grad_lse
    wanted[0, 0, 5] = 0.0
    torch.testing.assert_close(stats[:, :, 0, :LENGTH], torch.where(lse == -torch.inf, lse, -lse / math.log(2)))
    torch.testing.assert_close(stats[:, :, 1, :LENGTH], wanted)
    assert (stats[:, :, 0, LENGTH:] == -torch.inf).all()
    assert not sums.any()
    assert not flag.any()
    assert not turns.any()


@pytest.mark.parametrize("is_ordered", [False, True])
def test_ranks_count_the_blocks_that_come_before(is_ordered: bool) -> None:
    """Of 5 blocks and 21 tiles, which is no multiple of what a program takes."""
    heads, blocks, tiles = 2, 5, 21
    generator = torch.Generator().manual_seed(0)
    kind = torch.randint(0, 3, (1, heads, blocks, tiles), generator=generator)
    first = torch.randint(0, tiles, (1, heads, blocks, 1), generator=generator)
    at = torch.arange(tiles)
    # 0: not visited, 1: listed, 2: in a run
    kind = torch.where((at >= first) & (at < first + 4), 2, kind % 2)
    lists = torch.full((1, heads, blocks + 1, tiles + 4), -7, dtype=torch.int32)
    for head in range(heads):
        for block in range(blocks):
            listed, run = ((kind[0, head, block] == each).nonzero().flatten() for each in (1, 2))
            header = torch.tensor([len(listed), int(run[0]), int(run[-1]) + 1])
            lists[0, head, block, : 3 + len(listed)] = torch.cat([header, listed])
        order = torch.randperm(blocks, generator=generator)
        lists[0, head, :blocks, -1] = order
    ranks = torch.full_like(lists, -9)
    around_backward.attention_ranks[2, heads, 1](
        lists, ranks, ListStrides(*lists.stride()[:3]), blocks, tiles, is_ordered, 16, 8
    )
    for head in range(heads):
        order = lists[0, head, :blocks, -1].flip(0).tolist() if is_ordered else list(range(blocks))
        seen = torch.zeros(tiles, dtype=torch.int32)
        for block in order:
            assert torch.equal(ranks[0, head, block, :tiles], seen)
            seen += (kind[0, head, block] > 0).int()


@pytest.mark.parametrize("marks", [False, True])
@pytest.mark.parametrize("is_right", [False, True])
def test_dq_is_its_sums_times_the_scale(marks: bool, is_right: bool) -> None:
    sums = _random(BATCH, HEADS, LENGTH, HEAD_DIM)
    if not is_right:
        sums[1, 2, 69, 71] = torch.nan
    grad = torch.empty(BATCH, LENGTH, HEADS, HEAD_DIM).transpose(1, 2)
    flag = torch.zeros(2, dtype=torch.int32)
    around_backward.attention_after_backward[2, HEADS, BATCH](
        sums, grad, flag, strides("dq", grad)["stride_dq"], HEADS, LENGTH, 0.25, BLOCK, HEAD_DIM, 128, 1, marks
    )
    torch.testing.assert_close(grad, sums * 0.25, equal_nan=True)
    assert flag.tolist() == [int(marks and not is_right), 0]


def test_sums_over_groups_of_heads() -> None:
    each = _random(BATCH, HEADS * 2, LENGTH, HEAD_DIM)
    grad = torch.empty(BATCH, HEADS, LENGTH, HEAD_DIM)
    around_backward.attention_sum_groups[2, HEADS, BATCH](
        each, grad, strides("e", each)["stride_e"], strides("d", grad)["stride_d"], LENGTH, 2, BLOCK, HEAD_DIM, 128, 1
    )
    torch.testing.assert_close(grad, each.unflatten(1, (HEADS, 2)).sum(2))


# Which blocks of keys the backward takes, in which order, and which tiles of queries they visit, run in PyTorch (gluon_in_torch.py).
FETCHING_HEADS, FETCHING_BATCH, BLOCKS = 3, 2, 4
#: blocks in the order of their numbers
HOW = types.SimpleNamespace(ORDERED=False, IN_ORDER=False)
#: those of a head one after another
TAKING_TURNS = types.SimpleNamespace(ORDERED=False, IN_ORDER=True)


def scope() -> dict[str, Any]:
    return gluon_in_torch.scope(grad_fetching_sm90, (0,), (1,))


def work(section: int) -> types.SimpleNamespace:
    sizes = types.SimpleNamespace(heads_q=FETCHING_HEADS)
    return types.SimpleNamespace(
        section=section, blocks=BLOCKS, heads_of_all=torch.tensor(FETCHING_HEADS * FETCHING_BATCH), sizes=sizes
    )


@pytest.mark.parametrize("section", [1, 4, 6])
def test_every_block_of_keys_is_one_item(section: int) -> None:
    key_block = scope()["_key_block"]
    found = [
        tuple(map(int, key_block(item, work(section), HOW))) for item in range(BLOCKS * FETCHING_HEADS * FETCHING_BATCH)
    ]
    assert sorted(found) == [
        (i, b, h) for i in range(BLOCKS) for b in range(FETCHING_BATCH) for h in range(FETCHING_HEADS)
    ]


def test_the_long_ones_come_first() -> None:
    """Under a causal mask the first keys have the most queries. Of several sections this holds of the last: what is short ends the work."""
    key_block = scope()["_key_block"]
    all_items = range(BLOCKS * FETCHING_HEADS * FETCHING_BATCH)
    together = [int(key_block(item, work(FETCHING_HEADS * FETCHING_BATCH), HOW)[0]) for item in all_items]
    assert together == sorted(together)
    last_of_six = [int(key_block(item, work(1), HOW)[0]) for item in all_items][-BLOCKS:]
    assert last_of_six == sorted(last_of_six)


@pytest.mark.parametrize("section", [1, 4, 6])
def test_where_they_take_turns_blocks_of_a_head_come_by_their_numbers(section: int) -> None:
    key_block = scope()["_key_block"]
    items = [
        tuple(map(int, key_block(item, work(section), TAKING_TURNS)))
        for item in range(BLOCKS * FETCHING_HEADS * FETCHING_BATCH)
    ]
    for batch in range(FETCHING_BATCH):
        for head in range(FETCHING_HEADS):
            assert [i for i, b, h in items if (b, h) == (batch, head)] == list(range(BLOCKS))


@pytest.mark.parametrize(("block", "masked"), [(0, 1), (1, 1), (2, 1)])
def test_a_block_within_all_keys_masks_its_diagonal_alone(block: int, masked: int) -> None:
    assert _visited(block, seqlen_kv=192) == (masked, 3 - block)


def test_where_keys_end_within_a_block_every_tile_is_masked() -> None:
    masked, visited = _visited(1, seqlen_kv=100)
    assert masked == visited == 2


def _visited(block: int, *, seqlen_kv: int) -> tuple[int, int]:
    """How many tiles of a causal square are masked, and visited. Blocks of 64 of each."""
    sizes = types.SimpleNamespace(
        seqlen_q=torch.tensor(192),
        seqlen_kv=torch.tensor(seqlen_kv),
        band_left=torch.tensor(0),
        band_right=torch.tensor(0),
    )
    given = types.SimpleNamespace(Lists=None, lists=None, sizes=sizes)
    how = types.SimpleNamespace(BLOCK_M=64, BLOCK_N=64, HAS_LEFT=False, HAS_RIGHT=True, MASK_ALL=False)
    partial, _, _, full_first, full_last, masked = scope()["_visits"](given, 0, 0, torch.tensor(block), how)
    return int(masked), int(partial + full_last - full_first)


# The weights of a tile in the backward, (keys, queries), run in PyTorch (gluon_in_torch.py).
KEYS, QUERIES, START = 64, 64, 128
LAYOUTS = types.SimpleNamespace(SCORES=None, SUM=None)
SIZES = types.SimpleNamespace(seqlen_q=START + QUERIES)
NO_MASKS = types.SimpleNamespace(Rows=None, rows_side=0, Documents=None, Bits=None)


def scope_tiles() -> dict[str, Any]:
    return gluon_in_torch.scope(grad_tiles_sm90, (0,), (1,))


def own(keys: Tensor, **further: Any) -> types.SimpleNamespace:
    """A warpgroup's keys. least, most: of the queries that each key is used by."""
    given = {"least": keys * 0, "most": keys * 0 + 10**6, "document": None, "slope": None, "factor": 0.5, "cap": 0.0}
    return types.SimpleNamespace(keys=keys, **{**given, **further})


def how(**further: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(**{"BLOCK_M": QUERIES, "HAS_RIGHT": False, "SOFTCAP": False, **further})


def weights(mine: types.SimpleNamespace, masks: Any = NO_MASKS, *, masked: bool = True, **further: Any) -> Any:
    """Weights, their multiplier for gradients, scores and base."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(KEYS, QUERIES, generator=generator)
    base = torch.randn(QUERIES, generator=generator)
    found = scope_tiles()["weights_of"](scores, START, masked, base, None, mine, masks, SIZES, LAYOUTS, how(**further))
    return *found, scores, base


def test_without_a_mask() -> None:
    found, through, scores, base = weights(own(torch.arange(KEYS)), masked=False)
    torch.testing.assert_close(found, torch.exp2(scores * 0.5 + base))
    assert through is found


def test_a_diagonal_leaves_out_earlier_queries_and_a_window_later_ones() -> None:
    keys = torch.arange(KEYS) + 150
    found, _, scores, base = weights(own(keys, least=keys, most=keys + 20), HAS_RIGHT=True)
    at = torch.arange(QUERIES) + START
    allowed = (at >= keys[:, None]) & (at <= keys[:, None] + 20)
    torch.testing.assert_close(found, torch.exp2(scores * 0.5 + base).where(allowed, 0.0))
    assert allowed.any()
    assert not allowed.all()


def test_intervals_and_documents_of_queries() -> None:
    keys, at = torch.arange(KEYS), torch.arange(START + QUERIES)
    rows = torch.stack((at % 7, 30 + at % 11)).to(torch.int32)
    documents = (at // 13).to(torch.int32)
    of_keys = ((keys + START) // 13).to(torch.int32)
    masks = types.SimpleNamespace(
        Rows=gluon_in_torch.Pointer(rows.view(-1)),
        rows_side=rows.shape[1],
        Documents=gluon_in_torch.Pointer(documents),
        Bits=None,
    )
    found, _, scores, base = weights(own(keys, document=of_keys), masks)
    lower, upper = rows[:, START:]
    allowed = (keys[:, None] >= lower) & (keys[:, None] < upper) & (of_keys[:, None] == documents[START:])
    torch.testing.assert_close(found, torch.exp2(scores * 0.5 + base).where(allowed, 0.0))
    assert allowed.any()
    assert not allowed.all()


def test_a_softcap_shrinks_what_goes_through() -> None:
    found, through, scores, base = weights(own(torch.arange(KEYS), cap=3.0), masked=False, SOFTCAP=True)
    capped = torch.tanh(scores * 0.5)
    torch.testing.assert_close(found, torch.exp2(capped * 3.0 + base), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(through, found * (1 - capped**2), rtol=1e-4, atol=1e-5)


def test_slopes_add_by_the_distance() -> None:
    keys = torch.arange(KEYS) + START - 20
    found, _, scores, base = weights(own(keys, slope=0.01), masked=False)
    distance = keys[:, None] - (torch.arange(QUERIES) + START)
    torch.testing.assert_close(found, torch.exp2(scores * 0.5 + base + 0.01 * distance))


# Who adds to a tile of dq before whom, and in which order a block visits its tiles, run in PyTorch (gluon_in_torch.py).
ORDERED_QUERIES, ORDERED_KEYS = 64, 128


def _how(**given: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        BLOCK_M=ORDERED_QUERIES,
        BLOCK_N=ORDERED_KEYS,
        **{"HAS_LEFT": False, "HAS_RIGHT": False, "MASK_ALL": False, **given},
    )


@pytest.mark.parametrize("lengths", [(700, 700), (700, 300), (130, 900)])
@pytest.mark.parametrize(
    "bounds", [(None, None), (None, 0), (None, -70), (None, 300), (0, 0), (100, 0), (300, 64), (90, None), (-100, 400)]
)
def test_ranks_of_a_band_count_the_blocks_before_that_visit_a_tile(
    bounds: tuple[int | None, int | None], lengths: tuple[int, int]
) -> None:
    left, right = bounds
    sizes = types.SimpleNamespace(
        seqlen_q=torch.tensor(lengths[0]),
        seqlen_kv=torch.tensor(lengths[1]),
        band_left=torch.tensor(left or 0),
        band_right=torch.tensor(right or 0),
    )
    work = types.SimpleNamespace(Lists=None, lists=None, sizes=sizes)
    how = _how(HAS_LEFT=left is not None, HAS_RIGHT=right is not None)
    visits_of = gluon_in_torch.scope(grad_fetching_sm90, (0,), (1,))["_visits"]
    functions = gluon_in_torch.scope(in_order_sm90, (0,), (1,))
    seen: dict[int, int] = {}
    for block in range(-(-lengths[1] // ORDERED_KEYS)):
        partial, first, second, full_first, full_last, _ = visits_of(work, 0, 0, torch.tensor(block), how)
        visits = Visits(
            List=None, partial=partial, first=first, second=second, full_first=full_first, full_last=full_last
        )
        ahead, tiles = torch.tensor(0), []
        for i in range(int(partial + full_last - full_first)):
            tile, ahead = functions["last_first"](torch.tensor(i), visits, ahead)
            tiles.append(int(tile))
            rank = functions["rank"](None, work, 0, 0, torch.tensor(block), tile, how)
            assert int(rank) == seen.get(int(tile), 0)
        assert len(set(tiles)) == len(tiles)
        if left is None:
            assert tiles == sorted(tiles, reverse=True)
        for each in tiles:
            seen[each] = seen.get(each, 0) + 1


@pytest.mark.parametrize(
    ("listed", "run"), [([], (2, 5)), ([0, 3, 7], (0, 0)), ([0, 1, 6], (2, 5)), ([8, 9], (2, 5)), ([0, 1], (4, 6))]
)
def test_listed_tiles_and_the_run_come_from_the_last_one_on(listed: list[int], run: tuple[int, int]) -> None:
    memory = torch.tensor([len(listed), *run, *listed, -7], dtype=torch.int32)
    given = {
        name: torch.tensor(x) for name, x in (("full_first", run[0]), ("full_last", run[1]), ("partial", len(listed)))
    }
    visits = Visits(List=gluon_in_torch.Pointer(memory), first=None, second=None, **given)
    last_first = gluon_in_torch.scope(in_order_sm90, (0,), (1,))["last_first"]
    ahead, found = torch.tensor(0), []
    for i in range(len(listed) + run[1] - run[0]):
        tile, ahead = last_first(torch.tensor(i), visits, ahead)
        found.append(int(tile))
    assert found == sorted([*listed, *range(*run)], reverse=True)


# Which tiles a block visits, run in PyTorch (gluon_in_torch.py).
def _visited_wide(visits: types.SimpleNamespace) -> list[int]:
    """The tiles of a block, in order."""
    nth_tile = gluon_in_torch.scope(visiting, (0,), (1,))["nth_tile"]
    count = visits.partial + visits.full_last - visits.full_first
    return [int(nth_tile(torch.tensor(i), visits)) for i in range(count)]


def test_tiles_that_need_their_mask_come_before_those_that_do_not() -> None:
    """Those of a band lie before and behind the full ones."""
    band = types.SimpleNamespace(List=None, partial=3, first=2, second=2, full_first=4, full_last=9)
    assert _visited_wide(band) == [2, 3, 9, 4, 5, 6, 7, 8]


def test_without_full_tiles_all_need_their_mask() -> None:
    band = types.SimpleNamespace(List=None, partial=2, first=5, second=5, full_first=7, full_last=7)
    assert _visited_wide(band) == [5, 6]


@pytest.mark.parametrize("partial", [0, 1, 2, 4])
def test_a_list_names_them_one_by_one(partial: int) -> None:
    """Whatever is between them. The first two come with the list's head."""
    named = [11, 20, 23, 31][:partial]
    row = torch.tensor([partial, 40, 42, *named, 0, 0], dtype=torch.int32)
    visits = types.SimpleNamespace(
        List=gluon_in_torch.Pointer(row),
        partial=partial,
        first=int(row[3]),
        second=int(row[4]),
        full_first=40,
        full_last=42,
    )
    assert _visited_wide(visits) == [*named, 40, 41]
