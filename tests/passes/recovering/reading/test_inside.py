"""What a write through a view reaches: read back from the tensor, at every index."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.passes.recovering.reading.evaluating import read

Edit = Callable[[Tensor, Tensor], object]
A, B, C = 3, 4, 5

#: (the tensor, random numbers of the same shape), in place
REACHED: dict[str, Edit] = {
    "all of it": lambda x, y: x.copy_(y),
    "a row": lambda x, y: x[1].copy_(y[0]),
    "the last row": lambda x, y: x[-1].copy_(y[0]),
    "the last but one, in the middle": lambda x, y: x[:, -2].copy_(y[:, 0]),
    "one element": lambda x, y: x[2, 3, 1].copy_(y[0, 0, 0]),
    "some rows": lambda x, y: x[1:3].copy_(y[:2]),
    "the first rows": lambda x, y: x[:2].copy_(y[:2]),
    "the last columns": lambda x, y: x[..., -2:].copy_(y[..., :2]),
    "all but the last columns": lambda x, y: x[..., :-2].copy_(y[..., 2:]),
    "every second": lambda x, y: x[:, ::2].copy_(y[:, :2]),
    "every second from the second": lambda x, y: x[:, 1::2].mul_(3),
    "every third but the last": lambda x, y: x[..., 1:4:3].add_(2),
    "a block": lambda x, y: x[1:, 1:3, :4].copy_(y[1:, 1:3, 1:]),
    "a narrowed one": lambda x, y: x.narrow(1, 1, 2).copy_(y[:, :2]),
    "a narrowed one, from the end": lambda x, y: x.narrow(-1, -3, 2).copy_(y[..., :2]),
    "a slice of a slice": lambda x, y: x[:, 1:][:, :2].copy_(y[:, :2]),
    "none of a None": lambda x, y: x[None, 1:, None].copy_(y[None, 1:, None]),
    "nothing": lambda x, y: x[:, 2:2].fill_(7),
    "a transposed one": lambda x, y: x.transpose(0, 2)[1:].copy_(y.transpose(0, 2)[1:]),
    "a permuted one": lambda x, y: x.permute(2, 0, 1)[:, 1].copy_(y[0].mT),
    "swapped axes": lambda x, y: x.swapaxes(0, 2)[1:].copy_(y.swapaxes(0, 2)[1:]),
    "a moved axis": lambda x, y: x.movedim(0, -1)[1:, 2].copy_(y.movedim(0, -1)[:3, 0]),
    "an axis moved by its other name": lambda x, y: x.moveaxis(0, -1)[1:, 2].copy_(y.moveaxis(0, -1)[:3, 0]),
    "flattened by another name": lambda x, y: x.ravel()[7:11].copy_(y.ravel()[:4]),
    "as another one": lambda x, y: x.view_as(torch.empty(2, 6, C))[:, 2:4].copy_(y.view(2, 6, C)[:, :2]),
    "without axes of size one": lambda x, y: x[None, :, None].squeeze((0, 2))[1:].copy_(y[1:]),
    "mT": lambda x, y: x.mT[:, 2].copy_(y.mT[:, 1]),
    "T": lambda x, y: x[1].T[2:].copy_(y[0].T[1:-1]),
    "in the middle, from the end": lambda x, y: x[:, -3:-1, -4:3].copy_(y[:, :2, :2]),
    "t": lambda x, y: x[0].t()[1:].copy_(y[0].t()[1:]),
    "t of a row": lambda x, y: x[0, 1].t()[1:].copy_(y[0, 0, 1:]),
    "a flat view": lambda x, y: x.view(-1)[7:11].copy_(y.flatten()[:4]),
    "a view of other sizes": lambda x, y: x.view(2, 6, C)[:, 2:4].copy_(y.view(2, 6, C)[:, :2]),
    "a flattened one": lambda x, y: x.flatten(1)[:, 3:9].copy_(y.flatten(1)[:, :6]),
    "an unflattened one": lambda x, y: x.unflatten(1, (2, 2))[:, 1].copy_(y[:, :2]),
    "unsqueezed and squeezed": lambda x, y: x.unsqueeze(1).squeeze(1)[1:].copy_(y[1:]),
    "detached": lambda x, y: x.detach()[1:].copy_(y[1:]),
    "a number for all": lambda x, y: x[1:].copy_(torch.tensor(2.5)),
    "a row for all": lambda x, y: x[1:].copy_(y[0, 0]),
    "by assignment": lambda x, y: x.__setitem__((slice(None), slice(1, 3)), y[:, :2]),
    "by assignment of a number": lambda x, y: x.__setitem__((Ellipsis, slice(2, None)), 4.0),
    "what is assigned was read from it": lambda x, y: x.__setitem__(
        (..., slice(1, 3)), x[..., 1:3].masked_fill(y[..., :2] > 0, 9)
    ),
}


@pytest.mark.parametrize("name", REACHED)
def test_an_element_is_what_was_written_or_what_was_there(name: str) -> None:
    def function(y: Tensor) -> Tensor:
        x = torch.arange(A * B * C).view(A, B, C).float()
        REACHED[name](x, y)
        return x + y

    found = read(function, torch.rand(A, B, C))
    assert found.equal, found.text


@pytest.mark.parametrize("offset", [0, 2])
def test_of_symbolic_sizes(offset: int) -> None:
    def function(y: Tensor) -> Tensor:
        rows, columns = y.shape
        x = torch.zeros(rows + offset, columns)
        x[:rows] = y
        x[offset:, 1:].neg_()
        return x * 1.0

    found = read(function, torch.rand(7, 9), dynamic_sizes=(7, 9))
    assert found.equal, found.text


NOT_FOLLOWED: dict[str, Edit] = {
    "a diagonal": lambda x, y: x.diagonal().zero_(),
    "by strides": lambda x, y: x.as_strided((2, 2), (7, 1)).zero_(),
    "one of the parts of a split": lambda x, y: x.split(2, 1)[1].zero_(),
    "by numbers of rows": lambda x, y: (x.index_copy_(0, torch.tensor([1]), y[:1]), x[0].zero_()),
    "where a condition holds": lambda x, y: (x.masked_scatter_(y > 0.5, y), x[0].zero_()),
}


@pytest.mark.parametrize("name", NOT_FOLLOWED)
def test_what_is_not_followed_is_a_load(name: str) -> None:
    def function(y: Tensor) -> Tensor:
        x = torch.arange(A * B * C).view(A, B, C).float()
        NOT_FOLLOWED[name](x, y)
        return x[1:] + y[1:]

    found = read(function, torch.rand(A, B, C))
    assert not found.loads <= {"y"}, found.text
