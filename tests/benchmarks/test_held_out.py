"""The set that nothing was tuned for: it follows its rule, and what its models are called with is padded and random."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from benchmarks import held_out, models
from tests.hf.today.every import MODEL, MODELS

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_the_rule_leaves_out_what_another_benchmark_times() -> None:
    held = held_out.drawn()
    assert len(held) == held_out.DRAWN
    timed = {family.config for family in models.FAMILIES.values()}
    assert timed <= held_out.TIMED.keys()
    assert not held_out.TIMED.keys() & {held_out.architecture(model) for model in held}
    assert all((RESULTS / name).is_file() for name in held_out.TIMED.values())


def test_nobody_picks_a_model() -> None:
    def hashed(name: str) -> str:
        return hashlib.sha256(name.encode()).hexdigest()

    names = [model.name for model in held_out.drawn()]
    largest = max(map(hashed, names))
    others = [m for m in MODELS if m.device == "meta" and m.name not in names]
    assert all(hashed(m.name) > largest for m in others if held_out.architecture(m) not in held_out.TIMED)


def test_each_model_has_inference_and_training_where_it_is_called_so() -> None:
    calls = {(case.model, case.call) for case in held_out.plan()}
    for model in held_out.drawn():
        names = {call.name for call in model.calls} - {"decode with a cache"}
        assert {call for name, call in calls if name == model.name} == names


@pytest.mark.parametrize(
    ("model", "call", "left"), [("Hunyuan 7B", "prefill padded", True), ("Hunyuan 7B", "training", False)]
)
def test_tokens_are_random_and_padded(model: str, call: str, left: bool) -> None:
    pytest.importorskip("transformers", reason="the models are transformers': pip install -e '.[models]'")
    case = held_out.HeldOut(model=model, call=call).case("full", "meta")
    asked = next(each for each in MODEL[model].calls if each.name == call)
    given = held_out.arguments(case.model, asked, "cpu")
    mask, tokens = given["attention_mask"], given["input_ids"]
    assert "labels" not in given
    assert case.training == (call == "training") == case.model.training
    lengths = mask.sum(-1)
    assert lengths[0] == mask.shape[1]
    assert (lengths[1:] < mask.shape[1]).all()
    assert bool(mask[1, 0]) is not left
    assert tokens.unique().numel() > 100
    assert case.valid is not None
    assert case.valid.shape == tokens.shape


def test_an_image_model_gets_noise_and_keeps_what_says_where_things_are() -> None:
    pytest.importorskip("diffusers", reason="the model is diffusers': pip install -e '.[models,demo]'")
    call = MODEL["PixArt Sigma"].calls[0]
    case = held_out.HeldOut(model="PixArt Sigma", call=call.name).case("full", "meta")
    given = held_out.arguments(case.model, call, "cpu")
    assert float(given["hidden_states"].float().std()) == pytest.approx(1.0, abs=0.05)
    assert given["hidden_states"].dtype == torch.bfloat16
    assert given["timestep"].tolist() == [1, 1]
    assert given["encoder_attention_mask"].sum(-1).tolist() == [300, 225]
    assert given["added_cond_kwargs"] == {"resolution": None, "aspect_ratio": None}
    assert case.valid is None
