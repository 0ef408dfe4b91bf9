"""Masks that are made in loops: each step adds to what is there, so a reading that looks at all of it again is seen to."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType

import torch
from torch import Tensor

import attn_compiler

#: how many steps -> (numbers of shape (S,), rows of shape (·, S)) -> a mask of shape (S, S)
Loop = Callable[[int], Callable[[Tensor, Tensor], Tensor]]

_PACKAGE = os.path.dirname(attn_compiler.__file__) + os.sep
_PARTS = tuple(_PACKAGE + part for part in ("index_expr", "passes"))


def _positions(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of queries and keys."""
    i = torch.arange(x.shape[0])
    return i[:, None], i[None, :]


def _square(row: Tensor) -> Tensor:
    q, k = _positions(row)
    return row[None, :] & (k <= q)


def _of_values(step: Callable[[Tensor, Tensor, Tensor, int], Tensor]) -> Loop:
    """Values of positions, changed by each step(values, numbers, rows, t); keys are used whose value is at least 1 in the end."""

    def loop(n: int) -> Callable[[Tensor, Tensor], Tensor]:
        def make(m: Tensor, rows: Tensor) -> Tensor:
            x = m
            for t in range(n):
                x = step(x, m, rows, t)
            return _square(x >= 1)

        return make

    return loop


def _of_pairs(step: Callable[[Tensor, Tensor, int], Tensor]) -> Loop:
    """A diagonal, changed by each step(mask, rows, t)."""

    def loop(n: int) -> Callable[[Tensor, Tensor], Tensor]:
        def make(m: Tensor, rows: Tensor) -> Tensor:
            q, k = _positions(m)
            mask = k <= q
            for t in range(n):
                mask = step(mask, rows, t)
            return mask

        return make

    return loop


choices = _of_values(lambda x, m, rows, t: torch.where(m >= t + 1, rows[t], x))
#: the other way round: what is there is taken where the condition holds
choices_inside = _of_values(lambda x, m, rows, t: torch.where(m == t, x, rows[t]))
largest = _of_values(lambda x, m, rows, t: torch.maximum(x, rows[t]))
differences = _of_values(lambda x, m, rows, t: (x - rows[t]).abs())
rotated = _of_values(lambda x, m, rows, t: torch.cat([x[1:], x[:1]]))
rotated_far = _of_values(lambda x, m, rows, t: torch.cat([x[3:], x[:3]]))
#: each step holds what was there twice
doubled = _of_values(lambda x, m, rows, t: torch.where(rows[t] > 0, x.abs(), torch.maximum(x, rows[t])))
conditions = _of_pairs(lambda mask, rows, t: mask & (rows[t] != t))
both_in_turn = _of_pairs(lambda mask, rows, t: (mask & (rows[t] != t)) | (rows[t] == t + 1)[:, None])


def alternatives(n: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Documents, one after the other."""

    def make(m: Tensor, rows: Tensor) -> Tensor:
        q, k = _positions(m)
        mask = q == k
        for t in range(n):
            mask = mask | ((q >= t) & (q < t + 2) & (k >= t) & (k < t + 2))
        return mask & (m > 0)

    return make


def numbered(n: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Segments, counted up."""

    def make(m: Tensor, rows: Tensor) -> Tensor:
        ids = torch.zeros_like(m)
        for t in range(n):
            ids = ids + (m >= t)
        return ids[:, None] == ids[None, :]

    return make


def numbered_in_place(n: int) -> Callable[[Tensor, Tensor], Tensor]:
    def make(m: Tensor, rows: Tensor) -> Tensor:
        ids = torch.zeros(m.shape[0], dtype=torch.int64)
        for t in range(n):
            ids[t % m.shape[0] :] += 1
        return (ids[:, None] == ids[None, :]) & (m > 0)

    return make


def written_by_row(n: int) -> Callable[[Tensor, Tensor], Tensor]:
    def make(m: Tensor, rows: Tensor) -> Tensor:
        q, k = _positions(m)
        mask = k <= q
        for t in range(n):
            mask[t % m.shape[0]] = rows[t] > t
        return mask

    return make


def written_by_block(n: int) -> Callable[[Tensor, Tensor], Tensor]:
    def make(m: Tensor, rows: Tensor) -> Tensor:
        size = m.shape[0]
        mask = torch.zeros(size, size, dtype=torch.bool)
        for t in range(n):
            first = t % (size - 1)
            mask[first : first + 2, first : first + 2] = True
        return mask & (m > 0)

    return make


def filled_in_place(n: int) -> Callable[[Tensor, Tensor], Tensor]:
    def make(m: Tensor, rows: Tensor) -> Tensor:
        size = m.shape[0]
        mask = torch.ones(size, size, dtype=torch.bool)
        for t in range(n):
            mask.masked_fill_(rows[t] == t, False)
        return mask

    return make


def filled_in_a_chain(n: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Each op is given what the last one gave back."""

    def make(m: Tensor, rows: Tensor) -> Tensor:
        size = m.shape[0]
        mask = torch.ones(size, size, dtype=torch.bool)
        for t in range(n):
            mask = mask.masked_fill_(rows[t] == t, False)
        return mask

    return make


#: masks that are proved, whatever the number of steps; of those that grow too large, from a tensor on that holds what came before
READ: dict[str, Loop] = {
    "choices": choices,
    "choices inside": choices_inside,
    "largest": largest,
    "differences": differences,
    "doubled": doubled,
    "alternatives": alternatives,
    "conditions": conditions,
    "numbered": numbered,
    "numbered in place": numbered_in_place,
    "written by block": written_by_block,
    "filled in place": filled_in_place,
    "filled in a chain": filled_in_a_chain,
}

#: masks that are only proved up to a number of steps
BOUNDED: dict[str, Loop] = {
    "both in turn": both_in_turn,
    "written by row": written_by_row,
    "rotated": rotated,
    "rotated far": rotated_far,
}


class Calls:
    """Counts calls of functions of ours that read and calculate with expressions: the same program always makes as many."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Calls:
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_PARTS):
            self.count += 1
