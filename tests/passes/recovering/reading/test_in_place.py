"""Masks edited in place: the result is read, and so is an older name of the same memory where it holds just that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attn_compiler.passes.recovering.reading import Unreadable
from tests.passes.recovering.reading.evaluating import read

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


def _of_every_op(m: Tensor) -> Tensor:
    """An op in place is read by the rule of its namesake, and cast to the dtype that it writes to."""
    halves = torch.arange(S).float().div_(2).floor_()
    bounded = (torch.arange(S)[None] - torch.arange(S)[:, None]).clamp_(-1, 2).remainder_(2)
    compared = torch.arange(S).le_(3)
    return (halves.ge_(1)[None, :] + bounded + compared) * m


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


def _between_writes(m: Tensor) -> Tensor:
    """Each reader finds another mask, the last one through the first name."""
    mask = torch.zeros(S, S)
    first = mask + 3
    mask[:, 1:] = 2.0
    second = mask * 1.0
    mask[1:] = m[1:].to(mask.dtype)
    mask[:, :2].add_(1.0)
    return mask + 10 * second + 100 * first


def _overlapping_slices(m: Tensor) -> Tensor:
    mask = torch.zeros(S, S)
    mask[1:4] = 1.0
    mask[:, 2:] += m[:, 2:]
    mask[3:] = mask[:2] * 2
    return mask * 1.0


def _of_itself(m: Tensor) -> Tensor:
    """The right side is read before anything is written."""
    mask = torch.arange(S * S).view(S, S) + m.long()
    mask[1:] = mask[:-1].clone()
    return mask + 0


def _copied_as(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    def function(m: Tensor) -> Tensor:
        mask = torch.zeros(S, S, dtype=dtype)
        mask[:3].copy_(torch.arange(S)[:, None][:3] * m[:3])
        return mask.logical_not()

    return function


READ: dict[str, Callable[[Tensor], Tensor]] = {
    "positions moved on": _augmented,
    "&=": _and,
    "|=": lambda m: _ones().tril().__ior__(m),
    "a chain": _chained,
    "every op": _of_every_op,
    "filled and cut": lambda m: torch.empty(S, S).fill_(-2.5).triu_(1) + m,
    "zeroed": lambda m: torch.empty(S, S, dtype=torch.int64).zero_().sub_(m.long()).neg_().abs_(),
    "logical ops": lambda m: _ones().triu().logical_xor_(m).logical_or_(~m).logical_and_(m),
    "bitwise ops": lambda m: _ones().triu().bitwise_not_().bitwise_or_(m).bitwise_and_(_ones()),
    "truth values into numbers": lambda m: torch.full((S, S), 3).logical_and_(m),
    "filled by a tensor": lambda m: torch.zeros(S, S).masked_fill_(m, torch.tensor(2.0)),
    "multiplied": lambda m: torch.ones(S, S).mul_(m),
    "the value before": _older_value_used_before,
    "written after its use": _written_after_its_use,
    "between writes": _between_writes,
    "overlapping slices": _overlapping_slices,
    "of itself": _of_itself,
    "copied to float": _copied_as(torch.float16),
    "copied to bool": _copied_as(torch.bool),
    "filled with a tensor": lambda m: torch.zeros(S, S).fill_(torch.tensor(3)).mul_(m),
}


@pytest.mark.parametrize("name", READ)
def test_the_result_is_read(name: str) -> None:
    found = read(READ[name], torch.rand(S, S) < 0.5)
    assert found.equal, found.text


def _a_view_of_it(m: Tensor) -> Tensor:
    mask = _ones()
    view = mask[1:]
    mask.logical_not_()
    return view | m[1:]


def _alias(m: Tensor) -> Tensor:
    mask = _ones()
    alias = mask.view(S, S)
    alias &= m
    return mask.tril()


def _input(m: Tensor) -> Tensor:
    before = m.logical_not()
    m.logical_not_()
    return before


def _input_before_and_after(m: Tensor) -> Tensor:
    before = m.tril(1)
    m.logical_not_()
    return before | m.triu()


def _twice(m: Tensor) -> Tensor:
    mask = _ones()
    mask &= m
    before = mask.tril()
    mask.logical_not_()
    return before.logical_xor(mask)


def _view_read_after_a_write_that_the_op_above_it_is_before(m: Tensor) -> Tensor:
    mask = _ones().triu()
    rows = mask[:, None]
    lower = mask.logical_not()
    mask.logical_not_().logical_or_(m)
    return lower & rows[:, 0]


def _under_a_view(m: Tensor) -> Tensor:
    mask = _ones()
    mask[1:].logical_not_()
    return mask & m


def _part(m: Tensor) -> Tensor:
    mask = _ones().tril()
    mask[2, 3] = True
    return mask & m


def _another_order(m: Tensor) -> Tensor:
    mask = _ones().tril()
    mask.mT.logical_and_(m)
    return mask & m


def _overlapping(m: Tensor) -> Tensor:
    row = torch.zeros(2 * S, dtype=torch.bool)
    row[1 : S + 1].logical_not_()
    return row[:S] & m


@pytest.mark.parametrize(
    "function",
    [
        _a_view_of_it,
        _alias,
        _input,
        _input_before_and_after,
        _twice,
        _view_read_after_a_write_that_the_op_above_it_is_before,
        _under_a_view,
        _part,
        _another_order,
        _overlapping,
    ],
    ids=lambda f: f.__name__,
)
def test_an_older_name_of_written_memory_is_read_as_it_then_is(function: Callable[[Tensor], Tensor]) -> None:
    found = read(function, torch.rand(S, S) < 0.5)
    assert found.equal, found.text


def _narrowed(m: Tensor) -> Tensor:
    """255 - 300 wraps around."""
    mask = torch.zeros(S, S, dtype=torch.uint8)
    mask[1:] = torch.arange(S - 1)[:, None] * 100 - m[1:].long()
    return mask + m


def _input_in_part(m: Tensor) -> Tensor:
    """Nothing is known of it before: one load after the write says the same."""
    m[1:] = True
    return m.logical_not()


def _through_an_opaque_op(m: Tensor) -> Tensor:
    mask = _ones()
    torch.logical_not(m, out=mask)
    return mask & m


@pytest.mark.parametrize("function", [_narrowed, _input_in_part, _through_an_opaque_op], ids=lambda f: f.__name__)
def test_what_a_write_left_that_is_not_understood_is_a_load(function: Callable[[Tensor], Tensor]) -> None:
    found = read(function, torch.rand(S, S) < 0.5)
    assert not found.loads <= {"m"}, found.text


def test_a_tensor_that_changes_its_shape_in_place_is_not_read() -> None:
    def function(m: Tensor) -> Tensor:
        mask = _ones().triu()
        before = mask & m
        mask.t_()
        return before & mask

    with pytest.raises(Unreadable, match="changes its shape"):
        read(function, torch.rand(S, S) < 0.5)
