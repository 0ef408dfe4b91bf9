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


_AHEAD = ix.add(Index("q"), Index("k"), -1)


@pytest.mark.parametrize(
    ("op", "parts", "left"),
    [
        ("or", ((">", 0), ("==", 0)), (">=", 0)),
        ("or", ((">=", 0), ("==", 0)), (">=", 0)),
        ("or", ((">=", 0), ("==", -1)), (">=", -1)),
        ("or", (("<=", 0), ("==", 1)), ("<=", 1)),
        ("and", ((">=", 0), ("!=", 0)), (">", 0)),
        ("and", ((">=", 0), ("!=", -3)), (">=", 0)),
        ("and", (("<", 4), ("!=", 3)), ("<", 3)),
        ("or", ((">=", 0), ("==", -2)), None),
        ("and", ((">=", 0), ("!=", 2)), None),
        ("and", ((">=", 0), ("==", 2)), None),
        ("or", ((">=", 0), ("!=", -2)), None),
    ],
)
def test_a_single_value_beside_a_bound(
    op: str, parts: tuple[tuple[str, int], ...], left: tuple[str, int] | None
) -> None:
    """In either order, and where one comes to a junction that is there."""
    own = [ix.compare(relation, _AHEAD, Const(number)) for relation, number in parts]
    wanted = None if left is None else ix.compare(left[0], _AHEAD, Const(left[1]))
    other = ix.compare("<", Index("h"), Const(2))
    for one, two in (own, own[::-1]):
        joined = ix.apply(op, one, two)
        assert joined == wanted if wanted is not None else isinstance(joined, Apply)
        assert ix.apply(op, ix.apply(op, other, one), two) == ix.apply(op, other, joined)
