"""Batches of each fill, rows of a tiny model's, and the time that a run may take."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="pip install -e '.[models]'")

from benchmarks import bench_unpad
from benchmarks.bench_unpad import CASES, FILLS, padding


@pytest.mark.parametrize("fill", FILLS)
def test_batches_have_that_fill(fill: float) -> None:
    for case in CASES:
        mask = padding(*case.shape, fill)
        assert mask.shape == case.shape
        assert abs(float(mask.float().mean()) - fill) < 0.01
        assert int(mask.sum(1).max()) >= case.shape[1] * min(1.0, 2 * fill) - 1


def rows(monkeypatch: pytest.MonkeyPatch, path: Path, *arguments: str) -> list[dict[str, str]]:
    monkeypatch.setattr(sys, "argv", ["bench_unpad", "--dry-run", "--output", str(path), *arguments])
    bench_unpad.main()
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.further
@pytest.mark.parametrize("name", ["T5", "loss"])
def test_a_row_for_each_fill(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = rows(monkeypatch, tmp_path / "rows.csv", "--cases", name, "--sides", "inductor", "unpad")
    assert [row["fill"][:3] for row in found] == ["0.5", "0.7", "1.0"]
    assert all(row["kept"] == row["failure"] == row["padded_p50_ms"] == "" for row in found)
    assert all(float(row["error"]) < 1e-5 and float(row["over_inductor"]) > 0 for row in found)


def test_nothing_starts_without_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert rows(monkeypatch, tmp_path / "rows.csv", "--budget", "-1") == []
