"""What ranges settle is settled for every index in them: each place of random sizes is looked at."""

from __future__ import annotations

import itertools

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Index, Linear, Size
from tests.index_expr.expressions import Tree, bools, element, ints

MANY = settings(max_examples=200, deadline=None)
RANGES = {"q": ix.combine(Linear(((Size("s0"), 1),)), Linear((), 1), -1), "k": Linear(((Size("s1"), 1),), -1)}
Q, K = Index("q"), Index("k")


def _places(s0: int, s1: int) -> list[dict[str, int]]:
    return [
        {"b": b, "h": h, "q": q, "k": k, "s0": s0, "s1": s1}
        for b, h, q, k in itertools.product((0, 3), (0, 1), range(s0), range(s1))
    ]


@MANY
@given(bools(2), st.integers(1, 4), st.integers(1, 4))
def test_decided_means_the_same_in_the_ranges(tree: Tree, s0: int, s1: int) -> None:
    x = tree.build()
    decided = ix.decide(x, RANGES)
    for place in _places(s0, s1):
        try:
            wanted = ix.evaluate(x, place, element)
        except (ValueError, OverflowError):
            assume(False)
        assert ix.evaluate(decided, place, element) is wanted


@MANY
@given(ints(2), st.integers(1, 4), st.integers(1, 4))
def test_no_place_is_outside_of_the_bounds(tree: Tree, s0: int, s1: int) -> None:
    x = tree.build()
    low, high = ix.bounds(x, RANGES)
    for place in _places(s0, s1):
        try:
            value = ix.evaluate(x, place, element)
        except (ValueError, OverflowError):
            assume(False)
        assert low is None or low <= value
        assert high is None or value <= high


def test_a_comparison_that_always_holds_is_true() -> None:
    last = ix.compare("<", K, Size("s1"))
    assert ix.decide(ix.apply("and", last, ix.compare("<=", K, Q)), RANGES) == ix.compare("<=", K, Q)
    assert ix.decide(ix.compare("<", K, Size("s0")), RANGES) == ix.compare("<", K, Size("s0"))
    assert ix.decide(ix.compare("==", K, ix.Const(-1)), RANGES) == ix.FALSE
    assert ix.decide(ix.compare("!=", K, Size("s1")), RANGES) == ix.TRUE


def test_bounds_of_what_is_more_than_a_sum() -> None:
    distance = ix.apply("abs", ix.add(Q, K, -1))
    assert ix.lower_bound(distance) == 0
    fixed = {"q": Linear((), 7), "k": Linear((), 4)}
    assert ix.bounds(distance, fixed) == (0, 7)
    assert ix.bounds(ix.apply("min", distance, ix.Const(3)), {}) == (0, 3)
    assert ix.bounds(ix.apply("max", ix.add(Q, K, -1), ix.ZERO), {}) == (0, None)
    assert ix.bounds(ix.apply("mod", ix.add(Q, K, -1), ix.Const(3)), {}) == (0, 2)
    assert ix.bounds(ix.apply("floordiv", Q, ix.Const(2)), fixed) == (0, 3)
    assert ix.bounds(ix.as_int(ix.compare("<=", K, Q)), {}) == (0, 1)
    assert ix.bounds(ix.apply("float", Q), fixed) == (None, None)
