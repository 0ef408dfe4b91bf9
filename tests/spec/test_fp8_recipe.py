from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from attn_compiler import CurrentScaling, DelayedScaling, Fp8Recipe, StaticScaling
from attn_compiler.options.options import Options
from attn_compiler.reasons.errors import InvalidOption
from attn_compiler.spec.attention import AttentionSpec
from tests.lowerings.specs import make_spec

STATIC = StaticScaling(q=1, k=2, v=3.5)

#: all different
RECIPES = (
    Fp8Recipe(),
    Fp8Recipe(scaling=CurrentScaling(granularity="tensor")),
    Fp8Recipe(scaling=CurrentScaling(granularity="head")),
    Fp8Recipe(scaling=CurrentScaling(granularity="block", block=256)),
    Fp8Recipe(scaling=CurrentScaling(margin=1)),
    Fp8Recipe(scaling=DelayedScaling()),
    Fp8Recipe(scaling=DelayedScaling(amax_history_len=2)),
    Fp8Recipe(scaling=DelayedScaling(amax_compute_algo="most_recent")),
    Fp8Recipe(scaling=DelayedScaling(granularity="head")),
    Fp8Recipe(qk_format="int8"),
    Fp8Recipe(force=True),
    Fp8Recipe(scaling=STATIC),
    Fp8Recipe(scaling=dataclasses.replace(STATIC, v=4)),
    Fp8Recipe(forward=False, backward=True),
    Fp8Recipe(backward=True),
    Fp8Recipe(forward_format="e5m2"),
    Fp8Recipe(gradient_format="e4m3"),
    Fp8Recipe(smooth_k=True),
    Fp8Recipe(hadamard=True),
)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.words)
def test_a_spec_says_it_in_its_text(recipe: Fp8Recipe) -> None:
    spec = dataclasses.replace(make_spec(), fp8=recipe)
    assert AttentionSpec.from_text(spec.to_text()) == spec


def test_every_part_of_it_is_in_the_key() -> None:
    excluding = (Fp8Recipe(exclude=("a",)), Fp8Recipe(exclude=("a", "b")))
    digests = {Options(fp8_recipe=recipe).digest() for recipe in (None, *RECIPES, *excluding)}
    assert len(digests) == 1 + len(RECIPES) + len(excluding)


def test_equal_recipes_are_one_key() -> None:
    one, other = Fp8Recipe(exclude=("a",)), Fp8Recipe(exclude=["a"])  # type: ignore[arg-type]
    assert (one, hash(one)) == (other, hash(other))
    assert Options(fp8_recipe=one).digest() == Options(fp8_recipe=other).digest()


@pytest.mark.parametrize(
    "given", [Fp8Recipe(), CurrentScaling(), DelayedScaling(), STATIC], ids=lambda x: type(x).__name__
)
def test_nothing_of_it_can_be_changed(given: Any) -> None:
    for field in dataclasses.fields(given):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(given, field.name, getattr(given, field.name))


def test_what_a_list_of_patterns_becomes_later_does_not_matter() -> None:
    patterns = ["a"]
    recipe = Fp8Recipe(exclude=patterns)  # type: ignore[arg-type]
    patterns.append("b")
    assert recipe.exclude == ("a",)


@pytest.mark.parametrize(
    ("cls", "name", "value"),
    [
        (Fp8Recipe, "scaling", "current"),
        (Fp8Recipe, "scaling", CurrentScaling),
        (Fp8Recipe, "forward", 1),
        (Fp8Recipe, "forward", False),
        (Fp8Recipe, "backward", None),
        (Fp8Recipe, "forward_format", "e3m4"),
        (Fp8Recipe, "gradient_format", "hybrid"),
        (Fp8Recipe, "exclude", "layers.*"),
        (Fp8Recipe, "exclude", ("",)),
        (Fp8Recipe, "exclude", (3,)),
        (Fp8Recipe, "smooth_k", "yes"),
        (Fp8Recipe, "hadamard", 0),
        (CurrentScaling, "granularity", "row"),
        (CurrentScaling, "block", 64),
        (CurrentScaling, "block", 192),
        (CurrentScaling, "block", 128.0),
        (CurrentScaling, "margin", -1),
        (CurrentScaling, "margin", 17),
        (DelayedScaling, "amax_history_len", 0),
        (DelayedScaling, "amax_history_len", True),
        (DelayedScaling, "amax_compute_algo", "mean"),
        (DelayedScaling, "granularity", "block"),
        (DelayedScaling, "margin", 0.5),
    ],
)
def test_a_wrong_value_is_named(cls: Any, name: str, value: Any) -> None:
    with pytest.raises(InvalidOption) as caught:
        cls(**{name: value})
    assert caught.value.option == f"fp8_recipe: {name}"
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", [0, -1.0, 1e-40, 1e40, float("inf"), float("nan"), "1", True])
def test_a_magnitude_that_is_none(value: Any) -> None:
    """Nor is one whose scale, or what undoes it, float32 has no number for."""
    with pytest.raises(InvalidOption, match=r"StaticScaling\.k.*from 1e-30 to 1e\+30"):
        StaticScaling(q=1, k=value, v=1)


def test_patterns_are_those_of_files() -> None:
    recipe = Fp8Recipe(exclude=("model.layers.0.*", "*.cross_attn"))
    assert recipe.excluding("model.layers.0.self_attn") == "model.layers.0.*"
    assert recipe.excluding("decoder.cross_attn") == "*.cross_attn"
    assert recipe.excluding("model.layers.10.self_attn") is None
    assert recipe.for_site() == Fp8Recipe()
