"""Changes of each score by itself: what plain PyTorch makes of them, and the kernels."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

from attn_compiler.lowerings.plain import takes as plain
from attn_compiler.lowerings.shared.kernels import tile_parts
from attn_compiler.lowerings.shared.limits import kernel_limits
from attn_compiler.lowerings.shared.parts import score_changes
from attn_compiler.spec import scores
from attn_compiler.spec.scores import Pointwise, Softcap
from tests.lowerings.kernel_problems import DEVICE

#: one of each class
CHANGES: tuple[Pointwise, ...] = (Softcap(cap=3.0),)
#: further than any of them lets through
SCORES = torch.linspace(-9, 9, 1024, dtype=torch.float64)
each = pytest.mark.parametrize("change", CHANGES, ids=lambda change: type(change).__name__)


def _applied(x: torch.Tensor, change: Pointwise | None) -> torch.Tensor:
    return score_changes.applied(lambda function, *given: function(*given), x, change)


def test_every_change_is_tested_here_and_taken() -> None:
    tested = {type(change) for change in CHANGES}
    assert tested == {x for x in scores.KINDS if issubclass(x, Pointwise)} == set(score_changes.FORMS)
    for takes in (plain.MATH, plain.REFERENCE, kernel_limits.TAKES):
        assert tested <= set(takes.changes)


def test_names_are_different() -> None:
    names = [form.name for form in score_changes.FORMS.values()]
    assert len({*names, score_changes.UNCHANGED}) == len(names) + 1


def test_a_softcap_is_what_its_formula_says() -> None:
    expected = torch.tensor([3.0 * math.tanh(x / 3.0) for x in SCORES.tolist()], dtype=torch.float64)
    torch.testing.assert_close(_applied(SCORES, Softcap(cap=3.0)), expected, rtol=1e-14, atol=0)


@each
def test_its_slope_is_what_autograd_finds(change: Pointwise) -> None:
    x = SCORES.clone().requires_grad_()
    changed = _applied(x, change)
    (expected,) = torch.autograd.grad(changed.sum(), x)
    found = score_changes.through(torch.full_like(x, 2.0), changed.detach(), change)
    torch.testing.assert_close(found, 2.0 * expected, rtol=1e-12, atol=1e-12)


@each
def test_a_factor_may_stand_on_either_side(change: Pointwise) -> None:
    for factor in (0.25, -2.0):
        torch.testing.assert_close(factor * _applied(SCORES, change), _applied(factor * SCORES, change.scaled(factor)))


@each
def test_no_score_is_larger_than_it_says(change: Pointwise) -> None:
    for changed in (change, change.scaled(-2.0)):
        most = _applied(100.0 * SCORES, changed).abs().max().item()
        assert most == pytest.approx(changed.most)


def test_without_a_change_nothing_happens() -> None:
    assert _applied(SCORES, None) is SCORES
    assert score_changes.through(SCORES, SCORES, None) is SCORES


@triton.jit
def _change(X, Logits, Grad, scale, number, CHANGE: tl.constexpr):
    at = tl.arange(0, 1024)
    found, factor = tile_parts.changed(tl.load(X + at), scale, number, CHANGE, False, tile_parts.LOG2E)
    tl.store(Logits + at, found * factor)
    tl.store(Grad + at, tile_parts.through_change(tl.full([1024], 2.0, tl.float32), found, CHANGE))


@pytest.mark.parametrize("change", [*CHANGES, None], ids=lambda change: type(change).__name__)
def test_kernels_do_the_same(change: Pointwise | None) -> None:
    x, scale = SCORES.float().to(DEVICE), 0.5
    logits, grad = torch.empty_like(x), torch.empty_like(x)
    _change[(1,)](x, logits, grad, scale, score_changes.number(change), score_changes.name(change))
    expected = _applied(scale * x.double(), change)
    torch.testing.assert_close(logits.double() * math.log(2.0), expected, rtol=1e-5, atol=1e-5)
    of_ones = score_changes.through(torch.full_like(expected, 2.0), expected, change)
    torch.testing.assert_close(grad.double(), of_ones, rtol=1e-5, atol=1e-5)
