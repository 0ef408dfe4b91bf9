"""Which nodes are products of two tensors, over which axes, and which sums add up several nodes and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from attn_compiler.passes.spelling import products
from attn_compiler.passes.spelling.products import Product
from tests.passes.compiling import captured

LEFT, RIGHT = (2, 3, 4, 5), (2, 3, 5, 6)


def _last(function: Callable[..., Tensor], *tensors: Tensor) -> fx.Node:
    gm, _ = captured(lambda *given: function(*given).cos(), *tensors)
    (cos,) = (node for node in gm.graph.nodes if getattr(node.target, "__name__", node.target) == "cos")
    return cos.all_input_nodes[0]


def _read(
    function: Callable[[Tensor, Tensor], Tensor], left: tuple[int, ...], right: tuple[int, ...]
) -> Product | None:
    return products.read(_last(function, torch.randn(left), torch.randn(right)))


@pytest.mark.parametrize(
    ("function", "right", "axes"),
    [
        (lambda a, b: a @ b, RIGHT, (-1, -2, -1)),
        (torch.matmul, RIGHT, (-1, -2, -1)),
        (lambda a, b: a.matmul(b), RIGHT, (-1, -2, -1)),
        (lambda a, b: torch.einsum("bhid,bhjd->bhij", a, b), (2, 3, 7, 5), (-2, -1, -1)),
        (lambda a, b: torch.einsum("b h i d, b j h d -> b h i j", a, b), (2, 7, 3, 5), (-3, -1, -1)),
        (lambda a, b: torch.einsum("bihd,bhjd->bhij", a, b), (2, 4, 7, 5), (-2, -1, -1)),
        (lambda a, b: torch.einsum("bhdi,bhdj->bhij", a, b), (2, 3, 4, 7), (-1, None, -2)),
        (lambda a, b: torch.einsum("bhid,bhjd->bhji", a, b), (2, 3, 7, 5), (None, -1, -1)),
    ],
)
def test_a_product(
    function: Callable[[Tensor, Tensor], Tensor], right: tuple[int, ...], axes: tuple[int | None, ...]
) -> None:
    product = _read(function, LEFT, right)
    assert product is not None
    assert (product.free, product.summed, product.left_summed) == axes
    a, b = torch.randn(LEFT), torch.randn(right)
    torch.testing.assert_close(product.of(a, b), function(a, b))


@pytest.mark.parametrize(
    ("function", "right"),
    [
        (lambda a, b: a * b[..., :1, :5], RIGHT),
        (lambda a, b: torch.einsum("...id,...jd->...ij", a, b), (2, 3, 7, 5)),
        (lambda a, b: torch.einsum("bhid,bhjd", a, b), (2, 3, 7, 5)),
        (lambda a, b: torch.einsum("bhid,bhjd->bij", a, b), (2, 3, 7, 5)),
        (lambda a, b: torch.einsum("bhid,bhjk->bhij", a, b), (2, 3, 7, 5)),
        (lambda a, b: torch.einsum("bhid,bhjd->bhijd", a, b), (2, 3, 7, 5)),
        (lambda a, b: torch.tensordot(a, b, 1), (5, 6)),
        (lambda a, b: a @ b, (5,)),
    ],
)
def test_what_is_none(function: Callable[[Tensor, Tensor], Tensor], right: tuple[int, ...]) -> None:
    assert _read(function, LEFT, right) is None


def _sums(function: Callable[..., Tensor]) -> tuple[fx.Node | None, fx.Node]:
    """The sum of three sines, and the result."""
    last = _last(lambda a, b, c: function(a.sin(), b.sin(), c.sin()), *(torch.randn(4) for _ in range(3)))
    nodes = [n for n in last.graph.nodes if getattr(n.target, "__name__", n.target) == "sin"]
    return products.summed_up(nodes)[0], last


@pytest.mark.parametrize(
    "function", [lambda a, b, c: a + b + c, lambda a, b, c: a + (c + b), lambda a, b, c: torch.add(b, c).add_(a)]
)
def test_a_sum_of_all(function: Callable[..., Tensor]) -> None:
    own, last = _sums(function)
    assert own is last


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b, c: a + b - c,
        lambda a, b, c: torch.add(a + b, c, alpha=2),
        lambda a, b, c: a + b + c.tan(),
        lambda a, b, c: (a + b) * (a + c),
        lambda a, b, c: a + a + b + c,
    ],
)
def test_other_sums(function: Callable[..., Tensor]) -> None:
    assert _sums(function)[0] is None
