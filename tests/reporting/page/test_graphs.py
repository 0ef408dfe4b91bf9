"""The section of one graph."""

from __future__ import annotations

import dataclasses

from attn_compiler.reporting.facts import UnpadReport
from attn_compiler.reporting.page import graphs
from attn_compiler.reporting.report import Report
from attn_compiler.torch_private.batches_before import Steps, UnpaddedStep
from tests.reporting.page.making import REASON, REPORT, SITE
from tests.reporting.page.reading import Element, read


def _section(report: Report) -> Element:
    first = {graphs.likeness(site): name for name, site in graphs.site_identities(report, "g").items()}
    return read(graphs.section(report, "g", first))


def test_a_section_has_its_parts_under_headings() -> None:
    section = _section(REPORT).one("section")
    assert section.attributes["aria-labelledby"] == section.one("h2").attributes["id"] == "g"
    assert section.one("h2").text == "Graph 0/0"
    assert [heading.text for heading in section.all("h3")] == [
        "model.layers.{0..4}.self_attn ×5 hopper",
        "pool.attn miss",
        "Compile time",
        "What each pass did to the graph",
    ]
    assert "5 attention sites of 1 kind, 1 miss. Decided for cuda sm90." in section.text


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
    steps = Steps()
    steps.last.extend([UnpaddedStep(fill=0.5, failed=()), UnpaddedStep(fill=0.25, failed=("the first key is real",))])
    unpad = UnpadReport(
        zeroed=("last_hidden_state",), facts=("rows begin with a token",), notes=("a note",), steps=steps
    )
    text = _section(dataclasses.replace(REPORT, unpad=unpad)).text
    for part in (
        "last_hidden_state",
        "rows begin with a token",
        "a note",
        "50%, 25%",
        "1 time, since not: the first key is real",
    ):
        assert part in text
