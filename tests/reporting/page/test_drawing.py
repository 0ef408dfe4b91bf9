"""The SVG of a mask: its areas, its words, and what tells tiles apart besides colour."""

from __future__ import annotations

import re

import pytest

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Index
from attn_compiler.reporting.page import drawing
from attn_compiler.reporting.page.examples import Drawable
from attn_compiler.reporting.page.grid import Grid, grid_of
from tests.reporting.page.reading import Element, read

CAUSAL = ix.compare("<=", Index("k"), Index("q"))


def _grid(seqlen_q: int = 512, seqlen_kv: int = 512, condition: ix.Expr = CAUSAL) -> Grid:
    return grid_of(Drawable(condition=condition, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, sizes={}))


def _svg(grid: Grid) -> Element:
    return read(drawing.drawing(grid, "a <title>", "here")).one("svg")


def _boxes(svg: Element, class_: str) -> list[tuple[float, ...]]:
    """left, top, right, bottom of each box of the paths of a class"""
    drawn = "".join(path.attributes["d"] or "" for path in svg.all("path", class_))
    return [tuple(map(float, box)) for box in re.findall(r"M([\d.]+) ([\d.]+)H([\d.]+)V([\d.]+)H[\d.]+Z", drawn)]


def _area(boxes: list[tuple[float, ...]]) -> float:
    return sum((right - left) * (bottom - top) for left, top, right, bottom in boxes)


def test_areas_are_those_of_the_tiles() -> None:
    svg = _svg(_grid())
    # 16 tiles on 256 x 256: 6 in full, 4 in part.
    assert _area(_boxes(svg, "fully")) == pytest.approx(6 / 16 * 256**2)
    assert _area(_boxes(svg, "partly")) == pytest.approx(4 / 16 * 256**2)
    assert _area(_boxes(svg, "taking")) == pytest.approx(256**2 / 2, rel=0.01)


def test_queries_go_down_and_keys_across() -> None:
    left, top, right, bottom = max(_boxes(_svg(_grid()), "fully"), key=lambda box: box[2] - box[0])
    assert (left, top, right, bottom) == (0, 192, 192, 256)


def test_the_last_tiles_may_be_smaller() -> None:
    svg = _svg(_grid(200, 200, ix.TRUE))
    assert _area(_boxes(svg, "fully")) == pytest.approx(256**2)


def test_words_for_who_does_not_see_it() -> None:
    svg = _svg(_grid())
    assert svg.attributes["role"] == "img"
    named = (svg.attributes["aria-labelledby"] or "").split()
    texts = {each.attributes["id"]: each.text for each in (*svg.all("title"), *svg.all("desc"))}
    assert [texts[name] for name in named] == [
        "a <title>",
        "Queries 0 to 511 from top to bottom, keys 0 to 511 from left to right. Of 16 tiles of 128 by 128: 6 skipped, "
        "4 computed in part, 6 computed in full. 50.1 % of the pairs take part.",
    ]


def test_axes_have_names_and_ends() -> None:
    assert [text.text for text in _svg(_grid(512, 2048)).all("text")] == ["0", "keys →", "0", "2,047", "511", "q"]
    assert [text.text for text in _svg(_grid(1, 2048)).all("text")] == ["0", "keys →", "0", "2,047", "q"]


@pytest.mark.parametrize("sizes", [(1, 100_000), (100_000, 1), (64, 64)], ids=str)
def test_letters_are_of_one_size_whatever_is_drawn(sizes: tuple[int, int]) -> None:
    box = [float(number) for number in (_svg(_grid(*sizes)).attributes["viewbox"] or "").split()]
    assert box[2] == 308
    assert 64 <= box[3] <= 296


def test_the_legend_counts_and_tells_apart_without_colour() -> None:
    legend = read(drawing.legend(_grid()))
    items = legend.all("li")
    assert [item.text for item in items] == ["6 tiles skipped", "4 tiles computed in part", "6 tiles computed in full"]
    assert [len(item.all("path", "partly")) for item in items] == [0, 1, 0]
    assert [len(item.all("path", "fully")) for item in items] == [0, 0, 1]
    assert "hatch" in drawing.hatching()


def test_no_pair_and_every_pair() -> None:
    assert _boxes(_svg(_grid(condition=ix.FALSE)), "taking") == []
    assert drawing.share(_grid(condition=ix.FALSE)) == "0 %"
    assert drawing.share(_grid(condition=ix.TRUE)) == "100 %"


def test_a_share_is_not_rounded_to_none_or_all() -> None:
    one = ix.apply("and", ix.compare("==", Index("k"), ix.ZERO), ix.compare("==", Index("q"), ix.ZERO))
    assert drawing.share(_grid(2048, 2048, one)) == "0.01 %"
    assert drawing.share(_grid(2048, 2048, ix.invert(one))) == "99.99 %"


def test_many_tiles_have_no_borders() -> None:
    assert len(_svg(_grid(8192, 8192)).all("path", "borders")) == 1
    assert _svg(_grid(8320, 8320)).all("path", "borders") == []
