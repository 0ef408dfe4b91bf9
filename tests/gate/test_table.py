from __future__ import annotations

from pathlib import Path

from tests.gate import table

BEFORE = {("launch", "causal", "forward 0"): "grid 8", ("splits", "b1", "sm90"): "4"}


def test_what_changed_came_and_went_is_said() -> None:
    now = {("launch", "causal", "forward 0"): "grid 4", ("copies", "causal", "cpu"): "no copy"}
    assert table.differences(BEFORE, now) == [
        "launch causal, forward 0: was grid 8, is grid 4",
        "splits b1, sm90: was 4, is not there",
        "copies causal, cpu: was not there, is no copy",
    ]
    assert table.differences(BEFORE, dict(BEFORE)) == []


def test_a_table_that_is_written_is_read_again(tmp_path: Path) -> None:
    table.write(tmp_path / "t.csv", BEFORE)
    assert table.read(tmp_path / "t.csv") == BEFORE
    assert table.of_kinds(BEFORE, ["splits"]) == {("splits", "b1", "sm90"): "4"}


def test_a_failure_names_the_command_and_counts_what_it_does_not_show() -> None:
    said = table.failure([f"line {i}" for i in range(45)], "renew").splitlines()
    assert said[0] == "45 lines differ"
    assert said[-2:] == ["... and 5 more", "if that is meant: renew"]
