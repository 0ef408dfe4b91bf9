from __future__ import annotations

import csv
from pathlib import Path

import pytest

import attn_compiler
from benchmarks import fp8_training
from benchmarks.fp8_training import BASELINE, RECIPES, WINDOW, draw, last, losses, write


def test_a_small_llama_learns_as_well() -> None:
    """In 160 steps, within one per cent; when this was written, 0.3 apart."""
    pytest.importorskip("transformers")
    usual = losses(None, 160)
    assert last(usual) < 0.6 * usual[0]
    for name in ("current", "delayed"):
        found = losses(RECIPES[name], 160)
        assert {site.decision.lowering for site in attn_compiler.reports()[-1].sites} == {"reference_fp8"}
        assert abs(last(found) - last(usual)) <= 0.01 * last(usual)


def test_the_text_is_long_enough_and_every_run_sees_the_same() -> None:
    assert len(fp8_training.text()) > 100_000
    assert bool((fp8_training.batch(3) == fp8_training.batch(3)).all())
    assert not bool((fp8_training.batch(3) == fp8_training.batch(4)).all())


def test_runs_are_written_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = {BASELINE: [3.0 - i / 100 for i in range(2 * WINDOW)], "current": [3.1 - i / 100 for i in range(2 * WINDOW)]}
    write(runs, tmp_path / "a.csv")
    with (tmp_path / "a.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["current"]) for row in rows] == pytest.approx(runs["current"])
    draw(runs, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_activations_are_those_of_the_last_layer() -> None:
    pytest.importorskip("transformers")
    setup = fp8_training.EMULATED
    q, k, v = fp8_training.activations(1, setup)
    assert q.shape == k.shape == v.shape == (1, setup.heads, setup.length, setup.hidden // setup.heads)
    assert bool((k[:, 0] == k[:, 1]).all())
