"""A number written at indices of run time: read as one of two numbers where both are of the tensor's dtype."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Index, Load
from attn_compiler.passes.recovering import reading
from tests.passes.compiling import mirror_of
from tests.passes.recovering.reading.evaluating import output_of

INDICES = torch.tensor([[0, 3], [2, 2], [4, 1]])
AT = (Index("q"), Index("k"))


def _expression(function: Callable[[Tensor], Tensor]) -> ix.Expr:
    mirror = mirror_of(function, INDICES.clone())
    return reading.of(mirror).read(output_of(mirror), AT)


def _full(number: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((3, 5), number, dtype=dtype)


TWO_NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "zero among lowest": lambda i: _full(-torch.inf).scatter(-1, i, 0.0),
    "lowest among zeros": lambda i: torch.zeros(3, 5).scatter(1, i, torch.finfo(torch.float32).min),
    "in place": lambda i: _full(-torch.inf).scatter_(-1, i, 0.0),
    "in half precision": lambda i: _full(-65504.0, torch.float16).scatter(-1, i, 1.5),
    "a base that the dtype rounds": lambda i: _full(-65504.0, torch.bfloat16).scatter(-1, i, 0.0),
    "what it was before is read": lambda i: _full(1.0).mul_(2.0).scatter_(-1, i, 0.0),
}


@pytest.mark.parametrize("name", TWO_NUMBERS)
def test_an_element_is_one_of_two_numbers(name: str) -> None:
    function = TWO_NUMBERS[name]
    found, wanted = _expression(function), function(INDICES)
    assert isinstance(found, ix.Apply)
    assert found.op == "where"
    for at in itertools.product(range(3), range(5)):
        # The one load is of the tensor itself, as the write left it.
        value = ix.evaluate(found, dict(zip("qk", at, strict=True)), lambda _, at: wanted[at].item())
        assert value == wanted[at].item()


LOADS: dict[str, Callable[[Tensor], Tensor]] = {
    "truth values": lambda i: torch.ones(3, 5, dtype=torch.bool).scatter(-1, i, False),
    "a number that the dtype rounds": lambda i: _full(0.0, torch.bfloat16).scatter(-1, i, 0.1),
    "the same number": lambda i: _full(2.0).scatter(-1, i, 2.0),
    "no number": lambda i: _full(0.0).scatter(-1, i, torch.nan),
    "a base of run time": lambda i: torch.zeros(3, 5).index_fill(1, i[0], 1.0).scatter(-1, i, 2.0),
    "whole numbers": lambda i: torch.zeros(3, 5, dtype=torch.int64).scatter(-1, i, 1),
}


@pytest.mark.parametrize("name", LOADS)
def test_what_says_no_more_is_a_load(name: str) -> None:
    found = _expression(LOADS[name])
    assert isinstance(found, Load)
    assert found.at == AT


def test_a_number_that_is_written_over_what_was_read_before() -> None:
    """Two versions of one tensor are two."""

    def function(indices: Tensor) -> Tensor:
        x = _full(-torch.inf)
        before = x.scatter(-1, indices, 0.0)
        x.scatter_(-1, indices[:, :1], 0.0)
        return torch.maximum(before, x)

    found = _expression(function)
    assert len({load.tensor for load in ix.loads(found)}) == 2
