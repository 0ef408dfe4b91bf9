"""What follows from other parts of a junction, and what all of its parts have in them."""

from __future__ import annotations

import pytest

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Apply, Const, Index, Load, junctions

Q, K = Index("q"), Index("k")
A, B_, C = (Load(name, (Q, K), "bool") for name in "abc")


@pytest.mark.parametrize(("op", "offset"), [("and", 1), ("or", 3)])
def test_the_bound_that_decides_stays(op: str, offset: int) -> None:
    bounds = [ix.compare("<=", K, ix.add(Q, Const(n))) for n in (3, 1, 2)]
    assert junctions.strongest(op, [*bounds, A]) == [A, ix.compare("<=", K, ix.add(Q, Const(offset)))]


@pytest.mark.parametrize("op", ["and", "or"])
def test_a_part_that_another_one_implies_goes(op: str) -> None:
    other = Apply(junctions.OTHER[op], (A, B_))
    assert junctions.without_implied(op, [A, other, C]) == [A, C]
    assert junctions.without_implied(op, [other, C]) == [other, C]


@pytest.mark.parametrize("op", ["and", "or"])
def test_what_each_part_has(op: str) -> None:
    other = junctions.OTHER[op]
    assert junctions.in_each(op, [Apply(other, (A, B_)), Apply(other, (B_, C))]) == [B_]
    assert junctions.in_each(op, [Apply(other, (A, B_)), B_]) == [B_]
    assert junctions.in_each(op, [Apply(other, (A, B_)), C]) == []
    assert junctions.in_each(op, [Apply(other, (A, B_))]) == []
    assert junctions.joined(op, Apply(op, (A, B_))) == (Apply(op, (A, B_)),)
