"""Reports as data: the JSON's schema, merging, and where `publish` puts a report."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch._dynamo.utils import counters

from attn_compiler import masks, report, scores, torch_compat
from attn_compiler.decisions import Copy, Decision, Reason, Refusal
from attn_compiler.options import Options
from attn_compiler.report import MissReport, Report, Reports, SiteReport
from attn_compiler.spec import AttentionSpec, TensorSpec

QKV = TensorSpec(shape=(2, 4, "s0", 8), strides=("32*s0", 8, 32, 1), dtype="float32", requires_grad=True)
SPEC = AttentionSpec(
    q=QKV,
    k=QKV,
    v=QKV,
    mask=masks.MaskSpec(kinds=(masks.Causal(alignment=masks.Alignment.BOTTOM_RIGHT),)),
    score=scores.ScoreSpec(scale=0.5),
    device="cpu",
    out_dtype="float32",
)


def make_report(graph: str = "0/0", lowering: str = "sdpa") -> Report:
    reason = Reason(rule="rule", observed="observed", remedy=None)
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
    return Report(graph=graph, target="cpu", sites=(site,), misses=(miss,), seconds=(("match", 0.5), ("lower", 0.25)))


@pytest.fixture(autouse=True)
def _fresh_registry() -> Iterator[None]:
    report.reset()
    counters["attn_compiler"].clear()
    yield
    report.reset()
    counters["attn_compiler"].clear()


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
                    {"lowering": "cudnn", "reasons": [{"rule": "rule", "observed": "observed", "remedy": None}]}
                ],
                "copies": [{"operand": "q", "bytes": None, "why": "why"}],
                "notes": ["note"],
                "source": None,
            }
        ],
        "misses": [
            {
                "modules": ["b", "c"],
                "anchor": "softmax",
                "nearest": "softmax_matmul",
                "stopped_at": "scale",
                "reason": {"rule": "rule", "observed": "observed", "remedy": None},
                "source": "m.py:1",
            }
        ],
        "seconds": [{"pass": "match", "seconds": 0.5}, {"pass": "lower", "seconds": 0.25}],
        "failure": None,
        "faults": [],
    }


def test_the_spec_can_be_built_again_from_the_json() -> None:
    spec = json.loads(make_report().to_json())["sites"][0]["spec"]
    assert AttentionSpec.from_text(json.dumps(spec)) == SPEC


@pytest.mark.parametrize(
    ("mask", "formula", "unproved"),
    [
        (masks.MaskSpec(proved=(masks.Causal(),)), "k <= q", None),
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


def test_publish_keeps_the_last_64() -> None:
    for number in range(70):
        report.publish(make_report(f"{number}/0"), Options())
    kept = report.reports()
    assert isinstance(kept, Reports)
    assert [one.graph for one in kept] == [f"{number}/0" for number in range(6, 70)]
    report.reset()
    assert report.reports() == ()


def test_publish_counts_sites_and_lowerings() -> None:
    report.publish(make_report(), Options())
    report.publish(make_report(lowering="untouched"), Options())
    report.publish(Report(graph="2/0", target="cpu", failure="KeyError"), Options())
    assert dict(counters["attn_compiler"]) == {
        "graphs": 3,
        "sites": 6,
        "misses": 4,
        "failures": 1,
        "lowering:sdpa": 3,
        "lowering:untouched": 3,
    }


@pytest.mark.parametrize(("level", "shows_table"), [(logging.INFO, False), (logging.DEBUG, True)])
def test_publish_logs(caplog: pytest.LogCaptureFixture, level: int, shows_table: bool) -> None:
    caplog.set_level(level, logger="attn_compiler")
    published = make_report()
    report.publish(published, Options())
    lines = [
        (record.levelno, record.getMessage()) for record in caplog.records if record.name == "attn_compiler.report"
    ]
    summary = "graph 0/0 on cpu: 3 attention sites (sdpa 3), 2 misses, 750 ms in passes"
    assert lines == [(logging.INFO, summary), *([(logging.DEBUG, str(published))] if shows_table else [])]


def test_publish_formats_no_table_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report.log, "level", logging.INFO)
    monkeypatch.setattr(Report, "__str__", _must_not_be_called)
    monkeypatch.setattr(Report, "to_dict", _must_not_be_called)
    monkeypatch.setattr(torch_compat, "trace_artifact", lambda name, payload, *, encoding: None)
    report.publish(make_report(), Options())


def test_publish_traces_the_json_with_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    artifacts = []

    def trace_artifact(name: str, payload: Callable[[], str], *, encoding: str) -> None:
        artifacts.append((name, json.loads(payload()), encoding))

    monkeypatch.setattr(torch_compat, "trace_artifact", trace_artifact)
    report.publish(make_report(), Options(lowering="sdpa"))
    [(name, data, encoding)] = artifacts
    assert (name, encoding) == ("attn_compiler_report", "json")
    assert data.pop("options")["lowering"] == "sdpa"
    assert data == make_report().to_dict()


def _must_not_be_called(*_: Any) -> Any:
    raise AssertionError("formatted although nobody reads it")
