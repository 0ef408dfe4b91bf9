"""The distribution of a cache: position p is slot p // size of rank p % size. Functions that can be traced.

So all ranks hold as many positions at every length, and nothing moves when the sequence grows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def count(length: int, size: int) -> int:
    """Return the number of slots that each of `size` ranks needs for `length` positions."""
    return -(-length // size)


def positions(slots: int, size: int, rank: Tensor) -> Tensor:
    """Return (slots,), int64: the position of each slot of a rank. rank: (), int64."""
    return torch.arange(slots, device=rank.device) * size + rank


def joined(by_rank: Tensor) -> Tensor:
    """Join (size, B, H, slots, D) to (B, H, slots · size, D), in the order of positions."""
    return torch.flatten(torch.movedim(by_rank, 0, 3), 2, 3)


def write(kept: Sequence[Tensor], new: Sequence[Tensor], start: Tensor, size: int, rank: Tensor) -> None:
    """Write a rank's share of new positions into its slots. The other positions are not for this rank.

    kept: keys and values, (B, H, slots, D), written in place. new: of each, (B, H, n, D), the same on all ranks. start: (), int64, the
    position of the first of them. rank: (), int64. Positions beyond the slots are an index out of range on every rank.
    """
    slots, length = kept[0].shape[2], new[0].shape[2]
    first = torch.div(start - rank + size - 1, size, rounding_mode="floor")
    at = first + torch.arange(count(length, size), device=new[0].device)
    place = at * size + rank - start
    is_own = place < length
    # A rank may keep one new position less than others. Then it writes its first slot twice, with the same values.
    at = torch.where(is_own, at, first.clamp(max=slots - 1))
    place = torch.where(is_own, place, place[:1]).clamp(max=length - 1)
    at = torch.where(start + length > slots * size, slots, at)
    for held, come in zip(kept, new, strict=True):
        values = come.index_select(2, place)
        if at.shape[0] == 1:
            # A rank that keeps no new position writes the old value of its slot back.
            values = torch.where(is_own, values, held.index_select(2, at.clamp(max=slots - 1)))
        held.index_copy_(2, at, values)
