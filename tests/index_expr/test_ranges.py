"""What values an expression can have, and which elements it reaches."""

from __future__ import annotations

import functools
import itertools
import math
import random
from typing import Any

import pytest
from hypothesis import assume, given, settings, strategies as st

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Apply, Const, Expr, Index, Linear, Load, Size, placing
from attn_compiler.index_expr.placing import beginning, place
from attn_compiler.index_expr.ranges import LOADED, LOADED_KEY, MADE_OF_FLOAT
from attn_compiler.index_expr.reach import Reach, is_known, reach
from tests.index_expr.expressions import Tree, bools, element, expressions, ints

# What ranges settle is settled for every index in them.
MANY = settings(max_examples=200, deadline=None)
RANGES = {"q": ix.combine(Linear(((Size("s0"), 1),)), Linear((), 1), -1), "k": Linear(((Size("s1"), 1),), -1)}
#: of a length that is a quotient of a symbol, and one that is a product
MADE_OF = {
    "q": Linear(((ix.apply("floordiv", Size("s0"), ix.Const(2)), 1),), -1),
    "k": Linear(((ix.mul(Size("s0"), Size("s1")), 1),), -1),
}
B, Q, K = map(Index, "bqk")


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
        for at in _places(s0, s1, longest):
            try:
                wanted = ix.evaluate(x, at, element)
            except (ValueError, OverflowError):
                assume(False)
            assert ix.evaluate(decided, at, element) is wanted


@MANY
@given(ints(2), st.integers(1, 4), st.integers(1, 4))
def test_no_place_is_outside_of_the_bounds(tree: Tree, s0: int, s1: int) -> None:
    x = tree.build()
    low, high = ix.bounds(x, RANGES)
    for at in _places(s0, s1):
        try:
            value = ix.evaluate(x, at, element)
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


# How far numbers go.
WITHIN = {"q": Linear((), 5), "k": Linear((), 7)}
LATER = ix.compare(">", K, Q)
MASK = Load("mask", (K,), "float")
AWAY = ix.as_float(ix.apply("abs", ix.add(Q, K, -1)))


def _sum(*parts: Expr) -> Expr:
    total: Expr = Const(0.0)
    for part in parts:
        total = ix.add(total, part)
    return total


PADDING = Load("padding", (K,), "int")

CASES = [
    (ix.mul(ix.as_float(ix.add(Const(1), PADDING, -1)), Const(1e9)), Reach(high=1e9)),
    (ix.mul(ix.as_float(ix.add(Const(1), PADDING, -1)), Const(-1e9)), Reach(low=-1e9)),
    (Const(-1e9), Reach(low=-1e9, high=-1e9)),
    (ix.where(LATER, Const(-1e9), Const(0.0)), Reach(low=-1e9)),
    (
        _sum(ix.where(LATER, Const(-1e9), Const(0.0)), ix.where(ix.compare("==", K, Q), Const(2e9), Const(0.0))),
        Reach(low=-1e9, high=2e9),
    ),
    (ix.mul(AWAY, Const(-0.5)), Reach(low=-3.5)),
    (Apply("max", (ix.mul(ix.as_float(ix.add(K, Const(-2))), Const(1e9)), Const(0.0))), Reach(high=5e9)),
    (Apply("abs", (ix.mul(ix.as_float(ix.add(K, Const(-2))), Const(2.0)),)), Reach(high=10.0)),
    (Apply("div", (AWAY, Const(-2.0))), Reach(low=-3.5)),
    (Apply("rounded", (AWAY,)), Reach(high=7.0)),
    # (1 - mask) · -1e9 and mask · 1e9 - 1e9 lift nothing, mask · 1e9 may.
    (ix.mul(ix.add(Const(1.0), ix.mul(MASK, Const(-1.0))), Const(-1e9)), Reach(low=-1e9)),
    (ix.add(ix.mul(MASK, Const(1e9)), Const(-1e9)), Reach(low=-1e9)),
    (ix.mul(MASK, Const(1e9)), Reach(high=1e9)),
    # Slopes that are read, times a position: as far as nothing is known, nothing.
    (ix.mul(MASK, AWAY), Reach()),
    (Apply("log", (MASK,)), Reach()),
]


@pytest.mark.parametrize(("x", "wanted"), CASES, ids=[ix.text(x, 40) for x, _ in CASES])
def test_how_far_numbers_go(x: Expr, wanted: Reach) -> None:
    found = reach(x, WITHIN)
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high))
    if not is_known(x):
        return
    for q, k in itertools.product(range(6), range(8)):
        assert found.low <= ix.evaluate(x, {"q": q, "k": k}, lambda *_: None) <= found.high


def test_infinities_of_both_signs_may_give_any_number() -> None:
    both = Reach(low=-math.inf, high=-math.inf).plus(Reach(low=math.inf, high=math.inf))
    assert both == Reach(low=-math.inf, high=math.inf)
    assert reach(Const(math.nan), {}) == Reach(low=-math.inf, high=math.inf)
    assert Reach().times(Reach(low=-math.inf, high=math.inf)) == Reach()


def test_a_number_is_known_whatever_it_is_chosen_by() -> None:
    by_mask = ix.where(ix.as_bool(MASK), Const(1e9), Const(0.0))
    assert is_known(by_mask)
    assert not is_known(ix.mul(MASK, Const(2.0)))
    assert not is_known(ix.where(LATER, MASK, Const(0.0)))


# Terms are put in order by how they are written, whatever their size, and alike terms stand at one place.
PLACING_MASK = Load("mask", (B, K), "int")
ONE_AXIS = Load("bounds", (Q,), "float")

EXPRESSIONS: dict[str, Expr] = {
    "index": Q,
    "constant": Const(-1.5),
    "size": ix.Size("s0"),
    "sum": ix.add(ix.add(ix.mul(Q, Const(3)), K), Const(-2)),
    "load": PLACING_MASK,
    "load of one axis": ONE_AXIS,
    "condition": ix.apply("and", ix.compare("<=", K, Q), ix.as_bool(PLACING_MASK)),
    "choice": ix.where(ix.compare("<=", K, Q), Const(0.0), Const(-1.0)),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
@pytest.mark.parametrize("most", [0, 1, 7, 10_000])
def test_a_beginning_is_what_python_writes(name: str, most: int) -> None:
    x = EXPRESSIONS[name]
    assert beginning(x, most) == str(x)[:most]


def test_a_place_depends_on_the_expression_alone() -> None:
    same = Load("mask", (Index("b"), Index("k")), "int")
    assert same is not PLACING_MASK
    assert place(same) == place(PLACING_MASK)
    assert len({place(x) for x in EXPRESSIONS.values()}) == len(EXPRESSIONS)


def test_sums_hold_their_terms_in_that_order_however_they_are_written() -> None:
    loads = [Load(name, (K,), "int") for name in ("c", "a", "b", "aa")]
    for seed in range(5):
        shuffled = random.Random(seed).sample(loads, len(loads))
        assert functools.reduce(ix.add, shuffled) == functools.reduce(ix.add, loads)


def _nested(inner: Expr, times: int) -> Expr:
    """As many nodes as there are steps, and 2 ** times words."""
    for _ in range(times):
        inner = Apply("minimum", (inner, inner))
    return inner


def test_a_large_expression_takes_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    written = placing._written
    monkeypatch.setattr(placing, "_written", lambda item: seen.append(item) or written(item))
    words, _ = place(_nested(ONE_AXIS, 200))
    assert len(words) == placing._FAR_ENOUGH
    assert len(seen) < placing._FAR_ENOUGH


def test_what_begins_alike_is_told_apart_by_its_end() -> None:
    one, other = (_nested(Load(name, (K,), "float"), 200) for name in ("one", "other"))
    assert place(one) != place(other)
    deep = [Apply("minimum", (_nested(ONE_AXIS, 100), end)) for end in (Q, K)]
    assert place(deep[0])[0] == place(deep[1])[0]
    assert place(deep[0]) != place(deep[1])


def test_it_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x = Load("once", (Q, K), "int")
    found = place(x)
    monkeypatch.setattr(placing, "beginning", None)
    assert place(x) == found


LOOKING_MASK, BIAS, FLAG = (
    Load("mask", (B, K), "int"),
    Load("bias", (Q,), "float"),
    Load("flag", (K,), "bool"),
)


def test_loads_come_outermost_first() -> None:
    inner = Load("order", (K,), "int")
    outer = Load("mask", (B, inner), "int")
    found = ix.apply("and", ix.as_bool(outer), ix.compare("<=", K, Q))
    assert list(ix.loads(found)) == [outer, inner]


def test_an_index_is_found_wherever_it_is() -> None:
    x = ix.apply("and", ix.as_bool(LOOKING_MASK), ix.compare("<=", ix.apply("abs", ix.add(K, ix.ONE)), Const(3)))
    assert ix.mentions(x, B)
    assert ix.mentions(x, K)
    assert not ix.mentions(x, Q)


@given(expressions())
def test_what_is_not_mentioned_can_be_anything(x: Expr) -> None:
    assert ix.mentions(x, Q) or ix.substitute(x, Q, Const(77)) == x


@pytest.mark.parametrize(
    ("x", "wanted"),
    [
        (FLAG, (FLAG, False)),
        (ix.invert(FLAG), (FLAG, True)),
        (ix.as_bool(LOOKING_MASK), (LOOKING_MASK, False)),
        (ix.invert(ix.as_bool(LOOKING_MASK)), (LOOKING_MASK, True)),
        (ix.as_bool(BIAS), (BIAS, False)),
        (ix.compare("==", BIAS, Const(0.0)), (BIAS, True)),
        (ix.compare("==", LOOKING_MASK, Const(1)), (ix.compare("==", LOOKING_MASK, Const(1)), False)),
        (ix.compare("<=", K, Q), (ix.compare("<=", K, Q), False)),
    ],
)
def test_what_a_condition_asks_of_a_tensor(x: Expr, wanted: tuple[Expr, bool]) -> None:
    assert ix.nonzero(x) == wanted


@pytest.mark.parametrize(
    ("x", "exact"),
    [
        (BIAS, True),
        (ix.mul(BIAS, Const(-1)), True),
        (ix.add(BIAS, Const(1.5)), False),
        (ix.mul(BIAS, Const(0.5)), False),
        (ix.compare("<", ix.add(BIAS, BIAS), Const(0.0)), False),
        (ix.where(FLAG, BIAS, Const(0.0)), True),
        (ix.apply("max", BIAS, Const(0.0)), True),
        (ix.apply("int", ix.apply("log", ix.apply("float", ix.add(Q, ix.ONE)))), False),
        (ix.apply("float", ix.add(Q, K, -1)), True),
        (ix.add(Q, LOOKING_MASK), True),
        (Load("table", (ix.apply("int", ix.apply("exp", BIAS)),), "float"), False),
    ],
)
def test_what_rounding_makes_a_difference_to(x: Expr, exact: bool) -> None:
    assert ix.is_exact(x) == exact


@pytest.mark.parametrize(
    ("x", "is_truth"),
    [
        (FLAG, True),
        (ix.as_float(FLAG), True),
        (ix.as_int(FLAG), True),
        (ix.add(ix.ONE, ix.as_int(FLAG), -1), True),
        (ix.where(ix.compare("<=", K, Q), Const(1.0), Const(0.0)), True),
        (ix.mul(ix.as_float(FLAG), ix.as_float(ix.compare("<=", K, Q))), True),
        (ix.where(FLAG, Const(1.0), Const(0.5)), False),
        (ix.add(ix.as_int(FLAG), ix.ONE), False),
        (ix.mul(ix.as_float(FLAG), Const(2.0)), False),
        (LOOKING_MASK, False),
        (BIAS, False),
    ],
)
def test_which_numbers_are_truth_values(x: Expr, is_truth: bool) -> None:
    assert ix.is_truth(x) == is_truth
