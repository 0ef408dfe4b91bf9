from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import fp8_learning, harness
from benchmarks.fp8_learning import Run
from benchmarks.fp8_learning_rows import BASELINE, against_baseline, mean_and_error, shared, ways_of
from benchmarks.fp8_training import WINDOW


def _row(way: str, seed: int, loss: float) -> dict[str, str]:
    run = Run(
        way=way, seed=seed, losses=[loss] * 3 * WINDOW, held_out=loss, lowerings="", note="", captured="", seconds=1.0
    )
    return run.columns


def test_differences_are_taken_seed_by_seed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        _row(BASELINE, 0, 2.0),
        _row(BASELINE, 1, 1.0),
        _row("per block", 1, 1.02),
        _row("per block", 0, 2.0),
    ]
    assert against_baseline(rows, "per block", "loss") == pytest.approx([2.0, 0.0])
    assert mean_and_error([2.0, 0.0]) == pytest.approx((1.0, 1.0))
    file = harness.CsvFile(tmp_path / "a.csv", tuple(rows[0]))
    for row in rows:
        file.add(row)
    assert fp8_learning.main([str(tmp_path / "a.csv"), "--draw", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_means_are_over_the_seeds_that_all_have() -> None:
    rows = [_row(BASELINE, 0, 1.0), _row(BASELINE, 1, 2.0), _row("delayed", 0, 3.0)]
    assert [(row["way"], row["seed"]) for row in shared(rows)] == [(BASELINE, "0"), ("delayed", "0")]
    assert shared([_row(BASELINE, 0, 1.0), _row("delayed", 1, 3.0)]) == []


def test_ways_come_in_one_order() -> None:
    rows = [_row(name, 0, 1.0) for name in ("another", "delayed", BASELINE)]
    assert ways_of(rows) == [BASELINE, "delayed", "another"]
