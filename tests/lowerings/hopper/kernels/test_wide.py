"""Which tiles the passes of wide heads visit and fetch, run in PyTorch (gluon_in_torch.py)."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from attn_compiler.lowerings.hopper.kernels import visiting, wide_fetching_sm90, wide_visiting_sm90
from tests.lowerings.shared.kernels import gluon_in_torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

# Which parts of tiles are asked for, where they lie, and for which turn of a barrier they wait, run in PyTorch (gluon_in_torch.py).
PARTS, PART, BYTES = 4, 128, 4096


class Places:
    """Barriers, or tiles, by their place."""

    def index(self, place: int) -> int:
        return place


class Seen:
    """Waits as (place, phase), bytes that are expected, and loads as (position, first dim, place of the tile)."""

    def __init__(self) -> None:
        self.waits: list[tuple[Any, int]] = []
        self.expected: list[int] = []
        self.loads: list[tuple[int, int, int]] = []

    def functions(self) -> dict[str, Any]:
        scope = gluon_in_torch.scope(wide_fetching_sm90, (0,), (1,))
        scope["mbarrier"] = types.SimpleNamespace(
            wait=lambda barrier, phase: self.waits.append((barrier, phase)),
            expect=lambda barrier, count: self.expected.append(count),
        )
        scope["async_load"] = lambda of, at, barrier, tile: self.loads.append((at[2], at[3], tile))
        return scope


def of(**fields: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(block_type=types.SimpleNamespace(nbytes=BYTES), **fields)


@pytest.mark.parametrize("stages", [1, 3, 4, 6])
def test_parts_go_round_and_each_place_waits_for_one_turn_after_the_other(stages: int) -> None:
    seen = Seen()
    fetch = seen.functions()["_fetch_others"]
    for n in range(5):
        fetch(of(), 0, 0, 64 * n, n, Places(), Places(), Places(), PARTS, PART, stages)
    assert [(start, dim) for start, dim, _ in seen.loads] == [
        (64 * n, PART * i) for n in range(5) for i in range(PARTS)
    ]
    assert [place for *_, place in seen.loads] == [i % stages for i in range(5 * PARTS)]
    for place in range(stages):
        phases = [phase for at, phase in seen.waits if at == place]
        # The first turn waits for nobody.
        assert phases == [(turn & 1) ^ 1 for turn in range(len(phases))]
    assert seen.expected == [BYTES] * (5 * PARTS)


def test_rows_of_a_block_come_in_all_their_parts_at_one_barrier() -> None:
    seen = Seen()
    fetch = seen.functions()["_fetch_own"]
    for nth in range(3):
        fetch(of(), 0, 0, 128 * nth, nth, Places(), "full", "empty", PARTS, PART)
    assert seen.waits == [("empty", 1), ("empty", 0), ("empty", 1)]
    assert seen.expected == [BYTES * PARTS] * 3
    assert seen.loads == [(128 * nth, PART * i, i) for nth in range(3) for i in range(PARTS)]


# Which tiles the passes of wide heads' backward visit, run in PyTorch (gluon_in_torch.py).
SIZES = types.SimpleNamespace(seqlen_q=320, seqlen_kv=320, band_left=0, band_right=0, heads_q=1)


def _how(**given: object) -> types.SimpleNamespace:
    made = {"BLOCK_M": 64, "BLOCK_N": 32, "TOGETHER": 2, "BY_KEY": False}
    made |= {"HAS_LEFT": False, "HAS_RIGHT": True, "MASK_ALL": False, "ORDERED": False}
    return types.SimpleNamespace(**{**made, **given})


def _visited(how: types.SimpleNamespace, row: list[int] | None, block: int = 0) -> tuple[list[int], int]:
    """The tiles of a block, in order, and how many of them need their mask."""
    scope = gluon_in_torch.scope(wide_visiting_sm90, (0,), (1,))
    scope |= gluon_in_torch.scope(visiting, (0,), (1,))
    List = None if row is None else gluon_in_torch.Pointer(torch.tensor(row, dtype=torch.int32))
    found = scope["wide_visits"](List, torch.tensor(block), SIZES, how)
    names = ("partial", "first", "second", "full_first", "full_last")
    visits = types.SimpleNamespace(List=List, **dict(zip(names, found, strict=True)))
    count = visits.partial + visits.full_last - visits.full_first
    tiles = [int(scope["nth_tile"](torch.tensor(i), visits)) for i in range(int(count))]
    return tiles, int(visits.partial)


def test_a_list_says_which() -> None:
    """How many are used in part, the first and the end of the run, and those that are used in part."""
    assert _visited(_how(), [2, 3, 5, 1, 7, 0, 0, 0]) == ([1, 7, 3, 4], 2)


def test_a_block_that_uses_no_tile_has_one_with_its_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _visited(_how(), [0, 0, 0, 0, 0, 0]) == ([0], 1)
    monkeypatch.setattr(SIZES, "band_right", -200)
    assert _visited(_how(), None, block=1) == ([0], 1)


@pytest.mark.parametrize(("block", "expected"), [(0, [0, 1]), (1, [2, 3, 0, 1]), (4, [8, 9, *range(8)])])
def test_up_to_a_diagonal(block: int, expected: list[int]) -> None:
    assert _visited(_how(), None, block)[0] == expected


@pytest.mark.parametrize(("block", "expected"), [(4, [8, 9]), (3, [6, 7, 8, 9])])
def test_from_a_diagonal_on_by_key(block: int, expected: list[int]) -> None:
    """A block of keys is used by the queries from its own on."""
    how = _how(BY_KEY=True, BLOCK_M=32, BLOCK_N=64)
    assert sorted(_visited(how, None, block)[0]) == expected


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("programs", [1, 3, 7])
def test_all_programs_together_have_each_block_once(programs: int, by_key: bool) -> None:
    sizes = types.SimpleNamespace(heads_q=3)
    work = types.SimpleNamespace(section=2, blocks=5, heads_of_all=6, sizes=sizes, Lists=None, lists=None)
    found = []
    for program in range(programs):
        scope = gluon_in_torch.scope(wide_visiting_sm90, (program,), (programs,))
        for nth in range(-(-30 // programs)):
            is_one, block, batch, head, row = scope["wide_block"](nth, work, _how(BY_KEY=by_key, TOGETHER=1))
            assert int(row) == int(batch) * 3 + int(head)
            found += [(int(block), int(row))] if is_one else []
    assert sorted(found) == [(block, row) for block in range(5) for row in range(6)]


def test_blocks_by_the_lengths_of_the_lists_that_they_share() -> None:
    """The last number of the n-th list says which list is the n-th shortest one."""
    rows = torch.tensor([[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 0]], dtype=torch.int32)
    lists = types.SimpleNamespace(tiles_b=0, tiles_h=0, tiles_row=4)
    sizes = types.SimpleNamespace(heads_q=1)
    work = types.SimpleNamespace(
        section=1, blocks=6, heads_of_all=1, sizes=sizes, Lists=gluon_in_torch.Pointer(rows.view(-1)), lists=lists
    )
    scope = gluon_in_torch.scope(wide_visiting_sm90, (0,), (1,))
    order = [int(scope["wide_block"](nth, work, _how(ORDERED=True))[1]) for nth in range(6)]
    # The longest one first, and both blocks of a list one after the other.
    assert [block // 2 for block in order] == [0, 0, 2, 2, 1, 1]
    assert sorted(order) == list(range(6))
