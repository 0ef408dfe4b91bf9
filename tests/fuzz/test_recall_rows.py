"""The table of planted faults."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tests.fuzz import recall_rows
from tests.fuzz.recall_rows import Row

ROW = Row(
    fault="a, b",
    file="x.py",
    within="f",
    rule="masks",
    found="wrong",
    by="views",
    programs=3,
    place=7,
    seconds=1.5,
    minutes_of_two_cores=0.25,
)


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    path, head = tmp_path / "recall.csv", recall_rows.about(seed=1, rounds=2, programs=3)
    other = dataclasses.replace(ROW, fault="c", found="")
    recall_rows.write(path, head, {"c": other, "a, b": ROW})
    assert recall_rows.read(path, head) == {"a, b": ROW, "c": other}
    assert recall_rows.read(path, recall_rows.about(seed=2, rounds=2, programs=3)) == {}
    assert recall_rows.read(tmp_path / "none.csv", head) == {}


def test_the_commit_alone_makes_no_other_code(tmp_path: Path) -> None:
    path = tmp_path / "recall.csv"
    recall_rows.write(path, "# code: 1; commit: a; seed 1", {"a, b": ROW})
    assert recall_rows.read(path, "# code: 1; commit: b; seed 1") != {}
    assert recall_rows.read(path, "# code: 2; commit: a; seed 1") == {}


def test_the_summary_says_what_was_not_found() -> None:
    text = recall_rows.summary([ROW, dataclasses.replace(ROW, fault="c", found="")], 4)
    assert text.splitlines()[0] == "recall: 1 of 4 faults, 25.0%; 2 not tried"
    assert "not found: c (x.py, f)" in text
