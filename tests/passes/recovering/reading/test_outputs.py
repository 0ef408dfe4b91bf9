"""Biases and masks that one body makes and others are given: read where they are made, unless something may have changed them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import attn_compiler
from attn_compiler.spec.added_scores import Bias, RelativeBias
from tests.passes.compiling import Compiled, compiled
from tests.passes.recovering.reading.test_inputs import check

B, H, S, D = 2, 2, 5, 8
SHAPE = (B, H, S, D)
Function = Callable[..., Tensor]


def _apart(q: Tensor) -> Tensor:
    positions = torch.arange(q.shape[-2])
    return positions - positions[:, None]


def _bias(q: Tensor, table: Tensor) -> Tensor:
    """(1, H, S, S), of a table (2 S, H)."""
    return F.embedding(_apart(q) + S, table).permute(2, 0, 1)[None]


def _attention(q: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, q, q, attn_mask=bias)


def _first(q: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    bias = _bias(q, table)
    return _attention(q, bias), bias


#: what was recovered is verified
_check = functools.partial(check, verify=True)


def _kinds(run: Compiled) -> list[type]:
    return [type(kind) for site in run.report.sites for kind in site.spec.score.proved for _ in site.modules]


TABLE = torch.randn(2 * S, H, generator=torch.Generator().manual_seed(1))


def test_a_bias_that_the_first_layer_hands_on() -> None:
    """T5's."""

    def function(q: Tensor, table: Tensor) -> Tensor:
        x, bias = checkpoint(_first, q, table, use_reentrant=False)
        for _ in range(12):
            x = checkpoint(_attention, x, bias, use_reentrant=False)
        return x

    run = _check(function, TABLE)
    assert _kinds(run) == [RelativeBias] * 13
    # Layers that mean the same share one description.
    assert len(run.report.sites) == 1


def test_a_mask_that_a_body_hands_on_to_the_graph_itself() -> None:
    def masked(q: Tensor) -> tuple[Tensor, Tensor]:
        mask = _apart(q) <= 0
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask), mask

    def body(q: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    def function(q: Tensor, _: Tensor) -> Tensor:
        x, mask = checkpoint(masked, q, use_reentrant=False)
        return checkpoint(body, x, mask, use_reentrant=False)

    run = _check(function, TABLE)
    assert [site.spec.mask.words for site in run.report.sites] == ["causal (proved)"]


def _made_of_its_values(q: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Half of the bias is a tensor that only the body has."""
    bias = _bias(q, table) + q.mean(-1, keepdim=True).sort(-1).values
    return _attention(q, bias), bias


def test_what_depends_on_values_of_the_body_is_one_tensor() -> None:
    def function(q: Tensor, table: Tensor) -> Tensor:
        x, bias = checkpoint(_made_of_its_values, q, table, use_reentrant=False)
        return checkpoint(_attention, x, bias.detach(), use_reentrant=False)

    with torch.no_grad():
        run = compiled(function, verify=True)
        q = torch.randn(SHAPE)
        torch.testing.assert_close(run(q.requires_grad_(), TABLE), function(q, TABLE))
    assert Bias in _kinds(run)


def test_a_bias_that_is_written_to_afterwards() -> None:
    def function(q: Tensor, table: Tensor) -> Tensor:
        x, bias = checkpoint(_first, q, table, use_reentrant=False)
        bias = bias.clone()
        bias[:, :, 0] = 3.0
        return checkpoint(_attention, x, bias, use_reentrant=False)

    run = _check(function, TABLE)
    assert sorted(kind.__name__ for kind in _kinds(run)) != ["RelativeBias", "RelativeBias"]


def test_a_result_that_is_an_input_is_not_read_in_the_body() -> None:
    """What is written to the input later is seen in it."""

    def through(q: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return _attention(q, bias), bias

    def function(q: Tensor, table: Tensor) -> Tensor:
        made = _bias(q, table).contiguous()
        x, bias = checkpoint(through, q, made, use_reentrant=False)
        made.mul_(2.0)
        return x + F.scaled_dot_product_attention(q, q, q, attn_mask=bias)

    q = torch.randn(SHAPE)
    run = compiled(function, verify=True, inner="eager")
    torch.testing.assert_close(run(q, TABLE), function(q, TABLE))
    assert [check.skipped for check in attn_compiler.verifications() if check.subject == "bias"] == [None, None]


def test_an_input_of_a_body_that_is_not_followed_is_no_input_of_the_graph() -> None:
    def yes(q: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    def no(q: Tensor, mask: Tensor) -> Tensor:
        return q + mask.sum()

    def function(q: Tensor, flag: Tensor) -> Tensor:
        return torch.cond(flag.any(), yes, no, (q, (_apart(q) <= 0).expand(B, H, S, S).contiguous()))

    run = compiled(function)
    run(torch.randn(SHAPE), torch.tensor([True]))
    (site,) = run.report.sites
    assert site.spec.mask.reason is not None
    assert "is an input of a body" in site.spec.mask.reason
