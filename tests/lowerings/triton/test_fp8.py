"""The Triton family's forward in FP8, in a graph and as it is launched."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_compiler import CurrentScaling, DelayedScaling, Fp8Recipe
from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.base import FP8
from attn_compiler.lowerings.shared.calls.arguments import head_dim_parts
from attn_compiler.lowerings.shared.parts import tile_table
from attn_compiler.lowerings.triton import fp8 as triton, fp8_launch
from attn_compiler.options.options import Options
from attn_compiler.passes.writing import select
from attn_compiler.spec.fp8_recipe import StaticScaling
from attn_compiler.spec.masks import MaskSpec
from attn_compiler.spec.target import Target
from tests import numerics
from tests.lowerings import kernel_problems
from tests.lowerings.fp8 import problems
from tests.lowerings.fp8.problems import rounding_as_hardware
from tests.lowerings.kernel_cases import BY_NAME, Case
from tests.lowerings.specs import CAUSAL, make_spec
from tests.lowerings.triton.test_launch import grown
from tests.passes.compiling import compiled

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton's interpreter, which has to be chosen before"
)

H100 = Target.fake(sm=90)


def test_a_recipe_puts_it_first_on_a_gpu_that_has_fp8() -> None:
    spec = make_spec(mask=CAUSAL, seqlen_q=4096, seqlen_kv=4096)
    asked = dataclasses.replace(spec, fp8=Fp8Recipe())
    ada = Target.fake(sm=89)
    assert select.decide(asked, ada, Options()).lowering == "triton_fp8"
    assert select.decide(spec, ada, Options()).lowering not in FP8
    ampere = select.decide(asked, Target.fake(sm=80), Options())
    assert ampere.lowering not in FP8
    assert "triton_fp8" in [refusal.lowering for refusal in ampere.refusals]


def test_on_the_cpu_a_recipe_is_refused_with_the_reason() -> None:
    asked = dataclasses.replace(make_spec(device="cpu"), fp8=Fp8Recipe())
    decision = select.decide(asked, Target.fake(device="cpu", sm=0), Options())
    assert decision.lowering not in FP8
    assert "triton_fp8" in [refusal.lowering for refusal in decision.refusals]


def test_head_dims_that_half_precision_takes_alone_are_refused() -> None:
    for head_dim, refused in ((256, False), (272, True), (512, True)):
        spec = dataclasses.replace(make_spec(head_dim=head_dim, seqlen_q=4096, seqlen_kv=4096), fp8=Fp8Recipe())
        found = [reason for reason in by_name("triton_fp8").why_not(spec, H100) if "at most 256" in reason.rule]
        assert bool(found) == refused
        assert not by_name("triton").why_not(dataclasses.replace(spec, fp8=None), H100)


@pytest.mark.parametrize("mask", [MaskSpec(), CAUSAL], ids=["full", "causal"])
def test_wide_heads_get_tiles_that_do_not_spill(mask: MaskSpec) -> None:
    narrow, wide = (make_spec(mask=mask, head_dim=d, seqlen_q=4096, seqlen_kv=4096) for d in (128, 256))
    assert triton._tiles(narrow, H100).forward.words == "64x128 w4 s3"
    ada = Target.fake(sm=89)
    assert triton._tiles(narrow, ada) == tile_table.tiles(narrow, ada)
    assert triton._tiles(wide, H100).forward.queries == 64


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@interpreted
@pytest.mark.parametrize(
    "recipe",
    [
        Fp8Recipe(),
        Fp8Recipe(scaling=CurrentScaling(granularity="block"), smooth_k=True, hadamard=True),
        Fp8Recipe(scaling=DelayedScaling()),
    ],
    ids=lambda recipe: recipe.words,
)
def test_compiled_it_agrees_with_the_oracle(recipe: Fp8Recipe) -> None:
    """In Triton's interpreter, out and gradients: apart by what the order of tiles and float16 make."""
    torch.manual_seed(0)
    given = [torch.randn(1, heads, 70, 64).half() for heads in (2, 1, 1)]
    found: list[list[Any]] = []
    for lowering in ("triton_fp8", "reference_fp8"):
        leaves = [x.clone().requires_grad_() for x in given]
        function = compiled(attention, lowering=lowering, fp8_recipe=recipe)
        with rounding_as_hardware():
            out = function(*leaves)
            out.float().sin().sum().backward()
        assert function.site.decision.lowering == lowering
        found.append([out.detach(), *(x.grad for x in leaves)])
    for mine, right in zip(*found, strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=0.02 * float(right.abs().max()))


@interpreted
@pytest.mark.parametrize("lengths", [(70, 45), (200, 300)], ids=["one block", "several"])
def test_lengths_that_are_not_known(lengths: tuple[int, int]) -> None:
    """Up to one block of positions that share a scale, and beyond, graphs differ: PyTorch compiles axes of one element apart."""
    function = compiled(attention, dynamic=True, lowering="triton_fp8", fp8_recipe=Fp8Recipe())
    for length in lengths:
        given = [torch.randn(1, heads, length, 32).half() for heads in (2, 1, 1)]
        with rounding_as_hardware():
            out = function(*given)
        exact = attention(*(x.float() for x in given))
        assert float((out.float() - exact).square().mean().sqrt()) < 0.03
    assert len(function.reports) == 1


# The FP8 kernel as it is launched, in Triton's interpreter.
RECIPES = {
    "tensor": Fp8Recipe(scaling=CurrentScaling(granularity="tensor")),
    "head": Fp8Recipe(),
    "block": Fp8Recipe(scaling=CurrentScaling(granularity="block"), smooth_k=True, hadamard=True),
    "static": Fp8Recipe(scaling=StaticScaling(q=5, k=5, v=5), smooth_k=True),
    "e5m2": Fp8Recipe(forward_format="e5m2"),
    "int8": Fp8Recipe(qk_format="int8", hadamard=True),
    "int8 plain": Fp8Recipe(qk_format="int8", scaling=CurrentScaling(granularity="block")),
}

#: (case, recipe): each part of a plan once, and each recipe several times
PAIRS = (
    ("even", "tensor"),
    ("gqa", "head"),
    ("causal", "int8"),
    ("head_dims_80_48", "int8 plain"),
    ("window_both_sides", "block"),
    ("window_from_end", "static"),
    ("keys_left", "block"),
    ("keys_none", "head"),
    ("documents", "tensor"),
    ("mask_bqk", "static"),
    ("unlisted_rows", "head"),
    ("bias_hqk_causal", "block"),
    ("distances_cross", "head"),
    ("slopes_from_end", "static"),
    ("sinks_keys_none", "block"),
    ("softcap_keys", "block"),
    ("negative_scale", "head"),
    ("dropout_keys_bias", "head"),
    ("everything", "block"),
    ("one_key", "static"),
    ("head_dims_80_48", "head"),
    ("head_dims_192_128", "static"),
    ("head_dim_256", "block"),
    ("layout_joined_mqa", "tensor"),
)


@pytest.mark.in_turns(2)
@interpreted
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_attention_and_all_gradients(pair: tuple[str, str]) -> None:
    case, recipe = pair
    given = problems.build(BY_NAME[case], RECIPES[recipe], dtype=torch.float16)
    problems.assert_within_rule(problems.results(given), given)


@pytest.mark.gpu
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_attention_and_all_gradients_on_a_gpu(pair: tuple[str, str]) -> None:
    case, recipe = pair
    target = Target.current("cuda")
    given = problems.build(grown(BY_NAME[case]), RECIPES[recipe], dtype=torch.bfloat16, target=target)
    problems.assert_within_rule(problems.results(given), given)


@interpreted
def test_the_wider_format_is_computed_too() -> None:
    """Its weights have two bits, so the rule of the other does not hold for it."""
    given = problems.build(BY_NAME["even"], RECIPES["e5m2"], dtype=torch.float16)
    assert given.rounded["q8"].dtype == torch.float8_e5m2
    out = problems.results(given)[0]
    exact = kernel_problems.expected(given.problem, torch.float32)[0]
    assert 0.01 < numerics.worst(out, exact) < 0.3


@interpreted
def test_scales_of_several_blocks_are_told_apart() -> None:
    case = dataclasses.replace(BY_NAME["even"], name="blocks", seqlen_q=140, seqlen_kv=140, batch=1)
    problem = problems.build(case, RECIPES["block"], dtype=torch.float16)
    assert problem.rounded["descale_k"].shape == (1, case.heads_kv, 2)
    problems.assert_within_rule(problems.results(problem), problem)
    for name in ("descale_q", "descale_k", "descale_v"):
        other = dict(problem.rounded) | {name: problem.rounded[name].flip(-1) * 1.5}
        with pytest.raises(AssertionError, match="off by"):
            problems.assert_within_rule(problems.results(dataclasses.replace(problem, rounded=other)), problem)


@interpreted
def test_keys_are_visited_from_the_last_one() -> None:
    """A first key with nearly all of the weight: visited first, it would leave nothing of the others' sum."""
    case = Case(name="sink", batch=1, heads_q=1, seqlen_q=64, seqlen_kv=512, head_dim=16, needs_grad=False)
    problem = kernel_problems.build(case, dtype=torch.float16)
    with torch.no_grad():
        problem.q.fill_(1.0)
        # Scores: 13 for the first key, 0 for the others, whose weights are 2**-18.7 of it: below FP8's smallest number at 2**8.
        problem.k.zero_()
        problem.k[:, :, 0] = 13.0 / 4
        problem.v.fill_(1.0)
        problem.v[:, :, 0] = 0.0
    given = problems.rounded_problem(problem, RECIPES["head"])
    out = problems.outputs(given)[0].float()
    exact = 511 / (511 + torch.tensor(13.0).exp())
    torch.testing.assert_close(out, torch.full_like(out, float(exact)), rtol=0.1, atol=0)


def test_head_dims_are_tiles_that_tensor_cores_take() -> None:
    assert [head_dim_parts(d, least=32) for d in (16, 64, 80, 96, 128, 192)] == [
        (32, 0),
        (64, 0),
        (64, 32),
        (64, 32),
        (128, 0),
        (128, 64),
    ]
    assert fp8_launch.parts_of_v(256) == (128, 128)
    assert fp8_launch.parts_of_v(128) == (128, 0)
