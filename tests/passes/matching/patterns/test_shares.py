"""What a product of a few numbers of each query is, as a quotient of exponentials."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sympy
import torch

from attn_compiler.passes.graph import axes, views
from attn_compiler.passes.matching.patterns import shares
from attn_compiler.passes.matching.patterns.shares import QueryNumbers
from tests.passes.compiling import mirror_of

Tensor = torch.Tensor
X, Y = shares.X, sympy.Symbol("exp of arg1_1", positive=True)
SHAPE = (2, 3, 5)

QUOTIENTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], object]] = {
    "sigmoid": (lambda lse, s: torch.sigmoid(lse - s), X / (X + Y)),
    "of twice": (lambda lse, s: torch.sigmoid((lse - s) * 2), X**2 / (X**2 + Y**2)),
    "sum": (lambda lse, s: 2 + torch.exp(lse + s), 2 + X * Y),
    "halves": (lambda lse, s: torch.tanh(lse / 2), (X - 1) / (X + 1)),
    "a third": (lambda lse, s: torch.exp(lse / 3), None),
    "floored": (lambda lse, s: torch.div(lse.exp(), s, rounding_mode="floor"), None),
    "scaled sum": (lambda lse, s: torch.exp(torch.sub(lse, s, alpha=2)), None),
    "unknown": (lambda lse, s: torch.erf(lse) - s, None),
}


@pytest.mark.parametrize("name", QUOTIENTS)
def test_is_this_quotient(name: str) -> None:
    function, wanted = QUOTIENTS[name]
    mirror = mirror_of(function, torch.randn(SHAPE), torch.randn(3, 1))
    lse = next(node for node in mirror.graph.nodes if node.op == "placeholder")
    (result,) = next(node for node in mirror.graph.nodes if node.op == "output").all_input_nodes
    reading = shares.Reading(
        mirror, {lse: QueryNumbers(of=(X,), dims=axes.fresh(axes.shape_exprs(views.value(lse))), power=1.0)}
    )
    value = reading.value(result)
    if wanted is None:
        assert value is None
    else:
        assert value is not None
        assert value.power is None
        assert sympy.simplify(value.of[0] - wanted) == 0
