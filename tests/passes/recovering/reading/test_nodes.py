"""Sizes as expressions: sums of products of symbols, of quotients and of the larger or smaller of two; all else is not known."""

from __future__ import annotations

import pytest
import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import FloorDiv, Mod

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
        (A * B, ix.mul(S0, S1)),
        (A**2, ix.mul(S0, S0)),
        (2 * (A + 1) * B, ix.add(ix.mul(ix.mul(S0, S1), ix.Const(2)), S1, 2)),
        (FloorDiv(A + 3, 4), ix.apply("floordiv", ix.add(S0, ix.Const(3)), ix.Const(4))),
        (4 * FloorDiv(A, 16), ix.mul(ix.apply("floordiv", S0, ix.Const(16)), ix.Const(4))),
        (Mod(A, 4), ix.apply("mod", S0, ix.Const(4))),
        (3 + 2 * sympy.Max(0, A - 4), ix.add(ix.Const(3), ix.apply("max", ix.ZERO, ix.add(S0, ix.Const(-4))), 2)),
        (A / 2, None),
        (A**B, None),
        (sympy.sqrt(A), None),
        (sympy.Max(0, sympy.sqrt(A)), None),
    ],
)
def test_sizes(size: sympy.Expr, read: ix.Expr | None) -> None:
    assert nodes.size(size) == read


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
