"""The page of results: what is at a glance is what the rows say, and what was not measured is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from website import results
from website.gains import rows_of

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_current() -> None:
    """python -m website.results > docs/benchmarks.md"""
    assert (DOCS / "benchmarks.md").read_text(encoding="utf-8") == results.page()


def test_what_nobody_measured_has_no_line() -> None:
    missing = results.Group(words="x", where="H200", file="no_such", of=results._ratios)
    assert missing.line() is None


def test_a_line_has_the_mean_and_the_worst_case() -> None:
    group = results.Group(words="x", where="a CPU", file="cpu", of=lambda _: [0.5, 2.0, 8.0])
    assert group.line() == "| x | a CPU | [3](../benchmarks/results/cpu.csv) | 2.00x | 0.50x |"


@pytest.mark.parametrize("group", results.GROUPS, ids=lambda group: group.words + group.where)
def test_every_ratio_is_that_of_a_row(group: results.Group) -> None:
    if not (results.RESULTS / f"{group.file}.csv").is_file():
        pytest.skip(f"{group.file}.csv was not measured yet")
    found = group.of(group.file)
    assert found
    assert len(found) <= len(rows_of(group.file))
    assert all(0.05 < ratio < 200 for ratio in found)


def test_a_ratio_of_sites_is_inductors_time_over_ours() -> None:
    rows = [row for row in rows_of("sites_h200") if (row["draw"], row["number"], row["training"]) == ("0", "0", "True")]
    theirs, ours = (
        float(next(r["us_p50"] for r in rows if r["side"] == side)) for side in ("inductor", "attn_compiler")
    )
    assert theirs / ours in results._sites("sites_h200")
