"""The command on a model of each library, and the tables that it writes."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.hf.today import __main__ as today
from tests.hf.today.every import MODEL, MODELS, rows_of
from tests.hf.today.running import PROVED, TARGETS
from tests.hf.today.table import COLUMNS, lines, read_csv, write_csv

ROOT = Path(__file__).parents[3]


def test_names_are_distinct() -> None:
    assert len(MODEL) == len(MODELS)


def test_no_model_has_that_name() -> None:
    assert today.main(["--only", "no such model"]) == 2


def test_the_tables_have_a_row_a_call(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    found = rows_of("BGE M3 (XLM-R)")
    assert [(row.status, row.call, row.masks) for row in found] == [
        ("ok", call.name, {PROVED: 2}) for call in MODEL["BGE M3 (XLM-R)"].calls
    ]
    write_csv(found, tmp_path / "models.csv")
    with (tmp_path / "models.csv").open(newline="", encoding="utf-8") as file:
        read = list(csv.DictReader(file))
    assert [row["found"] for row in read] == ["2"] * len(found)
    page = "\n".join(lines(read_csv(tmp_path / "models.csv")))
    assert "1 models, 2 calls. 4 of 4 attentions are found." in page
    assert page.count("| BGE M3 (XLM-R) |") == 2


def test_the_kept_table_has_every_call_and_no_attention_without_a_kernel_that_is_not_told() -> None:
    with (ROOT / "docs" / "models.csv").open(newline="", encoding="utf-8") as file:
        read = list(csv.DictReader(file))
    assert tuple(read[0]) == COLUMNS
    assert [(row["model"], row["call"]) for row in read] == [
        (model.name, call.name) for model in MODELS for call in model.calls
    ]
    for row in read:
        slow = [machine for machine in TARGETS if {"untouched", "math", "sdpa_math"} & set(_names(row[machine]))]
        assert all(f"{machine}: untouched, since" in row["why"] for machine in slow), (row["model"], row["call"])


def _names(cell: str) -> list[str]:
    return [part.partition(" x ")[0] for part in cell.split("; ") if part]
