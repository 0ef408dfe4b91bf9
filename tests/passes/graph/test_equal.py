"""Which nodes hold equal elements because they are made alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from attn_compiler.passes.graph.equal import are_equal
from tests.passes.compiling import mirror_of

Tensor = torch.Tensor
LENGTHS = torch.tensor([2, 3])


def _are_equal(function: Callable[[Tensor], tuple[Tensor, Tensor]]) -> bool:
    """Of the two tensors that `function` gives."""

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        one, other = function(x)
        return one.cos(), other.sin()

    mirror = mirror_of(run, LENGTHS.clone())
    (one,) = (n.args[0] for n in mirror.graph.nodes if n.target is torch.ops.aten.cos.default)
    (other,) = (n.args[0] for n in mirror.graph.nodes if n.target is torch.ops.aten.sin.default)
    return are_equal(mirror, one, other)


def _mask(x: Tensor, more: int = 0) -> Tensor:
    return torch.arange(5)[None, :] < x[:, None] + more


def test_what_is_made_alike_is_equal() -> None:
    assert _are_equal(lambda x: (_mask(x), _mask(x)))
    assert _are_equal(lambda x: (x.split([1, 1])[1], x.split([1, 1])[1]))


def _written(x: Tensor) -> tuple[Tensor, Tensor]:
    one = _mask(x)
    x.add_(1)
    return one, _mask(x)


def _written_afterwards(x: Tensor) -> tuple[Tensor, Tensor]:
    one, other = _mask(x), _mask(x)
    other[0] = True
    return one, other


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (_mask(x), _mask(x, 1)),
        lambda x: (_mask(x), ~_mask(x)),
        lambda x: (_mask(x), _mask(x)[:, :4]),
        lambda x: (x.split([1, 1])[0], x.split([1, 1])[1]),
        lambda x: (x.float() * 1, x.float() * 1.0 + 0),
        lambda x: (torch.rand_like(x.float()), torch.rand_like(x.float())),
        lambda x: (x < torch.rand(2), x < torch.rand(2)),
        _written,
        _written_afterwards,
    ],
)
def test_what_is_made_otherwise_or_written_is_not(function: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    assert not _are_equal(function)
