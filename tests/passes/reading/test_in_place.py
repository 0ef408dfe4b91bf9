"""Masks edited in place: the result is read, an older name of the same memory is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from attn_compiler.passes.reading import Unreadable
from tests.passes.reading.evaluating import read

Tensor = torch.Tensor
S = 5
ROWS, COLUMNS = torch.arange(S)[:, None], torch.arange(S)[None, :]


def _ones() -> Tensor:
    return torch.ones(S, S, dtype=torch.bool)


def _augmented(m: Tensor) -> Tensor:
    positions = torch.arange(S)
    positions += 2
    positions *= 3
    return (positions[None, :] <= 9) & m


def _and(m: Tensor) -> Tensor:
    mask = _ones().tril()
    mask &= m
    return mask


def _chained(m: Tensor) -> Tensor:
    return torch.zeros(S, S).masked_fill_(~m, -1.0).add_(1.0).tril_()


def _older_value_used_before(m: Tensor) -> Tensor:
    mask = _ones()
    before = mask.tril()
    mask.logical_not_()
    return before & (mask | m)


def _written_after_its_use(m: Tensor) -> Tensor:
    mask = _ones().tril()
    used = mask & m
    mask[0] = True
    return used


READ: dict[str, Callable[[Tensor], Tensor]] = {
    "positions moved on": _augmented,
    "&=": _and,
    "|=": lambda m: _ones().tril().__ior__(m),
    "a chain": _chained,
    "filled and cut": lambda m: torch.empty(S, S).fill_(-2.5).triu_(1) + m,
    "zeroed": lambda m: torch.empty(S, S, dtype=torch.int64).zero_().sub_(m.long()).neg_().abs_(),
    "logical ops": lambda m: _ones().triu().logical_xor_(m).logical_or_(~m).logical_and_(m),
    "bitwise ops": lambda m: _ones().triu().bitwise_not_().bitwise_or_(m).bitwise_and_(_ones()),
    "truth values into numbers": lambda m: torch.full((S, S), 3).logical_and_(m),
    "filled by a tensor": lambda m: torch.zeros(S, S).masked_fill_(m, torch.tensor(2.0)),
    "multiplied": lambda m: torch.ones(S, S).mul_(m),
    "the value before": _older_value_used_before,
    "written after its use": _written_after_its_use,
}


@pytest.mark.parametrize("name", READ)
def test_the_result_is_read(name: str) -> None:
    found = read(READ[name], torch.rand(S, S) < 0.5)
    assert found.equal, found.text


def _a_view_of_it(m: Tensor) -> Tensor:
    mask = _ones()
    view = mask[1:]
    mask.logical_not_()
    return view & m[1:]


def _under_a_view(m: Tensor) -> Tensor:
    mask = _ones()
    mask[1:].logical_not_()
    return mask & m


def _part(m: Tensor) -> Tensor:
    mask = _ones().tril()
    mask[2, 3] = True
    return mask & m


def _alias(m: Tensor) -> Tensor:
    mask = _ones()
    alias = mask.view(S, S)
    alias &= m
    return mask & m


def _input(m: Tensor) -> Tensor:
    before = m.logical_not()
    m.logical_not_()
    return before


@pytest.mark.parametrize("function", [_a_view_of_it, _under_a_view, _part, _alias, _input], ids=lambda f: f.__name__)
def test_an_older_name_of_written_memory_is_not_read(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(Unreadable, match="written in place"):
        read(function, torch.rand(S, S) < 0.5)
