"""The survey's CSV and Markdown, from results made by hand."""

from __future__ import annotations

import csv
from pathlib import Path

from tests.hf.survey import Case, Result
from tests.hf.table import COLUMNS, found, others, read_csv, write_csv


def _results() -> list[Result]:
    def case(scenario: str, impl: str = "sdpa") -> Case:
        return Case(family="llama", scenario=scenario, impl=impl, dtype="fp32")

    return [
        Result(
            case=case("no_mask"),
            status="ok",
            found=2,
            expected=2,
            lowerings=("flash", "math"),
            max_error=1.25e-6,
            limit=0.0125,
        ),
        Result(case=case("padded"), status="sites", found=1, expected=2, detail="found 1 of 2"),
        Result(case=case("static_decode", "eager"), status="absent", detail="has no cache"),
    ]


def test_csv_has_a_row_a_case(tmp_path: Path) -> None:
    path = tmp_path / "survey.csv"
    write_csv(_results(), path)
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert [row["status"] for row in rows] == ["ok", "sites", "absent"]
    assert rows[0]["lowerings"] == "flash; math"
    assert rows[0]["max_error"] == "1.25e-06"
    assert rows[1]["max_error"] == ""


def test_tables_of_what_was_written_have_totals_failures_and_absences(tmp_path: Path) -> None:
    write_csv(_results(), tmp_path / "survey.csv")
    read = read_csv(tmp_path / "survey.csv")
    assert read == _results()
    text = "\n".join((*found(read), *others(read)))
    assert "2 cases ran: 3 of 4 attention sites found, 1 cases failed." in text
    assert "| llama | sdpa | 2/2 (0.013) | **1/2** |" in text
    assert "- llama-padded-sdpa-fp32: sites: found 1 of 2" in text
    assert "- llama: eager static_decode: has no cache" in text
    assert "| llama | sdpa | flash, math |" in text
