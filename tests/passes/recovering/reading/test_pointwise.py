"""Float ops whose results are rounded: read as the formulas they are, and told from what is exact."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Index
from attn_compiler.passes.recovering import reading
from tests.passes.compiling import mirror_of
from tests.passes.recovering.reading.evaluating import output_of, read

ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "divided": lambda x: x / 3.0,
    "divided by a tensor": lambda x: x / (torch.arange(4) + 1),
    "whole numbers divided": lambda x: torch.arange(4) / 3 + 0 * x,
    "one over it": lambda x: 1.0 / x,
    "reciprocal": lambda x: x.reciprocal(),
    "logarithm": lambda x: torch.log(x),
    "exponential": lambda x: torch.exp(x * 0.5),
    "a power of two": lambda x: torch.exp2(x),
    "power of a tensor": lambda x: torch.pow(torch.full((), 0.25), torch.arange(1, 5, dtype=torch.int32)) * x,
    "power of a number": lambda x: torch.pow(2, x),
    "to the power of a number": lambda x: x**3,
    "to the power of one": lambda x: x**1.0 / 7.0,
}

EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "smaller": lambda x: torch.min(x, torch.arange(4).float()),
    "larger": lambda x: torch.max(x, torch.zeros_like(x) + 2.0),
    "clamped": lambda x: x.clamp(1.0, 2.5),
    "clamped below": lambda x: x.clamp(min=1.75),
    "clamped above": lambda x: torch.clamp_max(x, 2.0),
    "clamped by tensors": lambda x: x.clamp(torch.arange(4) - 1, torch.arange(4).float()),
    "whole numbers clamped": lambda x: (torch.arange(4) - 2).clamp(-1, 1) + 0 * x.long(),
    "divided by one": lambda x: x / 1.0,
}

X = torch.tensor([0.5, 1.5, 2.0, 3.25])


def _expression(function: Callable[[Tensor], Tensor]) -> ix.Expr:
    mirror = mirror_of(function, X.clone())
    return reading.of(mirror).read(output_of(mirror), (Index("k"),))


@pytest.mark.parametrize("name", [*ROUNDED, *EXACT])
def test_floats_are_read_as_formulas(name: str) -> None:
    function = (ROUNDED | EXACT)[name]
    found = read(lambda x: function(x), X)
    assert found.equal, found.text


@pytest.mark.parametrize("name", ROUNDED)
def test_what_is_rounded_says_so(name: str) -> None:
    assert not ix.is_exact(_expression(ROUNDED[name]))


@pytest.mark.parametrize("name", [n for n in EXACT if n != "whole numbers clamped"])
def test_what_is_chosen_is_exact(name: str) -> None:
    assert ix.is_exact(_expression(EXACT[name]))


def test_a_number_that_was_rounded_on_the_way_is_no_constant() -> None:
    """log(8) / log(2) is 3 for doubles and may be less for floats: a mask must not follow from it."""

    def function(x: Tensor) -> Tensor:
        steps = (torch.log(torch.full((), 8.0)) / torch.log(torch.full((), 2.0))).long()
        return (torch.arange(4) < steps) & (x > 0)

    assert _expression(function).facts.tensors == {"steps", "x"}


def test_a_choice_that_its_condition_settles() -> None:
    """masked_fill twice, by a condition and by its opposite (Swin)."""
    found = read(lambda x: x.masked_fill(x != 2.0, -100.0).masked_fill(x == 2.0, 0.0), X)
    assert found.equal
    assert found.text.count("?") == 1


def test_what_grows_beyond_all_formulas_is_loaded() -> None:
    """Twenty doublings would be a million summands, and take as long as that."""

    def function(x: Tensor) -> Tensor:
        for _ in range(20):
            x = x * 1.1 + x
        return x

    loads = list(ix.loads(_expression(function)))
    assert loads
    assert {load.tensor for load in loads} != {"x"}


@pytest.mark.parametrize(
    "function",
    [lambda x: (x > 1).half() * -1e5, lambda x: (x > 1).half() / 1e5, lambda x: ((x > 1).half() > -1e5).half()],
    ids=["product", "quotient", "comparison"],
)
def test_a_number_that_a_dtype_lacks_makes_a_load(function: Callable[[Tensor], Tensor]) -> None:
    """PyTorch calculates with the number itself: 0 times -1e5 is 0 in float16, and no NaN."""
    assert torch.isfinite(function(X)[0])
    found = _expression(function)
    assert len(list(ix.loads(found))) == 1
    assert "nan" not in ix.text(found)
    assert "inf" not in ix.text(found)
