"""Weights that are set to zero after the softmax: by the masks of the scores, by one of them, or in rows that they leave without keys."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.near_miss.checking import BATCH, HEAD_DIM, HEADS, Case, Judge, check, described, missed, refused, tensors

LENGTH = 6
SHAPE = (BATCH, HEADS, LENGTH, HEAD_DIM)
LOW, NONE = -1e9, float("-inf")
#: weights of scores and of the pairs that a causal mask and one of keys allow
Function = Callable[[Tensor, Tensor, Tensor], Tensor]


def given() -> list[Tensor]:
    """q, k, v, and keys of which the first three are padding in one batch row: its first queries have none."""
    keys = torch.ones(BATCH, 1, 1, LENGTH, dtype=torch.bool)
    keys[0, ..., :3] = False
    return [*tensors(SHAPE, SHAPE, SHAPE), keys]


def weighed(function: Function) -> Callable[..., Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor, keys: Tensor) -> Tensor:
        return function(q @ k.mT * 0.25, torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), keys) @ v

    return attention


def _once(s: Tensor, allowed: Tensor, fill: float = LOW) -> Tensor:
    return s.masked_fill(~allowed, fill).softmax(-1)


def _twice(s: Tensor, causal: Tensor, keys: Tensor, fill: float = LOW) -> Tensor:
    return s.masked_fill(~causal, LOW).masked_fill(~keys, fill).softmax(-1)


whole, rows = described("causal ∧ key padding"), described("any")
CASES: dict[str, tuple[Function, Judge]] = {
    "by the mask": (lambda s, c, k: _once(s, c & k).masked_fill(~(c & k), 0), whole),
    "by each of two masks": (lambda s, c, k: _twice(s, c, k).masked_fill(~c, 0).masked_fill(~k, 0), whole),
    "by one of two": (lambda s, c, k: _twice(s, c, k).masked_fill(~c, 0), refused("several numbers mask")),
    "by one of two, whose other is -inf": (
        lambda s, c, k: _twice(s, c, k, NONE).nan_to_num(0).masked_fill(~c, 0),
        whole,
    ),
    "rows without keys": (lambda s, c, k: _once(s, m := c & k).masked_fill(~m.any(-1, keepdim=True), 0), whole),
    "rows without keys, by all": (lambda s, c, k: _once(s, m := c & k).masked_fill((~m).all(-1, True), 0), whole),
    "rows without keys, by where": (
        lambda s, c, k: torch.where((m := c & k).any(-1, keepdim=True), _once(s, m, NONE), 0.0),
        whole,
    ),
    "rows without keys, multiplied": (lambda s, c, k: _once(s, m := c & k) * m.any(-1, keepdim=True), whole),
    "rows without keys of one of two": (lambda s, c, k: _twice(s, c, k).masked_fill(~k.any(-1, True), 0), rows),
    "rows with keys": (lambda s, c, k: _once(s, m := c & k).masked_fill(m.any(-1, keepdim=True), 0), rows),
    "rows in which all are": (
        lambda s, c, k: _once(s, m := c & k).masked_fill(~m.all(-1, keepdim=True), 0),
        described("all"),
    ),
    "columns without queries": (
        lambda s, c, k: _once(s, m := c & k).masked_fill(~m.any(-2, keepdim=True), 0),
        missed("every axis", "another mask"),
    ),
}


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("name", CASES)
def test_weights_that_are_masked_again(name: str) -> None:
    function, judge = CASES[name]
    check(Case(name=name, function=weighed(function), judge=judge, inputs=given))
