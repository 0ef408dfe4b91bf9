"""A mask's data as inline SVG: keys across, queries down, with its tiles. The colours are the style sheet's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attn_compiler.reporting.page.grid import FULLY, PARTLY, SKIPPED, Grid
from attn_compiler.reporting.page.markup import Markup, element, joined

#: units of the longer side, and the least units of the shorter one
_LONG, _SHORT = 256.0, 24.0
#: room for the axes
_LEFT, _TOP, _REST = 46.0, 34.0, 6.0
#: the most tiles of a side whose borders are drawn
_BORDERS = 64

#: names of tiles, by their kind
NAMES = {SKIPPED: "skipped", PARTLY: "computed in part", FULLY: "computed in full"}
_CLASSES = {SKIPPED: "skipped", PARTLY: "partly", FULLY: "fully"}


def hatching() -> Markup:
    """Return the fill pattern of partly computed tiles: once in a page."""
    line = element("path", d="M-1 1L1 -1M0 6L6 0M5 7L7 5", class_="hatch")
    pattern = element("pattern", line, id="hatch", width="6", height="6", patternUnits="userSpaceOnUse")
    return element("svg", element("defs", pattern), width="0", height="0", aria_hidden="true", class_="defs")


def drawing(grid: Grid, title: str, identity: str) -> Markup:
    """Draw the tiles of a mask's grid as an SVG. identity: prefix of the ids in this SVG, unique in its page."""
    longest = max(grid.seqlen_q, grid.seqlen_kv)
    width, height = (max(_LONG * length / longest, _SHORT) for length in (grid.seqlen_kv, grid.seqlen_q))
    parts = [
        element("title", title, id=f"{identity}-title"),
        element("desc", description(grid), id=f"{identity}-words"),
        _rect(0, 0, width, height, "skipped"),
        _path(_boxes(grid.cells, True, width, height), "taking"),
        _path(_tiles(grid, FULLY, width, height), "fully"),
        _path(_tiles(grid, PARTLY, width, height), "partly"),
        _borders(grid, width, height),
        _rect(0, 0, width, height, "frame"),
        *_axes(grid, width, height),
    ]
    # The same width for every mask, so that letters have one size.
    box = (-_LEFT, -_TOP, _LONG + _LEFT + _REST, height + _TOP + _REST)
    return element(
        "svg",
        *parts,
        role="img",
        viewBox=" ".join(map(_number, box)),
        aria_labelledby=f"{identity}-title {identity}-words",
        class_="mask",
    )


def description(grid: Grid) -> str:
    """Return the drawing in words, as its text alternative."""
    counts = ", ".join(f"{grid.count(kind)} {NAMES[kind]}" for kind in (SKIPPED, PARTLY, FULLY))
    return (
        f"Queries 0 to {grid.seqlen_q - 1} from top to bottom, keys 0 to {grid.seqlen_kv - 1} from left to right. "
        f"Of {grid.num_tiles} tiles of {grid.tile} by {grid.tile}: {counts}. {share(grid)} of the pairs take part."
    )


def share(grid: Grid) -> str:
    """Return the share of allowed pairs: "100 %", "49.9 %"; never 0 or 100 by rounding."""
    if grid.share in (0.0, 1.0):
        return f"{grid.share:.0%}".replace("%", " %")
    percent = min(max(100 * grid.share, 0.01), 99.99)
    return f"{percent:.4g} %" if percent > 99 else f"{percent:.3g} %"


def legend(grid: Grid) -> Markup:
    """Return the number of tiles of each kind."""
    items = [
        element("li", _swatch(kind), f"{grid.count(kind)} {'tile' if grid.count(kind) == 1 else 'tiles'} {NAMES[kind]}")
        for kind in (SKIPPED, PARTLY, FULLY)
    ]
    return element("ul", *items, class_="legend")


def _swatch(kind: int) -> Markup:
    inside = [_rect(0, 0, 14, 14, "skipped")]
    if kind == PARTLY:
        inside.append(element("path", d="M0 0L14 14H0Z", class_="taking"))
    if kind != SKIPPED:
        inside.append(element("path", d="M0 0H14V14H0Z", class_=_CLASSES[kind]))
    return element(
        "svg", *inside, _rect(0, 0, 14, 14, "frame"), viewBox="-1 -1 16 16", aria_hidden="true", class_="swatch"
    )


def _tiles(grid: Grid, kind: int, width: float, height: float) -> Iterator[str]:
    """Yield the boxes of tiles of a kind. The last tiles of a row and of a column may be smaller."""
    across, down = width * grid.tile / grid.seqlen_kv, height * grid.tile / grid.seqlen_q
    for row, tiles in enumerate(grid.tiles):
        top, bottom = row * down, min((row + 1) * down, height)
        for begin, end in _runs(tiles, kind):
            yield _box(begin * across, top, min(end * across, width), bottom)


def _boxes(cells: Sequence[Sequence[bool]], wanted: bool, width: float, height: float) -> Iterator[str]:
    """Yield the boxes of wanted cells, one for equal rows."""
    down = height / len(cells)
    begin = 0
    for row in range(1, len(cells) + 1):
        if row < len(cells) and cells[row] == cells[begin]:
            continue
        across = width / len(cells[begin])
        for first, end in _runs(cells[begin], wanted):
            yield _box(first * across, begin * down, end * across, row * down)
        begin = row


def _runs(values: Sequence[int], wanted: int) -> Iterator[tuple[int, int]]:
    begin: int | None = None
    for place, value in enumerate((*values, None)):
        if value == wanted and begin is None:
            begin = place
        elif value != wanted and begin is not None:
            yield begin, place
            begin = None


def _borders(grid: Grid, width: float, height: float) -> Markup | None:
    rows, columns = len(grid.tiles), len(grid.tiles[0])
    if max(rows, columns) > _BORDERS:
        return None
    across, down = width * grid.tile / grid.seqlen_kv, height * grid.tile / grid.seqlen_q
    lines = [f"M{_number(place * across)} 0V{_number(height)}" for place in range(1, columns)]
    lines += [f"M0 {_number(place * down)}H{_number(width)}" for place in range(1, rows)]
    return element("path", d="".join(lines), class_="borders") if lines else None


def _axes(grid: Grid, width: float, height: float) -> list[Markup]:
    last_key, last_query = f"{grid.seqlen_kv - 1:,}", f"{grid.seqlen_q - 1:,}"
    texts = [
        _text(0, -6, "0", "start"),
        _text(width / 2, -19, "keys →", "middle"),
        _text(-6, 10, "0", "end"),
    ]
    texts += [_text(width, -6, last_key, "end")] if grid.seqlen_kv > 1 and width > 2 * _SHORT else []
    texts += [_text(-6, height - 1, last_query, "end")] if grid.seqlen_q > 1 and height > 2 * _SHORT else []
    turned = f"translate({_number(-_LEFT + 10)} {_number(height / 2)}) rotate(-90)"
    words = "← queries" if height > 4 * _SHORT else "q"
    texts.append(element("text", words, transform=turned, text_anchor="middle"))
    return texts


def _text(x: float, y: float, words: str, anchor: str) -> Markup:
    return element("text", words, x=_number(x), y=_number(y), text_anchor=anchor)


def _rect(x: float, y: float, width: float, height: float, class_: str) -> Markup:
    return element("rect", x=_number(x), y=_number(y), width=_number(width), height=_number(height), class_=class_)


def _path(boxes: Iterator[str], class_: str) -> Markup | None:
    drawn = joined(boxes)
    return element("path", d=drawn, class_=class_) if drawn else None


def _box(left: float, top: float, right: float, bottom: float) -> str:
    return f"M{_number(left)} {_number(top)}H{_number(right)}V{_number(bottom)}H{_number(left)}Z"


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if "." in f"{value:.2f}" else f"{value:.0f}"
