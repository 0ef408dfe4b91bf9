"""Rows of `attn_compiler.compare`: what is not known is empty, and a side that failed says so."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from attn_compiler.compiling.comparing.comparison import Comparison
from attn_compiler.compiling.comparing.sides import Side
from attn_compiler.reporting import doctor
from attn_compiler.reporting.report import Reports
from benchmarks import bench_memory
from benchmarks.bench_memory import COLUMNS, row_of


def _comparison(*sides: Side) -> Comparison:
    return Comparison(
        model="Model",
        inputs=(),
        training=False,
        modes="in eval()",
        settings={},
        facts=doctor.machine_facts(),
        sides=sides,
        drew_random_numbers=False,
        reports=Reports([]),
    )


def test_a_row_has_memory_in_mib_and_nothing_for_what_is_not_known() -> None:
    ours = Side(name="attn_compiler", milliseconds=(1.0, 2.0, 3.0), ratio=1.5, held_bytes=2**20, peak_bytes=3 * 2**20)
    row = row_of(_comparison(Side(name="eager"), Side(name="inductor", failure="ValueError: no"), ours))
    assert row.keys() <= set(COLUMNS)
    assert (row["gain"], row["attn_compiler_p50_ms"]) == ("1.500", "2")
    assert (row["attn_compiler_held_mib"], row["attn_compiler_peak_mib"]) == ("1", "3")
    assert row["eager_p50_ms"] == row["inductor_peak_mib"] == row["attn_compiler_outputs_apart"] == ""
    assert row["failure"] == "inductor: ValueError: no"


def test_what_is_there_is_kept_and_what_is_too_late_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def measured(words: str, *_: object) -> Comparison:
        asked.append(words)
        return _comparison(Side(name="attn_compiler", ratio=1.0))

    monkeypatch.setattr(bench_memory, "measure", measured)
    file = tmp_path / "rows.csv"
    common = ["--device", "cpu", "--output", str(file)]
    assert bench_memory.main(["--cases", "bert/sdpa/train", *common]) == 0
    assert bench_memory.main(["--cases", "bert/sdpa/train", "vit/sdpa/train", "--append", *common]) == 0
    assert bench_memory.main(["--cases", "t5/sdpa/train", "--append", "--budget-seconds", "-1", *common]) == 0
    assert asked == ["bert/sdpa/train", "vit/sdpa/train"]
    with file.open(newline="") as text:
        assert [row["model"] for row in csv.DictReader(text)] == ["bert", "vit"]
