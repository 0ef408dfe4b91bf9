"""Sizes as expressions: a combination of symbols by whole numbers, or the larger or smaller of such; all else is not known."""

from __future__ import annotations

import pytest
import sympy
import torch
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.passes.recovering.reading import nodes

A, B = sympy.symbols("s0 s1", integer=True, positive=True)
S0, S1 = ix.Size("s0"), ix.Size("s1")


@pytest.mark.parametrize(
    ("size", "read"),
    [
        (sympy.Integer(7), ix.Const(7)),
        (A, S0),
        (2 * A - 3, ix.add(ix.mul(S0, ix.Const(2)), ix.Const(-3))),
        (A - B, ix.add(S0, S1, -1)),
        (A * B, None),
        (A / 2, None),
        (A**2, None),
    ],
)
def test_plain_sizes(size: sympy.Expr, read: ix.Expr | None) -> None:
    assert nodes.size(size) == read
    assert nodes.whole_number(size) == read


def test_the_larger_of_sizes_is_no_plain_size() -> None:
    larger = sympy.Max(0, A - 4)
    assert nodes.size(larger) is None
    assert nodes.whole_number(larger) == ix.apply("max", ix.ZERO, ix.add(S0, ix.Const(-4)))
    assert nodes.whole_number(3 + 2 * larger) == ix.add(ix.Const(3), nodes.whole_number(larger), 2)
    assert nodes.whole_number(sympy.Max(0, A * B)) is None


@pytest.mark.parametrize(("dims", "found"), [((1,), 1), ((), -1)])
def test_the_axis_is_the_given_one_or_the_default(dims: tuple[int, ...], found: int) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops.aten.cumsum.default, (x, *dims))
    assert nodes.dim_of(node, -1) == found


def test_an_axis_that_is_no_number_is_the_default() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops.aten.cumsum.default, (x, graph.placeholder("axis")))
    assert nodes.dim_of(node) is None
