"""What a checkpoint's kernels read of the graph around it: which of it they can have, and that they compute with it what the model does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import checkpoint

from attn_compiler import DelayedScaling, Fp8Recipe
from tests.passes.compiling import Compiled, compiled

LAYERS = 2


def layer(x: Tensor, mask: Tensor) -> Tensor:
    return x + sdpa(x.sin(), x, x.cos(), attn_mask=mask)


def layers(x: Tensor, mask: Tensor) -> Tensor:
    for _ in range(LAYERS):
        x = checkpoint(layer, x, mask, use_reentrant=False)
    return x


def padded(x: Tensor, real: Tensor) -> Tensor:
    """As Hugging Face's models: one mask, causal and without padding, for all layers."""
    causal = torch.ones(x.shape[2], x.shape[2], dtype=torch.bool).tril()
    return layers(x, causal & real.bool()[:, None, None, :])


def given(length: int = 19) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    real = torch.tensor([[1] * 13 + [0] * (length - 13), [1] * length])
    return torch.randn(2, 2, length, 16, generator=generator), real


def gradients(function: Callable[..., Tensor], x: Tensor, real: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = function(x, real.clone())
    return [out.detach(), *torch.autograd.grad(out.square().sum(), x)]


def held_against_the_model(function: Callable[..., Tensor], **options: Any) -> Compiled:
    run = compiled(function, **options)
    for mine, right in zip(gradients(run, *given()), gradients(function, *given()), strict=True):
        torch.testing.assert_close(mine, right, rtol=2e-4, atol=2e-4)
    return run


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_kernels_in_checkpoints_read_the_padding_itself(inner: str) -> None:
    run = held_against_the_model(padded, lowering="triton", inner=inner)
    (site,) = run.report.sites
    assert len(site.modules) == LAYERS
    assert site.spec.mask.out_of_reach == ()
    if inner == "aot_eager":
        # A copy, one for all layers: the model's own body is given a mask that no write to `real` reaches.
        assert run.text.count("and_, held_default, use_reentrant") == LAYERS
        assert [copy.operand for copy in site.copies] == ["l_real_"]


def test_what_is_kept_and_what_is_carried_come_in_their_order() -> None:
    """FP8 with scales from steps before, in a checkpoint: histories are further inputs, too."""
    recipe = Fp8Recipe(scaling=DelayedScaling(amax_history_len=2), force=True)
    run = compiled(padded, lowering="reference_fp8", fp8_recipe=recipe)
    x, real = given(40)
    x, right = x.half(), padded(x, real)
    for _ in range(2):
        out = run(x.clone().requires_grad_(), real)
    (site,) = run.report.sites
    assert site.decision is not None
    assert (site.decision.lowering, site.spec.mask.out_of_reach) == ("reference_fp8", ())
    assert float((out.float() - right).norm() / right.norm()) < 0.05


@pytest.mark.parametrize("when", ["before the call", "after it"])
def test_what_is_written_to_is_not_carried(when: str) -> None:
    """The backward would compute the body once more with what was written."""

    def model(x: Tensor, real: Tensor) -> Tensor:
        mask = real.bool()[:, None, None, :]
        if when == "before the call":
            real.zero_()
        out = layers(x, mask)
        if when != "before the call":
            real.zero_()
        return out

    run = held_against_the_model(model, lowering="triton")
    assert run.site.spec.mask.out_of_reach == ("real",)


@pytest.mark.parametrize("silently", [False, True])
def test_what_is_carried_is_what_it_was_in_the_forward(silently: bool) -> None:
    """The user writes to the padding before the backward, which computes the bodies once more."""
    found = []
    for function in (padded, compiled(padded, lowering="triton")):
        x, real = given()
        x.requires_grad_()
        out = function(x, real)
        (real.data if silently else real).zero_()
        found.append(torch.autograd.grad(out.square().sum(), x)[0])
    torch.testing.assert_close(found[1], found[0], rtol=2e-4, atol=2e-4)


def test_what_wants_a_gradient_is_not_carried() -> None:
    """A learned slope around the checkpoints: their gradient goes the model's own way."""

    def model(x: Tensor, slope: Tensor) -> Tensor:
        at = torch.arange(x.shape[2])
        return layers(x, slope[:, None, None] * (at[None, :] - at[:, None]))

    run = compiled(model, lowering="triton")
    x, slope = given()[0].requires_grad_(), torch.rand(2).requires_grad_()
    mine = torch.autograd.grad(run(x, slope).square().sum(), (x, slope))
    right = torch.autograd.grad(model(x, slope).square().sum(), (x, slope))
    for a, b in zip(mine, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    assert run.site.spec.score.out_of_reach == ("slope",)
