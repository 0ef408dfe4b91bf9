"""Which rank keeps which position of a cache: each position once, and all of them in order again."""

from __future__ import annotations

import pytest
import torch

from attn_compiler.context_parallel import slots


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("pieces", [(7, 1, 1, 1), (2, 1, 3, 5), (1,) * 9, (12,)])
def test_each_position_is_kept_once_and_comes_back_in_order(size: int, pieces: tuple[int, ...]) -> None:
    kept = [torch.zeros(2, 1, slots.count(12, size), 3) for _ in range(size)]
    whole = torch.randn(2, 1, sum(pieces), 3)
    start = 0
    for length in pieces:
        for rank, one in enumerate(kept):
            slots.write((one,), (whole[:, :, start : start + length],), torch.tensor(start), size, torch.tensor(rank))
        start += length
    found = slots.joined(torch.stack(kept))
    assert torch.equal(found[:, :, :start], whole)
    assert not found[:, :, start:].any()
    assert slots.positions(4, size, torch.tensor(0)).tolist() == [0, size, 2 * size, 3 * size]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_what_does_not_fit_is_an_error_on_every_rank(rank: int, length: int) -> None:
    kept = torch.zeros(1, 1, 3, 2)
    with pytest.raises(IndexError):
        slots.write((kept,), (torch.ones(1, 1, length, 2),), torch.tensor(7 - length), 2, torch.tensor(rank))
    slots.write((kept,), (torch.ones(1, 1, length, 2),), torch.tensor(6 - length), 2, torch.tensor(rank))
