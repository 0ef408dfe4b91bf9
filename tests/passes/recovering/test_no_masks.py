"""Added tensors that can mask nothing are known to, and those that may mask are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import attn_compiler
from attn_compiler.spec.masks import MaskSpec
from tests.near_miss.checking import assert_same, normal

B, H, S, D = 2, 2, 4, 8
#: from the queries and a table of numbers to what is added
Make = Callable[[Tensor, Tensor], Tensor]


def mask_of(make: Make) -> MaskSpec:
    """The mask of an attention that make's tensor is added to, whose outputs and gradients are eager's."""

    def function(q: Tensor, k: Tensor, table: Tensor) -> Tensor:
        return F.softmax(q * 0.5 @ k.mT + make(q, table), -1) @ k

    def inputs() -> list[Tensor]:
        return [normal(B, H, S, D, grad=True), normal(B, H, S, D, grad=True, seed=1), normal(S, D, grad=True, seed=2)]

    assert_same(function, inputs)
    ((site,),) = (report.sites for report in attn_compiler.reports())
    return site.spec.mask


def _square(table: Tensor) -> Tensor:
    return table[:, :S]


def _far(q: Tensor, table: Tensor) -> Tensor:
    return torch.einsum("bhqd,kd->bhqk", q, table)


NO_MASKS: dict[str, Make] = {
    "Swin v2's": lambda q, table: 16 * torch.sigmoid(_square(table)),
    "a tangent": lambda q, table: torch.tanh(_square(table)) * -50.0,
    "weights of another softmax": lambda q, table: F.softmax(_square(table), -1),
    "SAM's": _far,
    "SAM's, of a head at a time": lambda q, table: (q.flatten(0, 1) @ table.mT).view(B, H, S, S),
    "two of them": lambda q, table: _far(q, table) + torch.sigmoid(_square(table)),
}

#: what of it may mask
MASKS: dict[str, Make] = {
    "a gate that masks": lambda q, table: torch.sigmoid(_square(table)) * -1e5,
    "a product that masks": lambda q, table: _far(q, table) * 1e5,
    "a product of no query": lambda q, table: table @ table.mT,
    "a product of what the queries were made to": lambda q, table: torch.einsum("bhqd,kd->bhqk", q.exp(), table),
    "a product on something else": lambda q, table: torch.addmm(table @ table.mT, q[0, 0], table.mT),
    "no bound": lambda q, table: F.softplus(_square(table)),
    "written to behind": lambda q, table: _written(torch.sigmoid(_square(table.detach()))),
    "beside another": lambda q, table: torch.sigmoid(_square(table)) + F.softplus(_square(table)),
}


def _written(x: Tensor) -> Tensor:
    return x.log_()


@pytest.mark.parametrize("name", NO_MASKS)
def test_no_masks(name: str) -> None:
    mask = mask_of(NO_MASKS[name])
    assert not mask.kinds
    assert mask.reason is None


@pytest.mark.parametrize("name", MASKS)
def test_what_may_mask(name: str) -> None:
    assert "it may mask too" in str(mask_of(MASKS[name]).reason)
