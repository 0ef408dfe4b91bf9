from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import harness
from benchmarks.harness import BACKEND, BASELINE


def test_timing_columns_hold_both_sides() -> None:
    columns = harness.timing_columns({BASELINE: [4.0] * 5, BACKEND: [1.0, 2.0, 2.0, 2.0, 9.0]})
    assert columns["ratio"] == "2.000"
    assert columns[f"{BACKEND}_p50_ms"] == "2"
    assert float(columns[f"{BACKEND}_p80_ms"]) > 2
    assert columns["rounds"] == "5"


def test_a_training_step_leaves_gradients_of_one_call_only() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    step = harness.make_step(model, {"input": torch.randn(2, 4, 3)}, training=True)
    step()
    first = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    step()
    assert len(first) == 4
    assert all(g.abs().sum() > 0 for g in first)
    torch.testing.assert_close(first, [p.grad for p in model.parameters()])


def test_rows_are_on_disk_at_once_and_kept_by_append(tmp_path: Path) -> None:
    path = tmp_path / "results" / "x.csv"
    harness.CsvFile(path, ["model", "ratio"]).add({"model": "llama", "ratio": "1.5"})
    again = harness.CsvFile(path, ["model", "ratio"], append=True)
    again.add({"model": "gpt2"})
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["model"] for row in rows] == ["llama", "gpt2"] == [row["model"] for row in again.rows]
    with pytest.raises(ValueError, match="speed"):
        again.add({"speed": "1"})


@pytest.mark.parametrize(
    ("row", "status"),
    [
        ({"ratio": "0.98", "numerics": "ok"}, 0),
        ({"ratio": "0.97", "numerics": "ok"}, 1),
        ({"ratio": "2.0", "numerics": "WRONG"}, 1),
        ({"failure": "no such kernel"}, 0),
    ],
)
def test_failures_are_the_slow_and_the_wrong(row: dict[str, str], status: int) -> None:
    assert harness.failures([row]) == status


def test_environment_names_the_commit_and_the_versions() -> None:
    where = harness.environment("cpu", commit="abc1234")
    assert where["commit"] == "abc1234"
    assert where["torch"] == torch.__version__
    assert where["device"]
