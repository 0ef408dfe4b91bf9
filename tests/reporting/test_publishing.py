"""Where `publish` puts a report."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch._dynamo.utils import counters

from attn_compiler.context_parallel import ContextParallel
from attn_compiler.options.options import Options
from attn_compiler.reasons.decisions import Decision
from attn_compiler.reporting import publishing, wording
from attn_compiler.reporting.report import Report, Reports
from attn_compiler.torch_private import compat as torch_compat
from tests.meshes import fake_mesh
from tests.reporting.making import REPORT, SITE


@pytest.fixture(autouse=True)
def _fresh_registry() -> Iterator[None]:
    publishing.reset()
    counters["attn_compiler"].clear()
    yield
    publishing.reset()
    counters["attn_compiler"].clear()


def test_publish_keeps_the_last_64() -> None:
    for number in range(70):
        publishing.publish(dataclasses.replace(REPORT, graph=f"{number}/0"), Options())
    kept = publishing.reports()
    assert isinstance(kept, Reports)
    assert [one.graph for one in kept] == [f"{number}/0" for number in range(6, 70)]
    publishing.reset()
    assert publishing.reports() == ()


def test_publish_counts_sites_and_lowerings() -> None:
    publishing.publish(REPORT, Options())
    publishing.publish(
        dataclasses.replace(REPORT, sites=(dataclasses.replace(SITE, decision=Decision(lowering="untouched")),)),
        Options(),
    )
    publishing.publish(Report(graph="2/0", target="cpu", failure="KeyError"), Options())
    assert dict(counters["attn_compiler"]) == {
        "graphs": 3,
        "sites": 10,
        "misses": 2,
        "failures": 1,
        "lowering:hopper": 5,
        "lowering:untouched": 5,
    }


@pytest.mark.parametrize(("level", "shows_table"), [(logging.INFO, False), (logging.DEBUG, True)])
def test_publish_logs(caplog: pytest.LogCaptureFixture, level: int, shows_table: bool) -> None:
    caplog.set_level(level, logger="attn_compiler")
    published = REPORT
    publishing.publish(published, Options())
    lines = [
        (record.levelno, record.getMessage())
        for record in caplog.records
        if record.name == "attn_compiler.reporting.publishing"
    ]
    summary = wording.introduction(published)
    assert summary.endswith("save('report.html') shows why")
    assert lines == [(logging.INFO, summary), *([(logging.DEBUG, published.details())] if shows_table else [])]


def test_the_first_graph_with_attention_is_told_of_more_and_later_ones_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="attn_compiler")
    for report in (
        Report(graph="0/0", target="cpu"),
        dataclasses.replace(REPORT, graph="1/0"),
        dataclasses.replace(REPORT, graph="2/0"),
    ):
        publishing.publish(report, Options())
    lines = [record.getMessage() for record in caplog.records if record.name == "attn_compiler.reporting.publishing"]
    assert ["save('report.html')" in line for line in lines] == [False, True, False]


def test_publish_formats_no_table_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing.log, "level", logging.INFO)
    monkeypatch.setattr(Report, "details", _must_not_be_called)
    monkeypatch.setattr(Report, "to_dict", _must_not_be_called)
    monkeypatch.setattr(torch_compat, "trace_artifact", lambda name, payload, *, encoding: None)
    publishing.publish(REPORT, Options())


def test_publish_traces_the_json_with_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    artifacts = []

    def trace_artifact(name: str, payload: Callable[[], str], *, encoding: str) -> None:
        artifacts.append((name, json.loads(payload()), encoding))

    monkeypatch.setattr(torch_compat, "trace_artifact", trace_artifact)
    with fake_mesh(2) as mesh:
        publishing.publish(REPORT, Options(lowering="sdpa", context_parallel=ContextParallel(mesh)))
    [(name, data, encoding)] = artifacts
    assert (name, encoding) == ("attn_compiler_report", "json")
    options = data.pop("options")
    assert options["lowering"] == "sdpa"
    assert options["context_parallel"]["load_balance"] == "auto"
    assert data == REPORT.to_dict()


def _must_not_be_called(*_: Any) -> Any:
    raise AssertionError("formatted although nobody reads it")
