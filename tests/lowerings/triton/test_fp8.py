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
from attn_compiler.lowerings.shared.parts import tile_table
from attn_compiler.lowerings.triton import fp8 as triton
from attn_compiler.options.options import Options
from attn_compiler.passes.writing import select
from attn_compiler.spec.masks import MaskSpec
from attn_compiler.spec.target import Target
from tests.lowerings.fp8.problems import rounding_as_hardware
from tests.lowerings.specs import CAUSAL, make_spec
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
