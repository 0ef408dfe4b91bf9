"""What is counted from a report's data: sites and misses are modules, not rows; the last calls of an unpadded graph."""

from __future__ import annotations

from dataclasses import fields

from attn_compiler.reporting.facts import GraphReport, UnpadReport
from attn_compiler.reporting.report import Report
from attn_compiler.torch_private.batches_before import Steps
from tests.reporting.test_report import make_report


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
