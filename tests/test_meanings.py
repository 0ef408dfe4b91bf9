"""What is known of a tensor goes with that very object, and is lost at the first write to it."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attn_compiler import index_expr as ix
from attn_compiler import meanings
from attn_compiler.meanings import Known

KNOWN = Known(
    element=ix.test(">=", ix.combine(ix.linear(meanings.indices(2)[0]), ix.linear(meanings.indices(2)[1]), -1)), dims=2
)


@pytest.fixture
def mask() -> Tensor:
    tensor = torch.ones(4, 4, dtype=torch.bool)
    meanings.remember(tensor, KNOWN)
    return tensor


def test_the_tensor_itself_is_known(mask: Tensor) -> None:
    assert meanings.of(mask) == KNOWN
    assert meanings.of(mask) == KNOWN


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.logical_not_(),
        lambda x: x.__setitem__((0, 0), False),
        lambda x: x[1:].fill_(False),
        lambda x: x.detach().zero_(),
        lambda x: x.view(-1).zero_(),
        lambda x: x.transpose_(0, 1),
        lambda x: setattr(x, "data", torch.zeros(4, 4, dtype=torch.bool)),
        lambda x: setattr(x, "data", x.data[:2]),
    ],
)
def test_after_a_write_nothing_is_known(mask: Tensor, write: Callable[[Tensor], object]) -> None:
    write(mask)
    assert meanings.of(mask) is None


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x[:],
        lambda x: x.clone(),
        lambda x: x.detach(),
        copy.copy,
        copy.deepcopy,
        lambda x: x.to("meta"),
        lambda x: None,
        lambda x: 3,
    ],
)
def test_of_other_objects_nothing_is_known(mask: Tensor, other: Callable[[Tensor], object]) -> None:
    assert meanings.of(other(mask)) is None
    assert meanings.of(mask) == KNOWN


def test_of_tensors_whose_writes_are_not_counted_nothing_is_known() -> None:
    with torch.inference_mode():
        tensor = torch.ones(4, 4, dtype=torch.bool)
        meanings.remember(tensor, KNOWN)
        assert meanings.of(tensor) is None
    assert meanings.of(tensor) is None


def test_entries_go_with_their_tensors() -> None:
    gc.collect()
    before = len(meanings._entries)
    for _ in range(10):
        meanings.remember(torch.ones(4, 4, dtype=torch.bool), KNOWN)
    gc.collect()
    assert len(meanings._entries) == before


def test_what_was_known_last_counts(mask: Tensor) -> None:
    other = Known(element=ix.TRUE, dims=2)
    mask.fill_(True)
    meanings.remember(mask, other)
    assert meanings.of(mask) == other
