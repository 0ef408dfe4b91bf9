"""What is made for an attention alone, and what something else needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from attn_compiler.passes.graph import sole_reader
from tests.passes.matched_sites import matched

B, H, S, D = 2, 2, 5, 4
Model = Callable[[Tensor, Tensor, Tensor], Any]


def _made_for(model: Model) -> set[str] | None:
    """Names of the Dynamo nodes that are made for the attention, from the projection on."""
    given = (torch.randn(B, H, 1, D), torch.randn(B, H, S, 6), torch.randn(D, 6))
    mirror, match = matched(model, *given)
    projections = [node for node in mirror.graph.nodes if node.target is torch.ops.aten.linear.default]
    found = sole_reader.made_for(mirror, match, projections)
    return None if found is None else {node.name for node in found}


def _attend(q: Tensor, k: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, k)


def _plain(q: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return _attend(q, linear(x, weight).transpose(2, 3).mT * 2)


def _into_fresh_memory(q: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    k = torch.empty(B, H, S, 2 * D)
    k[..., :D].copy_(linear(x, weight))
    k[..., D:] = x[..., :D]
    return _attend(torch.cat((q, q), -1), k)


def test_all_from_the_first_tensor_to_the_attention_is_made_for_it() -> None:
    found = _made_for(_plain)
    assert found is not None
    assert len(found) == 4
    assert not any("scaled_dot_product_attention" in name or name.startswith("l_") for name in found)


def test_fresh_memory_that_is_written_belongs_to_it() -> None:
    found = _made_for(_into_fresh_memory)
    assert found is not None
    assert "k" in found
    assert any("setitem" in name for name in found)
    assert not any(name.startswith("cat") for name in found)


def _returned(q: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    k = linear(x, weight)
    return _attend(q, k), k


def _read_before(q: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    k = linear(x, weight)
    return _attend(q, k.mT.mT), k.mT.sum()


def _written_into_an_input(q: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    cache = x[..., :D]
    cache.copy_(linear(x, weight))
    return _attend(q, cache)


def _memory_read_elsewhere(q: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    k = torch.zeros(B, H, S, D)
    other = k[0]
    k.copy_(linear(x, weight))
    return _attend(q, k), other


@pytest.mark.parametrize(
    "model", [_returned, _read_before, _written_into_an_input, _memory_read_elsewhere], ids=lambda model: model.__name__
)
def test_another_reader_is_seen(model: Model) -> None:
    assert _made_for(model) is None


def test_a_number_of_it_is_another_reader() -> None:
    def model(q: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        k = linear(x, weight)
        return _attend(q, k) * k.mean()

    assert _made_for(model) is None
