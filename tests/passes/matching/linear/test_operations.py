"""Which ops let a test prove a function, and which don't."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from attn_compiler.passes.matching.linear import operations
from attn_compiler.spec.linear import LinearForm
from tests.lowerings.linear import linear_forms


def _why(function: Callable[[Tensor, Tensor], Tensor], form: LinearForm = linear_forms.DELTA) -> str | None:
    def run(_: LinearForm, operands: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        x, y = operands
        return function(x, y), x

    return operations.why_not(run, [torch.rand(3, 4), torch.rand(3, 4)], form)


def _written_after(x: Tensor, y: Tensor) -> Tensor:
    made = torch.zeros(3, 4)
    made[:, 1] = x[:, 1]
    return made.logical_not() + y


def _mask_of_data(x: Tensor, y: Tensor) -> Tensor:
    made = torch.zeros(3, 4, dtype=torch.bool)
    made[0].copy_(x[0])
    return y.masked_fill(made, 0.0)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: (x @ y.mT).exp() @ y,
        lambda x, y: x.masked_fill(torch.ones(4, 4).triu(1)[:3].bool(), 0.0) + y.cumsum(0),
        lambda x, y: torch.stack([x, y]).sum(0) * torch.rsqrt(y * y + 1),
    ],
)
def test_sums_products_and_exponentials_are_proved_by_a_test(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert _why(function) is None


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x, y: x.relu() + y, "relu"),
        (lambda x, y: torch.where(x > 0, x, y), "gt"),
        (lambda x, y: torch.maximum(x, y), "maximum"),
        (lambda x, y: x.clamp(max=1.0) + y, "clamp to"),
        (lambda x, y: x + torch.rand(3, 4) * y, "rand"),
        (lambda x, y: x + torch.empty(3, 4) * y, "empty"),
        (lambda x, y: x.copy_(y), "writes to an operand"),
        (lambda x, y: x[0].copy_(y[0]), "writes to an operand"),
        (lambda x, y: x[(y * 2).long()[0]], "_to_copy makes int64 of what comes from an operand"),
        (lambda x, y: x.to(torch.int32) * y, "_to_copy makes int32"),
        (lambda x, y: x.bool() * y, "_to_copy makes bool"),
        (lambda x, y: torch.zeros(3, 4, dtype=torch.int8).copy_(x) + y, "copy_ makes int8"),
        (lambda x, y: torch.nn.functional.softplus(x, 2.0) + y, "softplus with"),
        (_written_after, "logical_not makes bool of what comes from an operand"),
        (_mask_of_data, "copy_ makes bool of what comes from an operand"),
    ],
)
def test_what_chooses_by_a_number_is_not(function: Callable[[Tensor, Tensor], Tensor], why: str) -> None:
    assert why in str(_why(function))


def test_a_clamp_is_compared_by_its_numbers() -> None:
    inside = linear_forms.STATE_SPACE
    assert _why(lambda x, y: x.clamp(0.0, float("inf")) + y, inside) is None
    assert "clamp to" in str(_why(lambda x, y: x.clamp(0.0, 90.0) + y, inside))
