"""Who adds to a tile of dq before whom, and in which order a block visits its tiles, run in PyTorch (gluon_in_torch.py)."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from attn_compiler.lowerings.hopper.kernels import grad_fetching_sm90, in_order_sm90
from attn_compiler.lowerings.hopper.kernels.tuples import Visits
from tests.lowerings.shared.kernels import gluon_in_torch

QUERIES, KEYS = 64, 128


def _how(**given: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        BLOCK_M=QUERIES, BLOCK_N=KEYS, **{"HAS_LEFT": False, "HAS_RIGHT": False, "MASK_ALL": False, **given}
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
    for block in range(-(-lengths[1] // KEYS)):
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
