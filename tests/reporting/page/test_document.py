"""The whole page: well formed, by itself, and closed to whatever a model's names hold."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest

from attn_compiler.reporting.page import page
from attn_compiler.reporting.report import Report, Reports
from tests.reporting.page.making import HOSTILE, REPORT, hostile
from tests.reporting.page.reading import Element, read

SEVERAL = Reports((REPORT, Report(graph="1/0", target="cpu"), dataclasses.replace(REPORT, graph="2/0")))


def test_landmarks_and_headings() -> None:
    root = read(page(SEVERAL))
    for landmark in ("header", "nav", "main", "footer", "h1"):
        assert len(root.all(landmark)) == 1, landmark
    assert root.one("html").attributes["lang"] == "en"
    assert [heading.text for heading in root.all("h2")] == ["Graph 0/0", "Graph 2/0"]
    assert "1 graph without attention: 1/0." in root.text


def test_no_level_of_headings_is_left_out() -> None:
    levels = [int(level) for level in re.findall(r"<h(\d)", page(SEVERAL))]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_identities_are_single_and_links_lead_somewhere() -> None:
    root = read(page(SEVERAL))
    everything = _everything(root)
    names = [one.attributes["id"] for one in everything if "id" in one.attributes]
    assert len(set(names)) == len(names)
    links = [one.attributes["href"] or "" for one in everything if "href" in one.attributes]
    assert len(links) > 5
    assert {link.removeprefix("#") for link in links} <= set(names)
    for one in everything:
        assert set((one.attributes.get("aria-labelledby") or "").split()) <= set(names)


def _everything(element: Element) -> list[Element]:
    return [element, *(each for child in element.inside for each in _everything(child))]


def test_every_table_has_a_caption_and_scopes_and_every_drawing_a_name() -> None:
    root = read(page(SEVERAL))
    assert len(root.all("table")) > 4
    for table in root.all("table"):
        assert table.one("caption").text
        assert all(cell.attributes["scope"] in ("col", "row") for cell in table.all("th"))
    for drawing in root.all("svg"):
        assert drawing.attributes.get("aria-hidden") == "true" or drawing.attributes["role"] == "img"


def test_it_needs_no_network_and_runs_nothing() -> None:
    text = page(Reports((hostile(), *SEVERAL)))
    root = read(text)
    assert root.all("script") == root.all("img") == root.all("link") == root.all("iframe") == []
    policy = next(meta for meta in root.all("meta") if "http-equiv" in meta.attributes)
    assert policy.attributes["content"] == "default-src 'none'; style-src 'unsafe-inline'"
    for one in _everything(root):
        assert not [name for name in one.attributes if name.startswith("on") or name == "src"]
    style = root.one("style").text
    assert "@import" not in style
    assert re.findall(r"url\(([^)]*)\)", style) == ["#hatch"]


@pytest.mark.parametrize("reports", [Reports((hostile(),)), (hostile(),)], ids=["several", "one"])
def test_a_hostile_name_is_shown_as_it_is(reports: tuple[Report, ...]) -> None:
    root = read(page(reports))
    assert root.text.count(HOSTILE) > 20
    assert [one.tag for one in _everything(root) if one.tag in ("script", "img")] == []


def test_the_overview_has_a_row_for_each_kind_and_each_miss() -> None:
    (overview,) = [
        table for table in read(page((REPORT,))).all("table") if table.one("caption").text == "All attentions"
    ]
    rows = [[cell.text for cell in row.inside] for row in overview.one("tbody").inside]
    assert [row[:2] + row[3:] for row in rows] == [
        ["model.layers.{0..4}.self_attn ×5", "hopper", "1", "+2.5 ms", "0/0"],
        ["pool.attn", "miss", "", "", "0/0"],
    ]
    assert [link.attributes["href"] for link in overview.all("a")] == ["#graph-1-site-1", "#graph-1-miss-1"]


def test_totals() -> None:
    header = read(page((REPORT,))).one("header")
    facts = dict(zip((name.text for name in header.all("dt")), (value.text for value in header.all("dd")), strict=True))
    assert facts == {
        "Attentions found": "5",
        "Missed": "1",
        "Chosen": "hopper ×5",
        "Copies put in": "5",
        "Estimated": "2.5 ms gained, one call each of 5 of 5",
    }


def test_an_attention_that_several_graphs_share_is_told_once() -> None:
    cards = read(page(SEVERAL)).all("article")
    assert [len(card.all("figure")) for card in cards] == [1, 0, 0, 0]
    assert cards[2].one("a").attributes["href"] == "#graph-1-site-1"


def test_no_graph_and_no_attention() -> None:
    assert "No graph was compiled." in read(page(())).one("header").text
    nothing = read(page((Report(graph="0/0", target="cpu"),)))
    assert "1 graph without attention: 0/0." in nothing.text
    assert nothing.all("table") == []


def test_dark_print_and_focus_are_styled() -> None:
    style = read(page(())).one("style").text
    for rule in ("@media (prefers-color-scheme: dark)", "@media print", ":focus-visible"):
        assert rule in style


def _contrast(one: str, other: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_has_the_contrast_of_wcag_aa(scheme: int) -> None:
    style = read(page(())).one("style").text
    colours = dict(re.findall(r"--([\w-]+): (#\w{6});", re.findall(r":root \{(.*?)\}", style, re.DOTALL)[scheme]))
    for text in ("text", "quiet", "accent", "bad", "added", "removed"):
        for behind in ("page", "card"):
            assert _contrast(colours[text], colours[behind]) >= 4.5, (text, behind)
    for badge in ("badge", "kept", "miss"):
        assert _contrast(colours[badge], colours["on-badge"]) >= 4.5, badge
    for area in ("fully", "hatch"):
        assert _contrast(colours[area], colours["skipped"]) >= 3, area
    assert _contrast(colours["hatch"], colours["taking"]) >= 3
