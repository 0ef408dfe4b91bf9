"""What is known of a tensor goes with that very object, and is lost at the first write to it."""

from __future__ import annotations

import copy
import dataclasses
import gc
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_compiler import index_expr as ix
from attn_compiler.torch_private import known_masks, writes as torch_writes
from attn_compiler.torch_private.known_masks import Known

QUERY, KEY = map(ix.linear, known_masks.indices(2))
KNOWN = Known(element=ix.test(">=", ix.combine(QUERY, KEY, -1)), dims=2)


@pytest.fixture
def mask() -> Tensor:
    tensor = torch.ones(4, 4, dtype=torch.bool)
    known_masks.remember(tensor, KNOWN)
    return tensor


def test_the_tensor_itself_is_known(mask: Tensor) -> None:
    assert known_masks.recall(mask) == KNOWN
    assert known_masks.recall(mask) == KNOWN


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
        lambda x: setattr(x, "data", x.data.mT),
        lambda x: setattr(x, "data", x.data.view(torch.uint8)),
        lambda x: x.data.fill_(False),
        lambda x: x.set_(x.untyped_storage(), 0, (4, 4), (1, 4)),
        lambda x: x.set_(x.untyped_storage(), 1, (3, 4), (4, 1)),
        lambda x: x.as_strided_((4, 4), (1, 4)),
        lambda x: x.data.as_strided((4,), (5,)).fill_(False),
        lambda x: x.untyped_storage().fill_(0),
        lambda x: x.numpy().fill(False),
        lambda x: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x)).fill_(False),
        lambda x: x.resize_(2, 2),
        lambda x: x.resize_(9, 9),
        lambda x: x.untyped_storage().resize_(0),
    ],
)
def test_after_a_write_nothing_is_known(mask: Tensor, write: Callable[[Tensor], object]) -> None:
    write(mask)
    assert known_masks.recall(mask) is None


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
    assert known_masks.recall(other(mask)) is None
    assert known_masks.recall(mask) == KNOWN


def test_of_tensors_whose_writes_are_not_counted_nothing_is_known() -> None:
    with torch.inference_mode():
        tensor = torch.ones(4, 4, dtype=torch.bool)
        known_masks.remember(tensor, KNOWN)
        assert known_masks.recall(tensor) is None
    assert known_masks.recall(tensor) is None


@pytest.mark.parametrize(("keys", "found"), [(3, KNOWN), (4, None)])
def test_facts_of_squares_are_kept_of_squares(keys: int, found: Known | None) -> None:
    mask = torch.ones(2, 3, keys, dtype=torch.bool)
    known_masks.remember(mask, dataclasses.replace(KNOWN, if_square=True))
    assert known_masks.recall(mask) == found


def test_entries_go_with_their_tensors() -> None:
    gc.collect()
    before = len(known_masks._entries)
    for _ in range(10):
        known_masks.remember(torch.ones(4, 4, dtype=torch.bool), KNOWN)
    gc.collect()
    assert len(known_masks._entries) == before


def test_what_was_known_last_counts(mask: Tensor) -> None:
    other = Known(element=ix.TRUE, dims=2)
    mask.fill_(True)
    known_masks.remember(mask, other)
    assert known_masks.recall(mask) == other


def test_of_memory_that_cannot_be_watched_nothing_is_known() -> None:
    tensor = torch.from_numpy(np.ones((4, 4), dtype=bool))
    known_masks.remember(tensor, KNOWN)
    assert known_masks.recall(tensor) is None


# ---- code that reads a mask ----------------------------------------------------------------------------------------


def _takes_address(x: Tensor) -> Tensor:
    """As Inductor's code reads: by the address, which it could write to as well."""
    assert x.data_ptr()
    return x.float()


def test_code_that_reads_a_mask_leaves_it_known(mask: Tensor) -> None:
    read = known_masks.wrap(_takes_address, (), (0,))
    for _ in range(2):
        read(mask)
        assert known_masks.recall(mask) == KNOWN


def test_other_code_that_takes_the_address_ends_what_is_known(mask: Tensor) -> None:
    for read in (_takes_address, known_masks.wrap(_takes_address, (), ())):
        read(mask)
        assert known_masks.recall(mask) is None


def test_code_that_reads_a_written_mask_does_not_make_it_known_again(mask: Tensor) -> None:
    mask.data[0, 0] = False
    known_masks.wrap(_takes_address, (), (0,))(mask)
    assert known_masks.recall(mask) is None


def test_code_that_fails_leaves_a_mask_known(mask: Tensor) -> None:
    def fails(x: Tensor) -> Tensor:
        raise ValueError(f"at {x.data_ptr()}")

    with pytest.raises(ValueError, match="at "):
        known_masks.wrap(fails, (), (0,))(mask)
    assert known_masks.recall(mask) == KNOWN


def test_while_one_call_reads_a_mask_another_one_that_ends_leaves_it_unwatched(mask: Tensor) -> None:
    """PyTorch does not bear that two threads end the watch at once."""
    inner = known_masks.wrap(_takes_address, (), (0,))

    def outer(x: Tensor) -> Tensor:
        assert known_masks.recall(x) is None
        inner(x)
        assert not torch_writes.is_unwritten(x)
        return _takes_address(x)

    known_masks.wrap(outer, (), (0,))(mask)
    assert known_masks.recall(mask) == KNOWN


def test_threads_may_share_a_mask_that_they_read() -> None:
    mask = torch.zeros(64, 64)
    known_masks.remember(mask, KNOWN)
    q = torch.ones(1, 1, 64, 8)
    # On a CPU this kernel takes the address of numbers that are added, and Python's lock is not held.
    read = known_masks.wrap(lambda m: F.scaled_dot_product_attention(q, q, q, attn_mask=m), (), (0,))
    raised: list[BaseException] = []

    def many() -> None:
        try:
            for _ in range(400):
                read(mask)
        except RuntimeError as error:
            raised.append(error)

    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert raised == []
    assert known_masks.recall(mask) == KNOWN
