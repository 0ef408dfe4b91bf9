"""What ranges settle is settled for every index in them: each place of random sizes is looked at."""

from __future__ import annotations

import itertools

from hypothesis import assume, given, settings, strategies as st

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Index, Linear, Size
from attn_compiler.index_expr.ranges import LOADED, LOADED_KEY, MADE_OF_FLOAT
from tests.index_expr.expressions import Tree, bools, element, ints

MANY = settings(max_examples=200, deadline=None)
RANGES = {"q": ix.combine(Linear(((Size("s0"), 1),)), Linear((), 1), -1), "k": Linear(((Size("s1"), 1),), -1)}
#: of a length that is a quotient of a symbol, and one that is a product
MADE_OF = {
    "q": Linear(((ix.apply("floordiv", Size("s0"), ix.Const(2)), 1),), -1),
    "k": Linear(((ix.mul(Size("s0"), Size("s1")), 1),), -1),
}
Q, K = Index("q"), Index("k")


def _places(s0: int, s1: int, longest: tuple[int, int] | None = None) -> list[dict[str, int]]:
    queries, keys = longest or (s0, s1)
    return [
        {"b": b, "h": h, "q": q, "k": k, "s0": s0, "s1": s1}
        for b, h, q, k in itertools.product((0, 3), (0, 1), range(queries), range(keys))
    ]


@MANY
@given(bools(2), st.integers(1, 4), st.integers(1, 4))
def test_decided_means_the_same_in_the_ranges(tree: Tree, s0: int, s1: int) -> None:
    x = tree.build()
    for ranges, longest in ((RANGES, (s0, s1)), (MADE_OF, (s0 // 2, s0 * s1))):
        decided = ix.decide(x, ranges)
        for place in _places(s0, s1, longest):
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


def test_an_index_stays_below_what_it_counts_to_whatever_that_is_made_of() -> None:
    for name, most in MADE_OF.items():
        index, last = Index(name), ix.add(most, ix.ZERO)
        assert ix.decide(ix.compare("<=", index, last), MADE_OF) == ix.TRUE
        assert ix.decide(ix.compare("<", last, index), MADE_OF) == ix.FALSE
        assert ix.decide(ix.compare("<", index, last), MADE_OF) not in (ix.TRUE, ix.FALSE)
    assert ix.bounds(ix.mul(Size("s0"), Size("s1")), {}) == (1, None)


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


LOADED_X = Linear((), 9)


def test_what_is_loaded_lies_in_its_range() -> None:
    x = ix.Load("x", (K,), "int")
    ranges = {**RANGES, LOADED_KEY.format("x"): LOADED_X}
    assert ix.bounds(x, RANGES) == (None, None)
    assert ix.bounds(x, ranges) == (-10, 9)
    assert ix.bounds(ix.add(ix.mul(x, ix.Const(-2)), ix.ONE), ranges) == (-17, 21)
    assert ix.bounds(ix.apply("int", ix.Load("y", (K,), "float")), {MADE_OF_FLOAT: LOADED_X}) == (-10, 9)


def test_products_lie_between_those_of_the_ends() -> None:
    x = ix.Load("x", (K,), "int")
    short = {"q": Linear((), 5), "k": Linear((), 7), LOADED_KEY.format("x"): LOADED_X}
    assert ix.bounds(ix.mul(Q, K), short) == (0, 35)
    assert ix.bounds(ix.mul(ix.add(Q, ix.Const(-3)), K), short) == (-21, 14)
    assert ix.bounds(ix.mul(x, x), short) == (-90, 100)
    assert ix.bounds(ix.mul(x, K), {**RANGES, "k": Linear((), 7)}) == (None, None)


def test_a_product_of_two_loads_of_64_bits_fits_them() -> None:
    x, y = (ix.Load(name, (K,), "int") for name in "xy")
    ranges = {LOADED_KEY.format(name): Linear((), LOADED) for name in "xy"}
    assert ix.bounds(x, ranges) == (-LOADED - 1, LOADED)
    low, high = ix.bounds(ix.mul(x, y), ranges)
    assert low is not None
    assert high is not None
    assert -(2**63) <= low < 0 < high < 2**63
    # What may be all that 64 bits hold is no such number.
    _, high = ix.bounds(ix.mul(x, y), ranges | {LOADED_KEY.format("x"): Linear((), 2**63 - 1)})
    assert high is not None
    assert high >= 2**63
