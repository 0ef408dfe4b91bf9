"""Which added tensors only mask: those of a where between 0 and a number that masks, through views that keep them aligned."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.matching.patterns import softmax_chain
from attn_compiler.passes.matching.patterns.score_chain import Joined
from tests.passes.compiling import mirror_of

LOWEST = torch.finfo(torch.float32).min
CONDITION = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()


def _added(function: Callable[[Tensor], Tensor], weight: float = 1.0) -> tuple[Mirror, Joined]:
    """The mirror, and the node whose result is added to ones, `weight` times."""
    mirror = mirror_of(lambda x: torch.ones(2, 3, 4, 4) + function(x), CONDITION)
    (add,) = (node for node in mirror.graph.nodes if node.target is torch.ops.aten.add.Tensor)
    node = add.args[1]
    assert isinstance(node, fx.Node)
    return mirror, Joined(node=node, dims=(), used=add, weight=weight)


@pytest.mark.parametrize(
    ("function", "inverted"),
    [
        (lambda x: torch.where(x, 0.0, LOWEST), False),
        (lambda x: torch.where(x, LOWEST, 0.0), True),
        (lambda x: torch.where(x, 0.0, -torch.inf).expand(2, 3, 4, 4), False),
        (lambda x: torch.broadcast_to(torch.where(x, 0.0, -torch.inf), (2, 3, 4, 4)), False),
        (lambda x: torch.where(x, 0.0, -torch.inf).expand_as(torch.ones(2, 3, 4, 4)), False),
        (lambda x: torch.where(x, 0.0, LOWEST).contiguous().to(torch.float32), False),
    ],
    ids=["0 where it holds", "0 elsewhere", "expanded", "broadcast", "expanded like another", "copied"],
)
def test_a_tensor_that_only_masks_is_its_condition(function: Callable[[Tensor], Tensor], inverted: bool) -> None:
    mirror, term = _added(function)
    found = softmax_chain.condition_of_mask(mirror, term)
    assert found is not None
    assert found.inverted is inverted
    assert found.fill in (LOWEST, -torch.inf)
    assert found.node.op == "placeholder"


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.where(x, 0.0, -10.0),
        lambda x: torch.where(x, 1.0, LOWEST),
        lambda x: torch.where(x, 0.0, LOWEST).transpose(2, 3),
        lambda x: torch.where(x, 0.0, LOWEST) * 0.5,
    ],
    ids=["a bias", "more than a mask", "turned", "scaled"],
)
def test_any_other_tensor_is_none(function: Callable[[Tensor], Tensor]) -> None:
    mirror, term = _added(function)
    assert softmax_chain.condition_of_mask(mirror, term) is None


def test_the_weight_of_the_tensor_is_in_its_fill() -> None:
    found = softmax_chain.condition_of_mask(*_added(lambda x: torch.where(x, 0.0, LOWEST), 0.5))
    assert found is not None
    assert found.fill == LOWEST * 0.5
    assert softmax_chain.condition_of_mask(*_added(lambda x: torch.where(x, 0.0, LOWEST), 1e-38)) is None
