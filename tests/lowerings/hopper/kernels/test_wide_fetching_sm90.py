"""Which parts of tiles are asked for, where they lie, and for which turn of a barrier they wait, run in PyTorch (gluon_in_torch.py)."""

from __future__ import annotations

import types
from typing import Any

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from attn_compiler.lowerings.hopper.kernels import wide_fetching_sm90
from tests.lowerings.shared.kernels import gluon_in_torch

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
