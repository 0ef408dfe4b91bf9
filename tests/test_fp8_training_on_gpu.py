"""Training with a recipe on a CUDA device, by the kernels that are chosen there. What holds on any device: test_fp8_training.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import attn_compiler
from attn_compiler import CurrentScaling, DelayedScaling, Fp8Recipe
from attn_compiler.lowerings.base import FP8
from tests.attention_layer import Attention

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
HEADS, HEAD_DIM, LENGTH = 4, 64, 256
# Forced: so short ones are slower in FP8.
DELAYED = Fp8Recipe(scaling=DelayedScaling(amax_history_len=4), force=True)
RECIPES = {
    "current": Fp8Recipe(force=True),
    "per tensor": Fp8Recipe(scaling=CurrentScaling(granularity="tensor"), force=True),
    "accurate": Fp8Recipe(smooth_k=True, hadamard=True, qk_format="int8", force=True),
    "delayed": DELAYED,
}


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Attention(HEADS, HEAD_DIM), Attention(HEADS, HEAD_DIM)).to(DEVICE, torch.bfloat16)


def inputs(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return (torch.randn(2, LENGTH, HEADS * HEAD_DIM, generator=generator) * (1 + step / 4)).to(DEVICE, torch.bfloat16)


def settings(recipe: Fp8Recipe, **options: Any) -> dict[str, Any]:
    return {"backend": "attn_compiler", "options": {"fp8_recipe": recipe, "strict": True, **options}}


def chosen() -> set[str]:
    return {site.decision.lowering for report in attn_compiler.reports() for site in report.sites}


@pytest.fixture(autouse=True)
def anew() -> None:
    torch._dynamo.reset()
    attn_compiler.reset()


@contextmanager
def no_waiting() -> Iterator[None]:
    """What waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", RECIPES)
def test_no_step_waits_for_the_device(name: str) -> None:
    function = torch.compile(layers(), **settings(RECIPES[name]))
    given = [inputs(step) for step in range(5)]
    for x in given[:2]:
        function(x).square().mean().backward()
    with no_waiting():
        for x in given[2:]:
            function(x).square().mean().backward()
    assert chosen() <= set(FP8)
    assert len(attn_compiler.reports()) == 1


@pytest.mark.parametrize("recipe", [RECIPES["current"], DELAYED], ids=lambda recipe: recipe.words)
def test_layers_compiled_one_by_one_within_checkpoints(recipe: Fp8Recipe) -> None:
    """Their first call compiles, what is computed again does not. With histories, each layer has its own."""
    model, exact = layers(), layers()
    for layer in model:
        layer.compile(**settings(recipe), fullgraph=True)
    for step in range(4):
        x, gradients = inputs(step).requires_grad_(), []
        for each in (model, exact):
            each.zero_grad()
            out = x
            for layer in each:
                out = checkpoint(layer, out, use_reentrant=False)
            out.square().mean().backward()
            gradients.append([p.grad.float() for p in each.parameters() if p.grad is not None])
    for a, b in zip(*gradients, strict=True):
        assert float((a - b).norm() / b.norm()) < 0.15
    assert chosen() <= set(FP8)
    has_histories = isinstance(recipe.scaling, DelayedScaling)
    assert len(attn_compiler.reports()) == (len(model) if has_histories else 1)
