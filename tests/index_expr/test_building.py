"""No rule of the builders changes a meaning: random expressions against the trees that nothing has simplified."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import assume, given, settings, strategies as st

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr, Index, Load
from tests.index_expr.expressions import Tree, bools, element, floats, ints, is_same, points

B, H, Q, K = map(Index, "bhqk")
MANY = settings(max_examples=400, deadline=None)


def _value(x: Expr, point: Mapping[str, int]) -> Any:
    return ix.evaluate(x, point, element)


def _wanted(tree: Tree, point: Mapping[str, int]) -> Any:
    """The oracle's value. What has none, such as a NaN as a whole number, is no example."""
    try:
        return tree.value(point)
    except (ValueError, OverflowError):
        assume(False)


@MANY
@given(st.one_of(bools(), ints(), floats()), points())
def test_what_is_built_means_what_was_asked_for(tree: Tree, point: dict[str, int]) -> None:
    wanted = _wanted(tree, point)
    built = tree.build()
    assert is_same(_value(built, point), wanted), ix.text(built)
    assert ix.kind_of(built) == tree.kind


@MANY
@given(bools(), points())
def test_a_negation_is_false_where_its_condition_holds(tree: Tree, point: dict[str, int]) -> None:
    wanted = _wanted(tree, point)
    inverted = ix.invert(tree.build())
    assert _value(inverted, point) is (not wanted)
    assert ix.invert(ix.invert(tree.build())) == tree.build()


@MANY
@given(st.one_of(bools(2), ints(2), floats(2)), ints(1), points())
def test_substitution_is_evaluation_at_another_place(tree: Tree, by: Tree, point: dict[str, int]) -> None:
    wanted = _wanted(tree, {**point, "q": _wanted(by, point)})
    moved = ix.substitute(tree.build(), Q, by.build())
    assert is_same(_value(moved, point), wanted)


@MANY
@given(st.one_of(bools(2), ints(2), floats(2)))
def test_building_again_changes_nothing(tree: Tree) -> None:
    built = tree.build()
    assert ix.substitute(built, Index("nowhere"), ix.ZERO) == built


PADDING = Load("mask", (B, K), "int")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (ix.compare("<=", K, Q), ix.invert(ix.compare(">", K, Q))),
        (ix.compare("<=", K, Q), ix.compare("<", K, ix.add(Q, ix.ONE))),
        (ix.compare("<=", K, Q), ix.compare(">=", ix.add(Q, K, -1), ix.ZERO)),
        (ix.compare("<=", ix.mul(K, Const(2)), ix.add(ix.mul(Q, Const(2)), ix.ONE)), ix.compare("<=", K, Q)),
        (ix.compare("==", ix.mul(K, Const(-2)), ix.mul(Q, Const(-2))), ix.compare("==", Q, K)),
        (ix.compare("==", ix.mul(K, Const(2)), ix.add(ix.mul(Q, Const(2)), ix.ONE)), ix.FALSE),
        (ix.apply("and", ix.compare("<=", K, Q), ix.compare("<=", K, ix.add(Q, ix.ONE))), ix.compare("<=", K, Q)),
        (ix.apply("or", ix.compare("<=", K, Q), ix.compare("<=", K, ix.add(Q, ix.ONE))), ix.compare("<=", K, ix.add(Q, ix.ONE))),
        (ix.apply("or", ix.compare("<=", K, Q), ix.compare(">", K, Q)), ix.TRUE),
        (ix.apply("and", ix.as_bool(PADDING), ix.compare("==", PADDING, ix.ZERO)), ix.FALSE),
        (
            ix.apply("or", ix.as_bool(PADDING), ix.apply("and", ix.as_bool(PADDING), ix.compare("<=", K, Q))),
            ix.as_bool(PADDING),
        ),
        (ix.as_bool(ix.apply("float", ix.compare("<=", K, Q))), ix.compare("<=", K, Q)),
        (ix.compare("==", ix.add(ix.as_int(ix.compare("<=", K, Q)), ix.ONE), Const(2)), ix.compare("<=", K, Q)),
        (ix.where(ix.compare("==", Q, Const(3)), Q, Const(3)), ix.where(ix.compare("==", Q, Const(3)), Const(3), Const(3))),
        (ix.apply("xor", PADDING, PADDING), ix.FALSE),
        (ix.as_bool(ix.mul(PADDING, Q)), ix.apply("and", ix.as_bool(PADDING), ix.as_bool(Q))),
        (ix.compare("==", ix.mul(PADDING, Q), ix.ZERO), ix.invert(ix.as_bool(ix.mul(PADDING, Q)))),
    ],
)  # fmt: skip
def test_spellings_of_one_mask_meet(one: Expr, other: Expr) -> None:
    assert one == other


@pytest.mark.parametrize("op", ["floordiv", "mod"])
def test_a_division_by_zero_is_not_done_while_compiling(op: str) -> None:
    assert ix.apply(op, ix.ONE, ix.ZERO) == ix.Apply(op, (ix.ONE, ix.ZERO))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_whole_number_is_not_made_one_while_compiling(value: float) -> None:
    assert ix.apply("int", Const(value)) == ix.Apply("int", (Const(value),))


M = Load("m", (Index("k"),), "int")


@pytest.mark.parametrize(
    ("inverted", "shown"),
    [
        (ix.add(Const(1.0), ix.apply("float", M), -1), "m[k] = 1"),
        (ix.add(ix.apply("float", M), Const(-1.0)), "m[k] = 1"),
        (ix.mul(ix.apply("float", M), Const(-1)), "m[k] = 0"),
        (ix.add(Const(1.0), Load("x", (K,), "float"), -1), "(x[k] = 1)"),
        (ix.add(Const(1.0), ix.apply("rounded", M), -1), "m[k] = 1"),
        (ix.add(Const(300.0), ix.apply("rounded", M), -1), "(float(m[k]) = 300)"),
        (ix.add(Const(1e-30), ix.apply("float", M), -1), "((1e-30 + float(-m[k])) = 0)"),
        (ix.add(Const(0.5), ix.apply("float", M), -1), "((0.5 + float(-m[k])) = 0)"),
    ],
)
def test_a_difference_is_zero_where_both_sides_are_equal(inverted: Expr, shown: str) -> None:
    assert ix.text(ix.compare("==", inverted, Const(0.0))) == shown
    assert ix.text(ix.invert(ix.as_bool(inverted))) == shown


def test_an_element_that_the_condition_fixes_is_a_number_in_its_branch() -> None:
    """Masks that transformers used to make: `x = 1 - m; x.masked_fill(x != 0, lowest)`."""
    x = ix.add(Const(1.0), ix.apply("rounded", M), -1)
    assert ix.text(ix.where(ix.as_bool(x), Const(-1e9), x)) == "(m[k] ≠ 1 ? -1e+09 : 0)"
    assert ix.text(ix.where(ix.compare("==", M, Const(3)), M, ix.ZERO)) == "(m[k] = 3 ? 3 : 0)"


WIDE = Load("m", (B, K), "int")
PADDED, LATER, FIRST = ix.compare("!=", WIDE, ix.ZERO), ix.compare(">", K, Q), ix.compare("==", K, ix.ZERO)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (ix.apply("and", ix.invert(LATER), ix.apply("or", LATER, PADDED)), ix.apply("and", ix.invert(LATER), PADDED)),
        (ix.apply("or", LATER, ix.apply("and", ix.invert(LATER), PADDED)), ix.apply("or", LATER, PADDED)),
        (
            ix.apply("or", FIRST, ix.apply("and", PADDED, ix.apply("or", ix.invert(FIRST), LATER))),
            ix.apply("or", FIRST, PADDED),
        ),
        (
            ix.apply("or", ix.apply("and", LATER, PADDED), ix.apply("and", LATER, FIRST)),
            ix.apply("and", LATER, ix.apply("or", PADDED, FIRST)),
        ),
        (
            ix.apply("and", ix.apply("or", LATER, PADDED), ix.apply("or", LATER, FIRST)),
            ix.apply("or", LATER, ix.apply("and", PADDED, FIRST)),
        ),
        (ix.apply("and", LATER, ix.apply("or", ix.invert(LATER), ix.apply("and", ix.invert(LATER), PADDED))), ix.FALSE),
    ],
    ids=["refuted", "settled", "refuted below", "common to both", "common to both alternatives", "nothing left"],
)
def test_what_the_other_parts_say_is_not_said_again(one: Expr, other: Expr) -> None:
    assert one == other


def test_choices_by_one_condition_are_multiplied_number_by_number() -> None:
    lowest, here = ix.where(LATER, Const(-3e38), Const(0.0)), ix.where(LATER, Const(1.0), Const(0.0))
    assert ix.mul(lowest, here) == lowest
    turned = ix.add(ix.where(ix.invert(LATER), Const(2.0), Const(5.0)), here)
    assert turned == ix.where(ix.invert(LATER), Const(2.0), Const(6.0))
    other = ix.where(FIRST, Const(1.0), Const(0.0))
    assert {LATER, FIRST} <= {part.args[0] for part in ix.parts(ix.mul(lowest, other)) if isinstance(part, ix.Apply)}


def test_no_whole_number_is_float32s_lowest() -> None:
    rounded, lowest = ix.apply("rounded", WIDE), Const(-3.4028234663852886e38)
    assert ix.compare("==", rounded, lowest) == ix.FALSE
    assert ix.compare("==", ix.apply("float", WIDE), lowest) == ix.FALSE
    # 2**64 - 1 is rounded up to 2**64, and in half precision to infinity.
    assert ix.compare("==", rounded, Const(2.0**64)) != ix.FALSE
    assert ix.compare("==", rounded, Const(float("inf"))) != ix.FALSE


def test_a_choice_within_a_choice_of_the_same_number_is_one() -> None:
    """Masked twice, by two conditions."""
    lowest, nothing = Const(-3e38), Const(0.0)
    inner = ix.where(PADDED, nothing, lowest)
    assert ix.where(LATER, lowest, inner) == ix.where(ix.apply("or", LATER, ix.invert(PADDED)), lowest, nothing)
    assert ix.where(LATER, ix.where(FIRST, nothing, lowest), lowest) == ix.where(
        ix.apply("and", LATER, FIRST), nothing, lowest
    )
    assert ix.where(LATER, lowest, ix.where(FIRST, lowest, nothing)) == ix.where(
        ix.apply("or", LATER, FIRST), lowest, nothing
    )
