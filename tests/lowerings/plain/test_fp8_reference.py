from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch

from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.plain import fp8_reference as reference
from attn_compiler.spec.fp8_recipe import CurrentScaling, Fp8Recipe
from attn_compiler.spec.target import Target
from tests import cases, numerics
from tests.cases import BY_NAME, CASES, Case, Inputs
from tests.lowerings.emitting import arguments, emit

RECIPES = {
    "head": Fp8Recipe(),
    "accurate": Fp8Recipe(scaling=CurrentScaling(granularity="block"), smooth_k=True, hadamard=True),
}


REFERENCE = by_name("reference_fp8")
CPU = Target.current("cpu")


def half(case: Case, recipe: str) -> Inputs:
    inputs = cases.build(dataclasses.replace(case, dtype=torch.bfloat16))
    return dataclasses.replace(inputs, spec=dataclasses.replace(inputs.spec, fp8=RECIPES[recipe]))


SERVED = [case for case in CASES if not REFERENCE.why_not(half(case, "head").spec, CPU)]


def test_refuses_what_fp8_or_the_reference_does() -> None:
    refused = {case.name for case in CASES if case.dtype == torch.float32} - {case.name for case in SERVED}
    few_queries, odd_head_dims = (
        {"one_key", "decode", "decode_bottom_right", "mask_decode"},
        {"head_dim_72", "head_dim_odd"},
    )
    assert refused == few_queries | odd_head_dims | {"bias_mask", "everything", "dropout"}


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("case", [case for case in SERVED if case.dtype == torch.float32], ids=lambda case: case.name)
def test_results_and_gradients_are_near_the_exact_ones(case: Case) -> None:
    """FP8 rounds by 2**-4; of what is rounded apart, sums are nearer."""
    for recipe in RECIPES:
        inputs = half(case, recipe)
        if REFERENCE.why_not(inputs.spec, CPU):
            continue
        module = emit(REFERENCE, inputs)
        got = numerics.with_gradients(lambda given: module(*arguments(given)), inputs)  # noqa: B023
        exact = numerics.with_gradients(numerics.attention, numerics.cast(inputs, torch.float32))
        for mine, right in zip(got, exact, strict=True):
            error = (mine.float() - right).square().mean().sqrt()
            # Where scores are large, what rounding adds to them is too.
            share = 0.08 if case.scale is None else 0.15
            assert float(error) <= share * float(right.square().mean().sqrt()) + 1e-4


def test_weights_are_rounded() -> None:
    """Without that, what is left is the rounding of q, k and v alone: smaller by a third."""
    inputs = half(BY_NAME["causal"], "head")
    out = emit(REFERENCE, inputs)(*arguments(inputs))
    with mock.patch.object(reference, "WEIGHT", 2.0**-9):
        coarse = emit(REFERENCE, inputs)(*arguments(inputs))
    exact = numerics.attention(numerics.cast(inputs, torch.float32))
    assert numerics.worst(coarse, exact) > 3 * numerics.worst(out, exact) > 0
