"""Reshapes that split and merge axes, slices from the end, gathers and concatenations: read down to what they move."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes.recovering.reading.evaluating import read

Function = Callable[[Tensor], Tensor]

X = torch.arange(24.0).view(4, 6) + 0.5
INDEX = torch.tensor([2, 0, 3, 1, 3])

MOVES: dict[str, Function] = {
    "an axis split": lambda x: x.view(4, 2, 3),
    "an axis split and turned": lambda x: x.view(4, 2, 3).transpose(0, 1),
    "axes merged": lambda x: x.reshape(24),
    "axes merged and split elsewhere": lambda x: x.reshape(3, 8),
    "and with axes of size one": lambda x: x.reshape(1, 8, 1, 3),
    "flattened in part": lambda x: x.view(2, 2, 6).flatten(1, 2),
    "unflattened": lambda x: x.unflatten(1, (3, 2)),
    "windows": lambda x: x.view(2, 2, 3, 2).transpose(1, 2).contiguous().view(-1, 4),
    "there and back": lambda x: x.reshape(12, 2).reshape(6, 4).reshape(4, 6),
    "sliced from the end": lambda x: x[:, -2:],
    "sliced up to the end": lambda x: x[:-1, :-2],
    "sliced from the end by steps": lambda x: x[1:][:, 1::2],
    "sliced in the middle, from the end": lambda x: x[-3:-1, -5:4],
    "sliced from before the front": lambda x: x[-9:3, -9:],
    "narrowed": lambda x: x.narrow(1, 2, 3).narrow(0, 1, 2),
    "narrowed from the end": lambda x: x.narrow(-1, -4, 3),
    "sliced by steps from the end": lambda x: x[:, -5::2],
    "all axes turned": lambda x: x.T[1:],
    "the last two turned": lambda x: x.view(2, 2, 6).mT,
    "turned from the end": lambda x: x.view(2, 2, 6).transpose(-1, 0),
    "axes swapped": lambda x: x.view(2, 2, 6).swapaxes(0, -1),
    "dims swapped": lambda x: x.view(2, 2, 6).swapdims(-2, 0),
    "an axis moved": lambda x: x.view(2, 2, 6).movedim(0, -1),
    "two axes moved": lambda x: x.view(2, 2, 6).movedim((0, 2), (1, 0)),
    "an axis moved by its other name": lambda x: x.view(2, 2, 6).moveaxis(0, -1),
    "two axes moved by their other name": lambda x: x.view(2, 2, 6).moveaxis((0, 2), (1, 0)),
    "flattened by another name": lambda x: x.T.ravel(),
    "broadcast to a size": lambda x: torch.broadcast_to(x[:, None], (4, 3, 6))[1:],
    "as another one": lambda x: x.view_as(torch.empty(8, 3)),
    "in the shape of another one": lambda x: x.T.reshape_as(torch.empty(8, 3)),
    "without axes of size one": lambda x: x[None, :, None].squeeze((0, 2)),
    "permuted from the end": lambda x: x.view(2, 2, 6).permute(-1, 0, -2),
    "joined": lambda x: torch.cat([x[:, 3:], x[:, :2], x], dim=1),
    "joined at the front": lambda x: torch.cat([x, x + 1], dim=0),
    "joined with whole numbers": lambda x: torch.cat([torch.arange(6)[None, :], x]),
    "every second row first": lambda x: torch.concat([x[1::2], x[::2]])[:3],
    "picked": lambda x: x.index_select(0, torch.arange(2) + 1),
    "picked elsewhere": lambda x: x.index_select(-1, torch.arange(3)),
    "gathered": lambda x: x.gather(1, (torch.arange(4)[:, None] + torch.arange(2))),
    "columns by an index": lambda x: x[:, torch.arange(4)[:, None] + torch.arange(2)[None, :]],
    "rows by an index": lambda x: x[torch.arange(3)[:, None] + torch.arange(2)[None, :]],
}


@pytest.mark.parametrize("name", MOVES)
def test_what_is_moved_is_read_at_its_source(name: str) -> None:
    function = MOVES[name]
    found = read(lambda x: function(x) + 0.0, X)
    assert found.equal, found.text
    assert found.loads == {"x"}


@pytest.mark.parametrize("rows", [4, 5])
def test_the_outermost_axis_may_be_of_any_size(rows: int) -> None:
    found = read(lambda x: x.view(-1, 2, 3).reshape(-1, 3)[:, -2:] + 0.0, torch.randn(rows, 6), dynamic_sizes=(rows,))
    assert found.equal, found.text


def test_a_narrow_may_begin_at_a_size() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.arange(40).narrow(0, x.shape[0], x.shape[0]) * x

    found = read(function, torch.randn(7), dynamic_sizes=(7,))
    assert found.equal, found.text


@pytest.mark.parametrize("longest", [3, 9])
def test_a_slice_that_begins_at_the_larger_of_two_sizes(longest: int) -> None:
    def function(x: Tensor) -> Tensor:
        return torch.arange(1 - longest, 1)[max(0, longest - x.shape[0]) :][None, :] * x[:1, None]

    found = read(function, torch.randn(7), dynamic_sizes=(7,))
    assert found.equal, found.text


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: torch.cat([x, y]),
        lambda x, y: torch.cat([x[:2], y, x[2:], y[:1]]),
        lambda x, y: torch.cat([y[:0], x, y.flip(0)]),
    ],
    ids=["two", "between", "nothing first"],
)
def test_parts_of_symbolic_sizes_are_joined(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    found = read(lambda x, y: function(x, y) + 0.0, torch.randn(7), torch.randn(5), dynamic_sizes=(7, 5))
    assert found.equal, found.text
    assert found.loads == {"x", "y"}


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: x[i],
        lambda x, i: x[:, i],
        lambda x, i: F.embedding(i, x),
        lambda x, i: x.index_select(0, i),
        lambda x, i: x.gather(0, i[:, None].expand(5, 6)),
    ],
    ids=["rows", "columns", "embedding", "index_select", "gather"],
)
def test_an_index_that_is_read_at_run_time(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    found = read(lambda x, i: function(x, i) + 0.0, X, INDEX)
    assert found.equal, found.text
    assert found.loads == {"x", "i"}


def test_negative_indices_count_from_the_end() -> None:
    found = read(lambda x: x[torch.arange(3) - 2] + 0.0, X)
    assert found.equal, found.text


def test_a_copy_stays_what_it_was_when_its_source_is_written() -> None:
    """A static cache's length: read before it is counted up."""

    def function(x: Tensor) -> Tensor:
        kept = x.clone()
        x.add_(1)
        return kept[:, None] + torch.arange(3)[None, :]

    found = read(function, torch.randn(4))
    assert found.loads == {"x"}
    assert found.equal, found.text
