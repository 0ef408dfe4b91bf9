"""Errors of FP8 name the first of many, and what there is instead. Messages and pickling are in test_errors.py."""

from __future__ import annotations

from attn_compiler.reasons import errors, fp8_errors

MANY = tuple(f"layers.{i}/amax" for i in range(5))
FIRST = "layers.0/amax, layers.1/amax, layers.2/amax, ..."


def test_a_recipe_that_no_attention_gets_names_modules_and_patterns() -> None:
    error = fp8_errors.Fp8RecipeUnused(modules=MANY, exclude=("layers.*",))
    assert FIRST in str(error)
    assert "layers.*" in str(error)
    assert MANY[3] not in str(error)


def test_what_no_history_can_hold_is_shortened_too() -> None:
    assert FIRST in str(fp8_errors.Fp8StateInvalid(problems=MANY))


def test_a_state_of_before_says_whether_there_is_one_now() -> None:
    there = fp8_errors.Fp8StateOutdated(given=MANY, wanted=("'layers.0/amax' (16, 3)",))
    assert "'layers.0/amax' (16, 3)" in str(there)
    none = fp8_errors.Fp8StateOutdated(given=MANY, wanted=())
    assert "there is none yet, run the model once first" in str(none)


def test_whoever_catches_all_errors_catches_these() -> None:
    kinds = (fp8_errors.Fp8RecipeUnused, fp8_errors.Fp8StateMismatch, fp8_errors.Fp8StateInvalid)
    assert all(issubclass(kind, errors.AttnCompilerError) for kind in (*kinds, fp8_errors.Fp8StateOutdated))
