"""Tiles and their counts, held against every pair."""

from __future__ import annotations

import pytest
import torch

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr, Index
from attn_compiler.reporting.page import grid
from attn_compiler.reporting.page.examples import Drawable
from attn_compiler.reporting.page.grid import FULLY, PARTLY, SKIPPED, grid_of

K, Q = Index("k"), Index("q")
CAUSAL = ix.compare("<=", K, Q)
WINDOW = ix.apply("and", CAUSAL, ix.compare(">=", K, ix.add(Q, Const(-200))))
ODD = ix.compare("==", ix.apply("mod", ix.add(Q, K), Const(7)), Const(0))


def _drawable(condition: Expr, seqlen_q: int, seqlen_kv: int) -> Drawable:
    return Drawable(condition=condition, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, sizes={})


@pytest.mark.in_turns
@pytest.mark.parametrize("sizes", [(256, 256), (150, 400), (1, 300), (300, 1), (1, 1), (129, 127)], ids=str)
@pytest.mark.parametrize(
    "condition", [CAUSAL, WINDOW, ODD, ix.TRUE, ix.FALSE], ids=["causal", "window", "odd", "all", "none"]
)
def test_tiles_and_share_are_those_of_all_pairs(condition: Expr, sizes: tuple[int, int]) -> None:
    seqlen_q, seqlen_kv = sizes
    found = grid_of(_drawable(condition, seqlen_q, seqlen_kv))
    pairs = torch.tensor(
        [
            [bool(ix.evaluate(condition, {"q": q, "k": k}, lambda *_: None)) for k in range(seqlen_kv)]
            for q in range(seqlen_q)
        ]
    )
    wanted = [[int(tile.any()) + int(tile.all()) for tile in row.split(128, dim=1)] for row in pairs.split(128, dim=0)]
    assert [list(row) for row in found.tiles] == wanted
    assert found.share == pytest.approx(float(pairs.double().mean()))
    assert found.exact
    assert found.num_tiles == sum(found.count(kind) for kind in (SKIPPED, PARTLY, FULLY))


def test_cells_are_pairs_where_there_are_few_and_spread_where_there_are_many() -> None:
    few = grid_of(_drawable(CAUSAL, 3, 4)).cells
    assert few == ((True, False, False, False), (True, True, False, False), (True, True, True, False))
    many = grid_of(_drawable(CAUSAL, 1280, 1280)).cells
    assert (len(many), len(many[0])) == (128, 128)
    assert all(cell == (key <= query) for query, row in enumerate(many) for key, cell in enumerate(row))


def test_long_sequences_are_sampled_with_the_corners_of_each_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = grid_of(_drawable(WINDOW, 1000, 1000))
    monkeypatch.setattr(grid, "_WORK", 100_000)
    sampled = grid_of(_drawable(WINDOW, 1000, 1000))
    assert not sampled.exact
    # Where the first or the last query meets the first or the last key, a band begins or ends.
    assert sampled.tiles == exact.tiles
    assert sampled.share == pytest.approx(exact.share, rel=0.1)


def test_tiles_grow_with_very_long_sequences() -> None:
    found = grid_of(_drawable(CAUSAL, 2**17, 2**17))
    assert (found.tile, len(found.tiles), len(found.tiles[0])) == (512, 256, 256)
    assert (found.count(SKIPPED), found.count(PARTLY), found.count(FULLY)) == (256 * 255 // 2, 256, 256 * 255 // 2)


def test_settings_of_the_process_change_nothing() -> None:
    wanted = grid_of(_drawable(CAUSAL, 1000, 1000))
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            assert grid_of(_drawable(CAUSAL, 1000, 1000)) == wanted
    finally:
        torch.set_default_dtype(default)
