"""The page as a document: markup, graphs, differences of sources."""

from __future__ import annotations

import dataclasses
import html
import itertools
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from attn_compiler.reporting.facts import UnpadReport
from attn_compiler.reporting.page import graphs, page
from attn_compiler.reporting.page.markup import Markup, element, escaped, facts, folded, joined, table
from attn_compiler.reporting.report import Report, Reports
from tests.reporting.making import HOSTILE, REASON, REPORT, SITE, UNPAD, hostile
from tests.reporting.page.reading import Element, read

# The whole page.
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
    for each in root.all("table"):
        assert each.one("caption").text
        assert all(cell.attributes["scope"] in ("col", "row") for cell in each.all("th"))
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
        ["model.layers.0-4.self_attn ×5", "hopper", "1", "+2.5 ms", "0/0"],
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


# Markup.
MARKUP_HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onload='x",
    "&lt;b&gt;",
    "]]></style>",
]


class _Seen(HTMLParser):
    """What a parser makes of a text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("text", MARKUP_HOSTILE)
def test_text_stays_text_and_attributes_stay_attributes(text: str) -> None:
    seen = _Seen(element("p", text, title=text))
    assert seen.tags == ["p"]
    assert seen.attributes == [("title", text)]
    assert seen.text == text


@given(st.text())
def test_any_text_can_be_read_again(text: str) -> None:
    seen = _Seen(element("p", text, title=text))
    assert seen.tags == ["p"]
    assert seen.text == html.unescape(escaped(text))
    seen.text.encode("utf-8")


def test_what_no_document_holds_is_shown_by_its_number() -> None:
    assert escaped("a\x00b\x1b\ud800\u202ec\n") == "a\\u0000b\\u001b\\ud800\\u202ec\n"


def test_markup_is_not_escaped_again() -> None:
    inner = element("b", "<")
    assert element("p", inner) == "<p><b>&lt;</b></p>"
    assert escaped(inner) is inner


def test_joining_a_string_to_markup_gives_a_string_that_is_escaped() -> None:
    assert not isinstance(element("b") + "<i>", Markup)
    assert element("p", element("b") + "<i>") == "<p>&lt;b&gt;&lt;/b&gt;&lt;i&gt;</p>"


def test_attributes_are_left_out_or_have_no_value() -> None:
    assert (
        element("details", open_=True, class_=None, hidden=False, aria_label="x")
        == '<details open aria-label="x"></details>'
    )
    assert element("meta", charset="utf-8") == '<meta charset="utf-8">'


def test_what_is_empty_is_left_out() -> None:
    assert joined(["a", None, "", "b"], "<") == "a&lt;b"
    assert facts([("Nothing", None)]) == ""
    assert facts([("A", "1"), ("B", "")]) == "<dl><div><dt>A</dt><dd>1</dd></div></dl>"


def test_tables_have_headers_with_scopes() -> None:
    made = table("All", ("Name", "Bytes"), [("q", "8"), ("k", "4")], numbers=frozenset({1}))
    assert (
        '<caption>All</caption><thead><tr><th scope="col">Name</th><th scope="col" class="number">Bytes</th></tr>'
        in made
    )
    assert '<tr><th scope="row">q</th><td class="number">8</td></tr><tr><th scope="row">k</th>' in made
    # It scrolls by keys where it is too wide.
    assert made.startswith('<div class="wide" tabindex="0" role="group" aria-label="All">')


def test_folds() -> None:
    assert folded("More", "text") == "<details><summary>More</summary>text</details>"


# The section of one graph.
def _section(report: Report) -> Element:
    return read(graphs.section(report, "g", {}))


def test_a_section_has_its_parts_under_headings() -> None:
    section = _section(REPORT).one("section")
    assert section.attributes["aria-labelledby"] == section.one("h2").attributes["id"] == "g"
    assert section.one("h2").text == "Graph 0/0"
    assert [heading.text for heading in section.all("h3")] == [
        "model.layers.0-4.self_attn ×5 hopper",
        "pool.attn miss",
        "Compile time",
        "What each pass did to the graph",
    ]
    assert "5 attention sites of 1 kind, 1 miss. Decided for cuda sm90" in section.text


def test_seconds_by_pass_and_by_kernel() -> None:
    tables = {table.one("caption").text: table for table in _section(REPORT).all("table")}
    assert [[cell.text for cell in row.inside] for row in tables["Passes"].one("tbody").inside] == [
        ["mirror", "250 ms"],
        ["match", "4.2 ms"],
    ]
    assert "attention_forward1.50 s" in tables["Kernels, beside Inductor"].text
    assert "Passes 254 ms, kernels 1.50 s" in [fold.text for fold in _section(REPORT).all("summary")]


def test_equal_sites_are_told_once() -> None:
    other = dataclasses.replace(SITE, modules=("other",))
    report = dataclasses.replace(REPORT, sites=(SITE,))
    first = {graphs.likeness(other): "elsewhere-site-1"}
    cards = read(graphs.section(report, "g", first)).all("article")
    assert cards[0].one("a").attributes["href"] == "#elsewhere-site-1"


def test_what_failed_is_in_a_box_with_a_word_for_it() -> None:
    report = Report(
        graph="1/0", target="cpu", failure="KeyError in lower\nTraceback\n  File x", faults=("a site failed",)
    )
    boxes = _section(report).all("div", "bad")
    assert [box.one("b").text for box in boxes] == ["Failed; the graph was left as it was: ", "Fault: "]
    assert boxes[0].one("details").one("pre").text == "Traceback\n  File x"
    assert "a site failed" in boxes[1].text


def test_a_rewrite_from_the_cache_and_one_that_is_not_kept() -> None:
    assert "it is from the cache" in _section(dataclasses.replace(REPORT, from_cache=True)).text
    assert (
        "not kept for the next process: sizes are symbolic."
        in _section(dataclasses.replace(REPORT, not_kept="sizes are symbolic")).text
    )


def test_padding_that_is_computed_has_its_reason() -> None:
    unpad = UnpadReport(kept=REASON, module="layers.0", source="m.py:3")
    text = _section(dataclasses.replace(REPORT, unpad=unpad)).text
    assert "Placelayers.0 (m.py:3)" in text
    assert f"Remedy{REASON.remedy}" in text


def test_padding_that_is_left_out_has_what_it_rests_on() -> None:
    dl = _section(dataclasses.replace(REPORT, unpad=UNPAD)).all("dl")[-1]
    assert [value.text for value in dl.all("dd")] == [
        "left out",
        "last_hidden_state, pooled",
        "rows begin with a token",
        "a note",
        "50%, 25%",
        "1 time, since not: the first key is real",
    ]


# The diffs of a dump in the page.
DIFF = "ops: 8 -> 9 (+1)\n  abs: 0 -> 1 (+1)\n\n--- before\n+++ after\n@@ -1,2 +1,2 @@\n same\n-old <b>\n+new\n"
SAME = "ops: 8, none added or removed\n\nthe graph's text is the same\n"


def _dump(folder: Path) -> None:
    (folder / "01_match.diff.txt").write_text(SAME)
    (folder / "02_lower.diff.txt").write_text(DIFF)
    (folder / "02_lower.after.txt").write_text("no diff")
    (folder / "report.json").write_text("{}")


def test_files_are_read_in_the_order_of_passes(tmp_path: Path) -> None:
    _dump(tmp_path)
    found = list(graphs.read_diffs(tmp_path))
    assert [(one.step, len(one.lines)) for one in found] == [("01 match", 0), ("02 lower", 6)]
    assert found[1].counts == ("ops: 8 -> 9 (+1)", "  abs: 0 -> 1 (+1)")


def test_changes_are_folded_and_marked(tmp_path: Path) -> None:
    _dump(tmp_path)
    shown = read(graphs.diffs(str(tmp_path)))
    fold = shown.one("details")
    assert "open" not in fold.attributes
    assert fold.one("summary").text == "02 lower: ops: 8 -> 9 (+1)"
    # The signs stay, so that colour is not all that tells.
    assert (fold.one("ins").text, fold.one("del").text) == ("+new\n", "-old <b>\n")
    assert fold.one("pre").text == "@@ -1,2 +1,2 @@\n same\n-old <b>\n+new\n"
    assert [item.text for item in fold.all("li")] == ["abs: 0 -> 1 (+1)"]
    assert "Nothing changed in 01 match." in shown.text
    assert str(tmp_path) in shown.text


def test_a_long_diff_ends_with_where_the_rest_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_MOST_LINES", 2)
    _dump(tmp_path)
    fold = read(graphs.diffs(str(tmp_path))).one("details")
    assert fold.one("pre").text == "@@ -1,2 +1,2 @@\n same\n"
    assert f"2 more lines are in {tmp_path / '02_lower.diff.txt'}" in fold.text


def test_without_a_dump_it_is_said_how_to_get_one() -> None:
    assert "options={'dump_dir': ...}" in read(graphs.diffs(None)).text


def test_a_dump_that_is_gone_costs_the_diffs(tmp_path: Path) -> None:
    assert "can't be read any more: No such file" in read(graphs.diffs(str(tmp_path / "gone"))).text


def test_names_in_a_graph_are_escaped(tmp_path: Path) -> None:
    (tmp_path / "01_x.diff.txt").write_text(f"ops: 1 -> 2 (+1)\n  {HOSTILE}: 0 -> 1 (+1)\n\n--- a\n+++ b\n+{HOSTILE}\n")
    shown = read(graphs.diffs(str(tmp_path)))
    assert shown.all("script") == shown.all("img") == []
    assert shown.one("ins").text == f"+{HOSTILE}\n"
