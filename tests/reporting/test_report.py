"""What a report says, as text and as facts."""

from __future__ import annotations

import dataclasses
import html
import json
from dataclasses import fields
from pathlib import Path

import pytest

from attn_compiler import index_expr as ix
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Copy, Decision, Estimate, Evidence, Reason, Refusal
from attn_compiler.reasons.errors import ReportNotSaved
from attn_compiler.reporting import wording
from attn_compiler.reporting.facts import GraphReport, LinearReport, MissReport, SiteReport, UnpadReport
from attn_compiler.reporting.report import Report, Reports
from attn_compiler.spec import masks, scores
from attn_compiler.spec.attention import AttentionSpec, TensorSpec
from attn_compiler.torch_private.batches_before import Steps
from tests.lowerings.linear import linear_forms
from tests.reporting.test_render import REPORT, SITE, SPEC as WORDING_SPEC, TARGET

# Reports as data.
QKV = TensorSpec(shape=(2, 4, "s0", 8), strides=("32*s0", 8, 32, 1), dtype="float32", requires_grad=True)
SPEC = AttentionSpec(
    q=QKV,
    k=QKV,
    v=QKV,
    mask=masks.MaskSpec(kinds=(masks.Causal(alignment=masks.Alignment.BOTTOM_RIGHT),), flag=masks.Flag.CALLED),
    score=scores.ScoreSpec(scale=0.5),
    device="cpu",
    out_dtype="float32",
)


def make_report(graph: str = "0/0", lowering: str = "sdpa") -> Report:
    reason = Reason(code=Code.DTYPE, rule="rule", observed="observed", remedy=None)
    site = SiteReport(
        modules=("a.0", "a.1", "a.2"),
        pattern="sdpa",
        spec=SPEC,
        decision=Decision(lowering=lowering, refusals=(Refusal(lowering="cudnn", reasons=(reason,)),)),
        copies=(Copy(operand="q", bytes=None, why="why"),),
        notes=("note",),
    )
    miss = MissReport(
        modules=("b", "c"),
        anchor="softmax",
        nearest="softmax_matmul",
        stopped_at="scale",
        reason=reason,
        source="m.py:1",
    )
    return Report(
        graph=graph,
        target="cpu",
        sites=(site,),
        misses=(miss,),
        seconds=(("match", 0.5), ("lower", 0.25)),
        kernels=(("attention_forward", 1.5),),
    )


def test_json_has_every_field_under_its_name() -> None:
    assert json.loads(make_report().to_json()) == {
        "version": 1,
        "graph": "0/0",
        "target": "cpu",
        "num_sites": 3,
        "num_misses": 2,
        "sites": [
            {
                "modules": ["a.0", "a.1", "a.2"],
                "pattern": "sdpa",
                "spec": json.loads(SPEC.to_text()),
                "mask": "causal (bottom-right)",
                "mask_formula": None,
                "mask_unproved": None,
                "score": "scale 0.5",
                "score_added": None,
                "lowering": "sdpa",
                "refusals": [
                    {
                        "lowering": "cudnn",
                        "reasons": [{"code": "AC201", "rule": "rule", "observed": "observed", "remedy": None}],
                    }
                ],
                "copies": [{"operand": "q", "bytes": None, "why": "why"}],
                "notes": ["note"],
                "source": None,
                "evidence": None,
                "estimate": None,
                "faster": None,
            }
        ],
        "misses": [
            {
                "modules": ["b", "c"],
                "anchor": "softmax",
                "nearest": "softmax_matmul",
                "stopped_at": "scale",
                "reason": {"code": "AC201", "rule": "rule", "observed": "observed", "remedy": None},
                "source": "m.py:1",
            }
        ],
        "num_linear": 0,
        "linear": [],
        "seconds": [{"pass": "match", "seconds": 0.5}, {"pass": "lower", "seconds": 0.25}],
        "kernels": [{"kernel": "attention_forward", "seconds": 1.5}],
        "failure": None,
        "faults": [],
        "from_cache": False,
        "not_kept": None,
        "untried": [],
        "unpad": None,
        "dumped": None,
    }


def test_the_spec_can_be_built_again_from_the_json() -> None:
    spec = json.loads(make_report().to_json())["sites"][0]["spec"]
    assert AttentionSpec.from_text(json.dumps(spec)) == SPEC


@pytest.mark.parametrize(
    ("mask", "formula", "unproved"),
    [
        (masks.MaskSpec(kinds=(masks.Causal(),)), "k <= q", None),
        (masks.MaskSpec(reason="m holds an element for each pair"), None, "m holds an element for each pair"),
    ],
)
def test_what_a_mask_was_proved_to_be_or_why_not(
    mask: masks.MaskSpec, formula: str | None, unproved: str | None
) -> None:
    site = dataclasses.replace(make_report().sites[0], spec=dataclasses.replace(SPEC, mask=mask))
    [row] = dataclasses.replace(make_report(), sites=(site,)).to_dict()["sites"]
    assert (row["mask_formula"], row["mask_unproved"]) == (formula, unproved)


def test_an_empty_report_has_every_key_too() -> None:
    assert Report(graph="0/0", target="cpu").to_dict().keys() == make_report().to_dict().keys()


def test_evidence_and_estimate_are_in_the_json() -> None:
    evidence = Evidence(order=("a", "b"), why="a 1.00, b 1.20", since="2026-11-23")
    estimate = Estimate(milliseconds=0.5, other="b", other_milliseconds=0.75, like="S 8192", since="2026-11-22")
    site = dataclasses.replace(make_report().sites[0], evidence=evidence, estimate=estimate)
    [row] = json.loads(dataclasses.replace(make_report(), sites=(site,)).to_json())["sites"]
    assert row["evidence"] == {"order": ["a", "b"], "why": "a 1.00, b 1.20", "since": "2026-11-23"} | {
        "measured": True,
        "length": None,
    }
    assert row["estimate"] == {
        "milliseconds": 0.5,
        "other": "b",
        "other_milliseconds": 0.75,
        "like": "S 8192",
        "since": "2026-11-22",
    }
    assert estimate.gained == 0.25


@pytest.mark.parametrize("as_text", [True, False])
def test_a_page_is_saved(tmp_path: Path, as_text: bool) -> None:
    path = tmp_path / "report.html"
    make_report().save(str(path) if as_text else path)
    assert path.read_text(encoding="utf-8") == make_report().to_html()
    assert "Graph 0/0" in path.read_text(encoding="utf-8")
    several = Reports((make_report("0/0"), make_report("1/0")))
    several.save(path)
    assert path.read_text(encoding="utf-8") == several.to_html()
    for shown in (make_report(), several):
        assert html.escape(shown.to_html()) in shown._repr_html_()
    assert "Graph 1/0" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["there/report.html", ".", "a\0b"])
def test_a_page_that_can_not_be_written_says_where_and_why(tmp_path: Path, name: str) -> None:
    with pytest.raises(ReportNotSaved, match=r"could not be written to .*: .*") as raised:
        make_report().save(f"{tmp_path}/{name}")
    assert raised.value.path == f"{tmp_path}/{name}"
    assert raised.value.__cause__ is not None


def test_a_file_stays_as_it_was_if_its_page_can_not_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_text("before")
    monkeypatch.setattr(Report, "to_html", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make_report().save(path)
    assert path.read_text() == "before"


def test_reports_merge() -> None:
    merged = Reports((make_report("0/0"), Report(graph="1/0", target="cpu"), make_report("2/0")))
    data = json.loads(merged.to_json())
    assert {key: data[key] for key in ("version", "num_graphs", "num_sites", "num_misses")} == {
        "version": 1,
        "num_graphs": 3,
        "num_sites": 6,
        "num_misses": 4,
    }
    assert data["graphs"] == [one.to_dict() for one in merged]
    assert (merged.num_sites, merged.num_misses) == (6, 4)
    assert repr(merged) == (
        "<Reports: 3 graphs, 6 attention sites (sdpa 6), 4 misses, 1.50 s in passes; print() shows the table>"
    )


def test_layers_of_linear_attention_have_rows_of_their_own() -> None:
    one = LinearReport(
        modules=("a", "b"),
        spec=linear_forms.spec(),
        decision=Decision(lowering="linear_reference"),
        evidence="measured",
    )
    report = dataclasses.replace(make_report(), linear=(one,))
    (row,) = json.loads(report.to_json())["linear"]
    assert (row["modules"], row["lowering"], row["function"]) == (["a", "b"], "linear_reference", "models:delta")
    assert row["computes"] == one.spec.words
    assert Reports((report, report)).to_dict()["num_linear"] == 4
    assert "3 attention sites of 1 kind, 2 layers of linear attention (linear_reference 2), 2 misses" in str(report)
    assert f"computes  {one.spec.words}" in str(report)
    assert "graph-1-linear-1" in report.to_html()


# What is counted from a report's data.
def test_rows_stand_for_as_many_sites_as_they_have_modules() -> None:
    report = make_report()
    assert (len(report.sites), report.num_sites) == (1, 3)
    assert (len(report.misses), report.num_misses) == (1, 2)
    assert report.total_seconds == 0.75


def test_a_report_is_its_data_with_ways_to_show_it() -> None:
    assert {field.name for field in fields(Report)} == {field.name for field in fields(GraphReport)}
    assert not hasattr(make_report(), "__dict__")


def test_padding_that_stays_has_no_last_calls() -> None:
    assert UnpadReport().last == ()
    assert UnpadReport(steps=Steps()).last == ()


# What a log says of a report, in a line.
def test_summary_is_one_line() -> None:
    assert wording.summary(REPORT) == f"graph 0/0 on {TARGET}: 32 attention sites (sdpa 32), 1 miss, 125 ms in passes"


def test_the_first_line_of_a_process_names_masks_and_lowerings() -> None:
    assert wording.introduction(REPORT) == (
        f"{wording.summary(REPORT)}; by mask: 32 × causal: sdpa; attn_compiler.reports().save('report.html') shows why"
    )


def test_the_first_line_of_a_process_stays_a_line() -> None:
    long = masks.MaskSpec(kinds=(masks.Formula(condition=ix.Load("a_name_" * 20, (ix.Index("q"),), "bool")),))
    sites = tuple(
        dataclasses.replace(SITE, pattern=str(n), spec=dataclasses.replace(WORDING_SPEC, mask=long)) for n in range(9)
    )
    line = wording.introduction(dataclasses.replace(REPORT, sites=sites))
    assert "5 more kinds" in line
    assert "\n" not in line
    assert len(line) < 700
