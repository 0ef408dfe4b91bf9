from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

from benchmarks import summary


def row(model: str, implementation: str, scenario: str, ratio: str, **more: str) -> dict[str, str]:
    return {
        "model": model,
        "implementation": implementation,
        "scenario": scenario,
        "dtype": "bfloat16",
        "forced": "",
        "lowerings": "fa4 x8",
        "inductor_p50_ms": "46.42",
        "attn_compiler_p50_ms": "31.51",
        "ratio": ratio,
        **more,
    }


def test_means_are_geometric_and_say_of_how_many() -> None:
    rows = [
        row("llama", "sdpa", "prefill", "2.0"),
        row("bert", "sdpa", "prefill", "8.0"),
        row("bert", "sdpa", "train_padded", "1.0"),
        row("llama", "flex_attention", "prefill", "1.5"),
    ]
    assert list(summary.means(rows)) == [
        "| Inductor with | prefill | train, padded | all | smallest |",
        "|---|---|---|---|---|",
        "| sdpa | 4.00 (2) | 1.00 (1) | 2.52 (3) | 1.00 (bert, train, padded) |",
        "| flex_attention | 1.50 (1) |  | 1.50 (1) | 1.50 (llama, prefill) |",
    ]


def test_a_row_of_the_table() -> None:
    assert list(summary.table([row("llama", "sdpa", "prefill_padded", "1.460")]))[2:] == [
        "| llama | sdpa | prefill, padded | fa4 ×8 | 46.4 | 31.5 | 1.460 |"
    ]


def test_newer_rows_count_where_they_were_measured() -> None:
    old = [row("llama", "sdpa", "train", "1.0"), row("llama", "sdpa", "prefill", "1.0")]
    new = [
        row("llama", "sdpa", "prefill", "", failure="late"),
        row("llama", "sdpa", "train", "1.5"),
        row("bert", "eager", "train", "1.2"),
    ]
    found = summary.merged(old, new)
    assert [(r["model"], r["scenario"], r["ratio"]) for r in found] == [
        ("llama", "prefill", "1.0"),
        ("llama", "train", "1.5"),
        ("bert", "train", "1.2"),
    ]


def test_files_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    base, newer = tmp_path / "base.csv", tmp_path / "newer.csv"
    for path, rows in (
        (base, [row("llama", "sdpa", "train", "1.0")]),
        (newer, [row("llama", "sdpa", "train", "1.5", extras="a 1")]),
    ):
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    monkeypatch.setattr(sys, "argv", ["summary", str(base), "--newer", str(newer)])
    summary.main()
    with base.open(newline="") as file:
        (kept,) = csv.DictReader(file)
    assert (kept["ratio"], kept["extras"]) == ("1.5", "a 1")
    assert "| llama | sdpa | train | fa4 ×8 | 46.4 | 31.5 | 1.5 |" in capsys.readouterr().out
