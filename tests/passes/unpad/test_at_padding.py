"""Sums over positions leave padding out where what they read is known to be 0 there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.passes.unpad.encoder import MASK, Encoder, check, compiled, ids_of, report

Pooling = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _wide(mask: torch.Tensor) -> torch.Tensor:
    return mask[:, :, None]


ZERO: dict[str, Pooling] = {
    "masked_fill of equal": lambda x, m: x.masked_fill(_wide(m == 0), 0.0).sum(1),
    "masked_fill of not": lambda x, m: x.masked_fill(~_wide(m.bool()), 0).sum(1) / m.sum(1, keepdim=True),
    "where": lambda x, m: torch.where(_wide(m).bool(), x, 0.0).sum(1),
    "where of zeros": lambda x, m: torch.where(_wide(m).bool(), x, torch.zeros_like(x)).sum(1),
    "where of a number, turned": lambda x, m: torch.where(_wide(m) == 0, 0.0, x).sum(1),
    "one minus the mask": lambda x, m: (x * (1 - (1 - _wide(m)))).sum(1),
    "a cast and a comparison": lambda x, m: (x * (_wide(m).float() > 0.5)).sum(1),
    "a sum with what is 0": lambda x, m: (x * _wide(m) * 2 + 0 * _wide(m)).sum((0, 1)),
    "not a number that is 1": lambda x, m: (x * (2 - 2 * (_wide(m) == 0).to(x.dtype)) / 2).sum(1),
}

OTHER: dict[str, Pooling] = {
    "one at padding": lambda x, m: x.masked_fill(_wide(m == 0), 1.0).sum(1),
    "the other way round": lambda x, m: x.masked_fill(_wide(m == 1), 0.0).sum(1),
    "where turned": lambda x, m: torch.where(_wide(m).bool(), 0.0, x).sum(1),
    "more than the mask": lambda x, m: (x * (_wide(m) + 1)).sum(1),
    "a mask of something else": lambda x, m: (x * _wide(m.flip(1))).sum(1),
    "a threshold below 0": lambda x, m: (x * (_wide(m).float() > -0.5)).sum(1),
    "dropout of the mask": lambda x, m: (x * (1 - torch.bernoulli(_wide(m).float()))).sum(1),
}


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("name", ZERO)
def test_what_is_zero_at_padding_is_packed(name: str) -> None:
    found = check(Encoder(ending=ZERO[name]), close=2e-5)
    assert found.kept is None, found.kept
    assert found.last[-1].failed == ()


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("name", OTHER)
def test_what_is_not_zero_keeps_its_padding(name: str) -> None:
    model = Encoder(ending=OTHER[name])
    compiled(model)(ids_of(MASK), MASK)
    assert report().kept is not None
