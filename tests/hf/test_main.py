"""The survey's command, in its own processes: what it writes, and its exit status."""

from __future__ import annotations

import csv
import os
import sys
from pathlib import Path

import pytest

from tests.hf import table
from tests.hf.__main__ import main


@pytest.mark.further
def test_the_command_writes_its_table(tmp_path: Path) -> None:
    out = tmp_path / "survey"
    assert main(["--only", "mha_self-padded", "--only", "fp32", "--jobs", "1", "--out", str(out)]) == 0
    with out.with_suffix(".csv").open(encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    assert (row["status"], row["found"], row["expected"]) == ("ok", "1", "1")
    assert "1 of 1 attention sites found" in table.found(table.read_csv(out.with_suffix(".csv")))[0]


def test_a_word_that_no_case_has_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "lama2"]) == 2
    assert "lama2" in capsys.readouterr().out


def test_packages_of_a_folder_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the workers too, which are other processes."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    assert main(["--packages", str(tmp_path), "--only", "no such case"]) == 2
    assert sys.path[0] == str(tmp_path)
    assert os.environ["PYTHONPATH"] == os.pathsep.join([str(tmp_path), "elsewhere"])
