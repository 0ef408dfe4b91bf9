"""Masks as drawings: on a grid, from examples."""

from __future__ import annotations

import re

import pytest
import torch

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr, Index, Load, Size
from attn_compiler.reporting.page import drawing, grid
from attn_compiler.reporting.page.examples import Drawable, NotDrawn, drawable
from attn_compiler.reporting.page.grid import FULLY, PARTLY, SKIPPED, Grid, grid_of
from attn_compiler.spec import masks
from attn_compiler.spec.masks import Dense, MaskKind, MaskSpec
from tests.reporting.page.reading import Element, read

# The SVG of a mask.
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


# Tiles and their counts, held against every pair.
B, H, Q, K = map(Index, "bhqk")
GRID_CAUSAL = ix.compare("<=", K, Q)
WINDOW = ix.apply("and", GRID_CAUSAL, ix.compare(">=", K, ix.add(Q, Const(-200))))
ODD = ix.compare("==", ix.apply("mod", ix.add(Q, K), Const(7)), Const(0))


def _drawable(condition: Expr, seqlen_q: int, seqlen_kv: int) -> Drawable:
    return Drawable(condition=condition, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, sizes={})


@pytest.mark.in_turns
@pytest.mark.parametrize("sizes", [(256, 256), (150, 400), (1, 300), (300, 1), (1, 1), (129, 127)], ids=str)
@pytest.mark.parametrize(
    "condition", [GRID_CAUSAL, WINDOW, ODD, ix.TRUE, ix.FALSE], ids=["causal", "window", "odd", "all", "none"]
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
    few = grid_of(_drawable(GRID_CAUSAL, 3, 4)).cells
    assert few == ((True, False, False, False), (True, True, False, False), (True, True, True, False))
    many = grid_of(_drawable(GRID_CAUSAL, 1280, 1280)).cells
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
    found = grid_of(_drawable(GRID_CAUSAL, 2**17, 2**17))
    assert (found.tile, len(found.tiles), len(found.tiles[0])) == (512, 256, 256)
    assert (found.count(SKIPPED), found.count(PARTLY), found.count(FULLY)) == (256 * 255 // 2, 256, 256 * 255 // 2)


def test_settings_of_the_process_change_nothing() -> None:
    wanted = grid_of(_drawable(GRID_CAUSAL, 1000, 1000))
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            assert grid_of(_drawable(GRID_CAUSAL, 1000, 1000)) == wanted
    finally:
        torch.set_default_dtype(default)


# What is made up for tensors that are known at run time only, and what is not drawn.
DENSE = Dense(shape=(2, 1, 100, 100), dtype="bool")


def _allowed(drawn: Drawable, q: int, k: int) -> bool:
    def no_tensor(tensor: str, at: tuple[int, ...]) -> object:
        raise AssertionError(f"{tensor} is still read")

    return bool(ix.evaluate(drawn.condition, {**drawn.sizes, "b": 0, "h": 0, "q": q, "k": k}, no_tensor))


def _drawn(*kinds: MaskKind, seqlen_q: int = 100, seqlen_kv: int = 100) -> Drawable:
    return drawable(MaskSpec(kinds=kinds, dense=DENSE), seqlen_q, seqlen_kv)


def _keys(drawn: Drawable, q: int) -> list[int]:
    return [k for k in range(drawn.seqlen_kv) if _allowed(drawn, q, k)]


def test_what_positions_say_has_no_example() -> None:
    drawn = _drawn(masks.Causal())
    assert drawn.made_up == ()
    assert _keys(drawn, 5) == list(range(6))


@pytest.mark.parametrize(
    "condition",
    [
        ix.as_bool(Load("m", (B, K), "int")),
        ix.invert(Load("m", (B, K), "bool")),
        ix.compare("==", Load("m", (B, K), "int"), Const(1)),
        ix.compare("==", Load("m", (B, K), "int"), Const(0)),
        ix.compare(">", Load("m", (B, K), "float"), Const(0.5)),
    ],
    ids=ix.text,
)
def test_padding_is_in_the_first_keys_whichever_value_says_so(condition: ix.Expr) -> None:
    drawn = _drawn(masks.KeyPadding(condition=condition))
    assert _keys(drawn, 0) == list(range(30, 100))
    assert drawn.made_up == ("m leaves out the first 30 keys",)


def test_packed_documents_are_four() -> None:
    drawn = _drawn(masks.Causal(), masks.Document(of_key=Load("ids", (B, K), "int")))
    assert _keys(drawn, 29) == list(range(30))
    assert _keys(drawn, 31) == [30, 31]
    assert _keys(drawn, 99) == list(range(80, 100))
    assert drawn.made_up == ("ids tells four documents, which begin at 0, 30, 55, 80",)


def test_documents_in_a_condition_of_its_own_are_found_too() -> None:
    same = ix.compare("==", Load("ids", (B, K), "int"), Load("ids", (B, Q), "int"))
    other = masks.Formula(condition=ix.apply("or", same, ix.compare("==", K, Const(0))))
    assert _keys(_drawn(other), 31) == [0, *range(30, 55)]


def test_numbers_that_tensors_give() -> None:
    length = Load("lengths", (B,), "int")
    right = _drawn(masks.KeyBound(side="last", bound=ix.add(length, Const(-1))))
    assert (_keys(right, 0), right.made_up) == (list(range(75)), ("the length that lengths gives is 75",))
    assert _keys(_drawn(masks.KeyBound(side="first", bound=length)), 0) == list(range(20, 100))
    assert _keys(_drawn(masks.Prefix(length=length)), 2) == list(range(30))
    assert _keys(_drawn(masks.Chunked(size=10, start=length)), 12) == list(range(10, 20))


def test_a_cache_is_filled_for_the_most_part() -> None:
    decode = _drawn(masks.CausalFrom(offset=Load("cache_position", (ix.ZERO,), "int")), seqlen_q=1)
    assert _keys(decode, 0) == list(range(61))
    prompt = _drawn(masks.CausalFrom(offset=Load("cache_position", (ix.ZERO,), "int")), seqlen_q=10)
    assert _keys(prompt, 9) == list(range(100))
    each = _drawn(masks.Formula(condition=ix.compare("<=", K, Load("cache_position", (Q,), "int"))), seqlen_q=10)
    assert _keys(each, 0) == list(range(91))


def test_one_of_alternatives() -> None:
    ids = masks.Document(of_key=Load("ids", (B, K), "int"))
    drawn = _drawn(masks.AnyOf(alternatives=((masks.Causal(),), (ids,))))
    assert _keys(drawn, 40) == list(range(55))
    assert len(drawn.made_up) == 1


def test_symbolic_sizes_get_a_number_and_it_is_said() -> None:
    drawn = drawable(
        MaskSpec(kinds=(masks.Formula(condition=ix.compare("<", K, ix.add(Q, Size("s0")))),)),
        "s0",
        "s0",
    )
    assert (drawn.seqlen_q, drawn.seqlen_kv, drawn.made_up) == (1024, 1024, ("the size s0 is 1024",))


def test_a_cache_whose_length_is_symbolic() -> None:
    drawn = _drawn(masks.KeyBound(side="last", bound=Size("s7")), seqlen_q=1)
    assert _keys(drawn, 0) == list(range(76))
    assert drawn.made_up == ("the size s7 is 75",)


def test_what_differs_by_batch_row_or_head_is_of_the_first_and_it_is_said() -> None:
    drawn = _drawn(masks.Formula(condition=ix.compare("<", K, ix.add(H, B))))
    assert drawn.made_up == ("the first batch row", "the first head")


@pytest.mark.parametrize(
    ("mask", "why"),
    [
        (MaskSpec(dense=DENSE, reason="x adds more than masking"), "not proved, .* x adds more than masking"),
        (MaskSpec(dense=DENSE), "what the mask tensor holds"),
        (
            MaskSpec(kinds=(masks.Formula(condition=ix.compare("<", ix.add(K, Size("s7")), Size("s8"))),)),
            "s7, s8",
        ),
        (MaskSpec(kinds=(masks.Formula(condition=Load("pairs", (Q, K), "bool")),)), "pairs"),
        (
            MaskSpec(kinds=(masks.KeyPadding(condition=ix.compare("==", Load("t", (K,), "int"), Const(7))),)),
            "no example",
        ),
    ],
)
def test_what_nothing_can_be_made_up_for_is_not_drawn(mask: MaskSpec, why: str) -> None:
    with pytest.raises(NotDrawn, match=why):
        drawable(mask, 100, 100)


def test_a_tensor_that_adds_and_does_not_mask_leaves_no_pair_out() -> None:
    drawn = drawable(MaskSpec(dense=DENSE), 100, 100, is_added=True)
    assert _keys(drawn, 0) == list(range(100))
