from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from attn_compiler.lowerings import by_name
from attn_compiler.spec.fp8_recipe import CurrentScaling, Fp8Recipe
from attn_compiler.spec.target import Target
from tests.lowerings.specs import make_spec, words

BLOCKS = Fp8Recipe(scaling=CurrentScaling(granularity="block"))
H100 = Target.fake(sm=90)


def refusals(recipe: Fp8Recipe | None = Fp8Recipe(), target: Target = H100, **given: Any) -> str:  # noqa: B008
    """Of the Triton lowering."""
    return words(by_name("triton_fp8").why_not(dataclasses.replace(make_spec(**given), fp8=recipe), target))


@pytest.mark.parametrize("given", [{}, {"dtype": "float16"}, {"seqlen_q": "s0", "seqlen_kv": "s0"}, {"head_dim": 80}])
def test_nothing_is_in_the_way(given: Any) -> None:
    assert refusals(**given) == ""


def test_no_recipe() -> None:
    assert "no recipe for this site" in refusals(None)
    assert "options={'fp8_recipe'" in refusals(None)


@pytest.mark.parametrize("name", ["triton_fp8", "hopper_fp8", "cudnn_fp8", "reference_fp8"])
def test_nothing_in_fp8_gives_the_logsumexp(name: str) -> None:
    spec = dataclasses.replace(make_spec(lse="read", needs_grad=False), fp8=Fp8Recipe())
    assert "nothing reads the logsumexp" in words(by_name(name).why_not(spec, H100))


def test_a_model_in_float32() -> None:
    found = refusals(dtype="float32")
    assert "the attention runs in fp32, FP8 is ignored" in found
    assert "call model.bfloat16()" in found


def test_gpus_without_fp8() -> None:
    assert "sm80" in refusals(target=Target.fake(sm=80))
    assert "sm86" in refusals(target=Target.fake(sm=86))
    assert refusals(target=Target.fake(sm=89)) == ""
    assert "cpu" in refusals(target=Target.fake(device="cpu", sm=0), device="cpu")


@pytest.mark.parametrize(("size", "allowed"), [(72, False), (80, True), (256, True), (272, False)])
def test_head_dims(size: int, allowed: bool) -> None:
    assert (refusals(head_dim=size) == "") is allowed


def test_a_hadamard_rotation_needs_a_power_of_two() -> None:
    recipe = Fp8Recipe(hadamard=True)
    assert "hadamard=False" in refusals(recipe, head_dim=80)
    assert refusals(recipe, head_dim=64) == ""


def test_blocks_need_no_lengths() -> None:
    assert refusals(BLOCKS, seqlen_kv="s0") == ""


def test_few_queries() -> None:
    assert "more than 32 queries" in refusals(seqlen_q=1)
    assert refusals(seqlen_q=33) == ""


@pytest.mark.parametrize("name", ["triton_fp8", "hopper_fp8", "reference_fp8"])
@pytest.mark.parametrize("size", ["batch", "seqlen_kv"])
def test_nothing_to_attend_to(size: str, name: str) -> None:
    """There is no largest of no numbers, and no scale to be read."""
    sizes: dict[str, Any] = {size: 0}
    spec = dataclasses.replace(make_spec(**sizes), fp8=Fp8Recipe())
    refused = words(by_name(name).why_not(spec, H100))
    assert "no axis can be empty" in refused
    assert f"{size} 0" in refused


def test_a_backward_in_fp8_is_cudnns_alone() -> None:
    recipe = Fp8Recipe(backward=True)
    assert "backward=False" in refusals(recipe)
    assert refusals(recipe, needs_grad=False) == ""
    assert "forward=False" in refusals(Fp8Recipe(forward=False, backward=True))


@pytest.mark.parametrize("name", ["triton_fp8", "reference_fp8"])
def test_what_the_family_refuses_is_refused(name: str) -> None:
    spec = dataclasses.replace(make_spec(returns_weights=True), fp8=Fp8Recipe())
    assert "weights" in words(by_name(name).why_not(spec, H100))
