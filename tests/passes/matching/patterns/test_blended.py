"""w · b + fill · (1 - b), as it is told before anybody knows what b holds. Whole programs: tests/near_miss/test_blended.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attn_compiler.passes.matching.patterns.steps import Keep
from tests.passes.matching.patterns.test_score_steps import read

NUMBERS = torch.ones(5, 6).tril()


def _keeps(function: Callable[..., Tensor], *others: Tensor) -> list[Keep]:
    """What the last op of `function` is read as: a mask of the scores (2, 4, 5, 6)."""
    steps, _, scores = read(function, *others)
    found = [step for step in steps if isinstance(step, Keep)]
    assert all(step.source is scores and step.by_numbers and not step.inverted for step in found)
    return found


@pytest.mark.parametrize(
    ("function", "fill"),
    [
        (lambda s, b: s * b + -1e4 * (1 - b), -1e4),
        (lambda s, b: b * s - 1e4 * (1.0 - b), -1e4),
        (lambda s, b: s * b + (b - 1) * 1e9, -1e9),
        (lambda s, b: (torch.ones_like(b) - b) * -1e9 + s * b, -1e9),
        (lambda s, b: torch.add(s * b, 1 - b, alpha=-1e9), -1e9),
        (lambda s, b: s * b - (1 - b) / 1e-9, -1e9),
    ],
)
def test_each_way_to_write_it(function: Callable[..., Tensor], fill: float) -> None:
    (step,) = _keeps(function, NUMBERS)
    assert step.fill == pytest.approx(fill)


def _written_between(s: Tensor, b: Tensor) -> Tensor:
    product = s * b
    b[0] = 1
    return product + -1e4 * (1 - b)


@pytest.mark.parametrize(
    "function",
    [
        lambda s, b: s * b + 1e4 * (1 - b),
        lambda s, b: s * b + -1e4 * (2 - b),
        lambda s, b: s * b + -1e4 * b,
        lambda s, b: s * b + -1e4 * torch.sub(1, b, alpha=2),
        lambda s, b: s * b + -1e4 * (1 - b.abs()),
        lambda s, b: s / b + -1e4 * (1 - b),
        lambda s, b: torch.add(s * b, 1 - b),
        lambda s, b: s * b + -10.0 * (1 - b),
        _written_between,
    ],
)
def test_what_is_nearly_it(function: Callable[..., Tensor]) -> None:
    assert _keeps(function, NUMBERS.clone()) == []
