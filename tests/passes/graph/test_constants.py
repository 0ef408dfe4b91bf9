from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from attn_compiler.passes.graph import constants
from tests.passes.compiling import mark, mirror_of

Tensor = torch.Tensor
aten = torch.ops.aten


def _number(make: Callable[[Tensor], object]) -> float | None:
    """What `constants.number` says of the second factor in x * make(x)."""
    mirror = mirror_of(lambda x: x * make(x), mark(torch.ones(5, 3), [5]))
    products = [n for n in mirror.graph.nodes if n.target in (aten.mul.Tensor, aten.mul.Scalar)]
    return constants.number(mirror, products[-1].args[1])


@pytest.mark.parametrize(
    ("make", "number"),
    [
        (lambda x: 0.25, 0.25),
        (lambda x: 3, 3.0),
        (lambda x: torch.tensor(0.25), 0.25),
        (lambda x: torch.full([], 0.25), 0.25),
        (lambda x: torch.full((1, 1), 0.25), 0.25),
        (lambda x: x.new_full((), 0.25), 0.25),
        (lambda x: torch.tensor(16.0).sqrt(), 4.0),
        (lambda x: torch.tensor(16.0).rsqrt(), 0.25),
        (lambda x: 1 / torch.tensor(4.0), 0.25),
        (lambda x: torch.tensor(2.0) ** -2, 0.25),
        (lambda x: torch.tensor(0.25, dtype=torch.float64).to(x.dtype), 0.25),
        (lambda x: torch.zeros(()) - 0.25, -0.25),
        (lambda x: torch.ones(()) * 0.5 + 0.25, 0.75),
        (lambda x: torch.tensor(x.size(1)).float().sqrt(), 3**0.5),
        (lambda x: torch.tensor(torch.finfo(x.dtype).min), torch.finfo(torch.float32).min),
    ],
)
def test_numbers_that_are_known(make: Callable[[Tensor], object], number: float) -> None:
    assert _number(make) == pytest.approx(number)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x[0, 0],
        lambda x: x.sum(),
        lambda x: x.size(0) ** -0.5,
        lambda x: torch.full((3,), 0.25),
        lambda x: torch.rand(()),
        lambda x: torch.tensor(float(x.size(0))),
        lambda x: torch.full([], 0.25) * x.sum(),
        lambda x: torch.tensor(0.25).mul_(2),
    ],
    ids=["element", "sum", "symbolic size", "several", "random", "tensor of a size", "times a sum", "written"],
)
def test_numbers_that_are_not(make: Callable[[Tensor], object]) -> None:
    assert _number(make) is None


def test_rounding_to_a_narrow_dtype_is_carried_out() -> None:
    number = _number(lambda x: torch.tensor(0.1).bfloat16().float())
    assert number == float(torch.tensor(0.1).bfloat16())


def test_a_number_written_later_on_is_not_known_either() -> None:
    def function(x: Tensor) -> Tensor:
        scale = torch.tensor(0.25)
        product = x * scale
        scale.add_(1)
        return product + scale

    mirror = mirror_of(function, torch.ones(2))
    (product,) = (n for n in mirror.graph.nodes if n.target is aten.mul.Tensor)
    assert constants.number(mirror, product.args[1]) is None


def test_a_buffer_of_the_model_is_no_constant() -> None:
    """It may hold another number at the next call."""
    buffer = torch.tensor(0.25)
    mirror = mirror_of(lambda x: x * buffer, torch.ones(2))
    (product,) = (n for n in mirror.graph.nodes if n.target is aten.mul.Tensor)
    assert constants.number(mirror, product.args[1]) is None


@pytest.mark.parametrize("value", [None, True, "0.25", [0.25]])
def test_other_arguments_are_no_numbers(value: object) -> None:
    mirror = mirror_of(lambda x: x + 1, torch.ones(2))
    assert constants.number(mirror, value) is None
