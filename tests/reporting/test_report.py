"""Reports as a whole: several of them, heads, paths of modules, files, lines of a log."""

from __future__ import annotations

import dataclasses
import html
import itertools
import json
import re
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from attn_compiler import index_expr as ix
from attn_compiler.compiling.explaining import explain
from attn_compiler.reasons.errors import ReportNotSaved
from attn_compiler.reporting import render, wording
from attn_compiler.reporting.facts import GraphReport, Steps, UnpadReport
from attn_compiler.reporting.publishing import reports, reset
from attn_compiler.reporting.report import Report, Reports
from attn_compiler.spec import masks
from tests.reporting.making import LINEAR, REASON, REPORT, SITE, SPEC, TARGET

EMPTY = [Report(graph=f"{i}/0", target=TARGET) for i in range(25)]


# Heads.
def test_a_graph_without_attention_says_so() -> None:
    assert str(EMPTY[1]).splitlines() == [
        f"attn_compiler on {TARGET}",
        "graph 1/0: 0 sites: no attention was found in this graph",
    ]
    assert EMPTY[1].to_dict().keys() == REPORT.to_dict().keys()


def test_a_failure_is_shown_and_is_not_a_graph_without_attention() -> None:
    failed = Report(graph="1/0", target=TARGET, failure="it broke\nTraceback:\n  File x\nKeyError: 1\n")
    assert str(failed).splitlines()[2:] == [
        "FAILED, the graph was left as it was: it broke",
        "    Traceback:",
        "      File x",
        "    KeyError: 1",
    ]
    merged = str(Reports((failed, EMPTY[2])))
    assert "FAILED, the graph was left as it was" in merged
    assert "1 graph without attention: 2/0" in merged
    assert "total: 2 graphs, 0 attention sites, 1 FAILED, 0 ms in passes" in merged


def test_records_print_in_one_line() -> None:
    mask = SITE.spec.mask.words
    assert str(SITE) == f"model.layers.0.self_attn ×5 (modeling_llama.py:120) on {SITE.target}: hopper, mask {mask}"
    assert str(REPORT.misses[0]) == f"pool.attn (vit.py:87): softmax(dim=1) was missed: {REPORT.misses[0].reason}"
    assert str(dataclasses.replace(LINEAR, modules=("a",))) == f"a: linear_reference, {LINEAR.function}"


def test_padding_that_is_computed_has_its_reason() -> None:
    kept = UnpadReport(kept=REASON, module="layers.0", source="m.py:3")
    assert (
        "padding: computed, since not: flash-attn-4 is installed at layers.0 (m.py:3): none; pip install 'attn_compiler[fa4]' (AC105)"
        in " ".join(str(dataclasses.replace(REPORT, unpad=kept)).split())
    )


def test_padding_that_stays_has_no_last_calls() -> None:
    assert UnpadReport().last == UnpadReport(steps=Steps()).last == ()


# Several graphs.
def test_reports_merge() -> None:
    merged = Reports((REPORT, EMPTY[1], REPORT))
    data = json.loads(merged.to_json())
    assert data.pop("graphs") == [one.to_dict() for one in merged]
    assert data == {"version": 1, "num_graphs": 3, "num_sites": 10, "num_misses": 2, "num_linear": 0}
    assert Reports((dataclasses.replace(REPORT, linear=(LINEAR, LINEAR)), EMPTY[0])).num_linear == 4
    assert repr(merged) == (
        "<Reports: 3 graphs, 10 attention sites (hopper 10), 2 misses, 508 ms in passes; print() shows the table>"
    )
    total = (
        "1 graph without attention: 1/0{}\ntotal: 3 graphs, 10 attention sites (hopper 10), 2 misses, 508 ms in passes"
    )
    own = str(REPORT)
    again = own.partition("\n")[2]
    assert str(merged) == "\n".join([own, again, total.format("")])
    assert merged.details() == "\n\n".join([*[REPORT.details()] * 2, total.format("\n")])
    other = dataclasses.replace(REPORT, target="cpu")
    assert "attn_compiler on cpu\ngraph 0/0: 5" in str(Reports((REPORT, other)))
    assert str(Reports((REPORT,))) == str(REPORT)


class _Twice(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


class _Broken(_Twice):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return torch.nn.functional.scaled_dot_product_attention(y, y, y)


def test_models_are_told_apart() -> None:
    reset()
    for model in (_Twice(), _Broken(), lambda x: _Twice.forward(None, x)):  # type: ignore[arg-type]
        torch._dynamo.reset()
        torch.compile(model, backend="attn_compiler", options={"inner": "eager"})(torch.ones(1, 2, 8, 16))
    found = reports()
    assert [report.name for report in found] == [
        "0/0 of _Twice",
        "0/0 of _Broken",
        "1/0 of _Broken.forward",
        "0/0 of <lambda>",
    ]
    assert [report.from_cache for report in found if report.num_sites] == [False, False, False]
    assert "graph 0/0 of _Twice: 1 attention site" in str(found)
    assert "1 graph without attention: 0/0 of _Broken" in str(found)
    assert "Graph 1/0 of _Broken.forward" in found.to_html()
    assert explain(_Twice(), torch.ones(1, 2, 8, 16))[0].model == "_Twice"


def test_many_graphs_without_attention_are_one_line() -> None:
    told = "25 graphs without attention: 0/0, 1/0, 2/0, 3/0, 4/0, 5/0, 6/0, 7/0, and 17 more"
    assert told in str(Reports((REPORT, *EMPTY))).splitlines()
    assert wording.without_attention(EMPTY[:8]).endswith("6/0, 7/0")


def test_reports_of_no_graph() -> None:
    text = str(Reports())
    assert text.startswith("attn_compiler: no graph was compiled")
    # What people do wrong with launchers, and nobody else tells them.
    assert 'model.compile(backend="attn_compiler")' in text


def test_a_report_is_its_data_with_ways_to_show_it() -> None:
    assert {field.name for field in fields(Report)} == {field.name for field in fields(GraphReport)}
    assert not hasattr(REPORT, "__dict__")


# Pages in files.
@pytest.mark.parametrize("as_text", [True, False])
def test_a_page_is_saved(tmp_path: Path, as_text: bool) -> None:
    path = tmp_path / "report.html"
    several = Reports((REPORT, dataclasses.replace(REPORT, graph="1/0")))
    for shown in (REPORT, several):
        shown.save(str(path) if as_text else path)
        assert path.read_text(encoding="utf-8") == shown.to_html()
        assert html.escape(shown.to_html()) in shown._repr_html_()
    assert "Graph 1/0" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["there/report.html", ".", "a\0b"])
def test_a_page_that_can_not_be_written_says_where_and_why(tmp_path: Path, name: str) -> None:
    with pytest.raises(ReportNotSaved, match=r"could not be written to .*: .*") as raised:
        REPORT.save(f"{tmp_path}/{name}")
    assert raised.value.path == f"{tmp_path}/{name}"
    assert raised.value.__cause__ is not None


def test_a_file_stays_as_it_was_if_its_page_can_not_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_text("before")
    monkeypatch.setattr(Report, "to_html", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        REPORT.save(path)
    assert path.read_text() == "before"


# Lines of a log.
def test_lines_of_a_log() -> None:
    summary = f"graph 0/0 on {TARGET}: 5 attention sites (hopper 5), 1 miss, 254 ms in passes"
    assert wording.summary(REPORT) == summary
    more = "; attn_compiler.reports().save('report.html') shows why"
    assert wording.introduction(REPORT) == f"{summary}; by mask: 5 × {SPEC.mask.words}: hopper{more}"


def test_the_first_line_of_a_process_stays_a_line() -> None:
    long = masks.MaskSpec(kinds=(masks.Formula(condition=ix.Load("a_name_" * 20, (ix.Index("q"),), "bool")),))
    sites = tuple(
        dataclasses.replace(SITE, pattern=str(n), spec=dataclasses.replace(SPEC, mask=long)) for n in range(9)
    )
    line = wording.introduction(dataclasses.replace(REPORT, sites=sites))
    assert "5 more kinds" in line
    assert "\n" not in line
    assert len(line) < 700


# Paths of modules.
@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["attn"], ["attn"]),
        ([""], ["(the model itself)"]),
        (["attn", "attn"], ["attn ×2"]),
        (["l.0.a", "l.1.a"], ["l.0-1.a ×2"]),
        ([f"l.{i}.a" for i in range(0, 12, 2)], ["l.{0,2,..,10}.a ×6"]),
        ([f"l.{i}.a" for i in (0, 1, 2, 3, 4, 6, 7, 8, 10)], ["l.{0-4,6-8,10}.a ×9"]),
        ([f"l.{i}.b.{j}.a" for i in range(4) for j in range(2)], ["l.0-3.b.0-1.a ×8"]),
        (["l.0.b.0", "l.0.b.1", "l.1.b.0"], ["l.0.b.0-1 ×2", "l.1.b.0"]),
        (["layers[0].attn2", "layers[1].attn2"], ["layers[0-1].attn2 ×2"]),
        (["l.0.a", "l.0.c", "l.1.a", "l.1.c"], ["l.0-1.a ×2", "l.0-1.c ×2"]),
        (["l.0.a", "l.0.a", "l.1.a"], ["l.0.a ×2", "l.1.a"]),
        (["l.00.a", "l.0.a"], ["l.00.a", "l.0.a"]),
    ],
)
def test_abbreviate(paths: list[str], expected: list[str]) -> None:
    assert render.abbreviate(paths) == expected


def _expand(line: str) -> Counter[str]:
    """What an abbreviation stands for, read as a person would: an oracle with its own parser."""
    path, _, times = line.partition(" ×")
    choices = []
    for piece in re.split(r"(\{[^}]*\}|(?<!\w)\d+-\d+(?!\w))", path):
        if not re.match(r"\{|\d+-", piece):
            choices.append([piece])
            continue
        numbers: list[int] = []
        items = piece.strip("{}").split(",")
        if ".." in items:
            first, second, last = int(items[0]), int(items[1]), int(items[3])
            numbers = list(range(first, last + 1, second - first))
        else:
            for item in items:
                low, _, high = item.partition("-")
                numbers += range(int(low), int(high or low) + 1)
        choices.append([str(number) for number in numbers])
    paths = ["".join(parts) for parts in itertools.product(*choices)]
    repeats, rest = divmod(int(times or 1), len(paths))
    assert rest == 0
    return Counter(dict.fromkeys(paths, repeats))


@given(
    st.lists(
        st.builds(
            "{}.{}.{}".format,
            st.sampled_from(["a.3", "b", "c2"]),
            st.integers(0, 12),
            st.one_of(st.integers(0, 3), st.sampled_from(["q", "1x"])),
        ),
        min_size=1,
        max_size=40,
    )
)
def test_abbreviations_stand_for_exactly_the_paths(paths: list[str]) -> None:
    assert sum((_expand(line) for line in render.abbreviate(paths)), Counter()) == Counter(paths)
