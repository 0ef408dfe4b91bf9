"""Comparisons of whole numbers and floats with each other: what they become, and that each means what it did."""

from __future__ import annotations

import math
import operator

import pytest
from hypothesis import given, settings, strategies as st

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr, Index, Load

Q, K = Index("q"), Index("k")
OPS = {"<=": operator.le, "<": operator.lt, ">=": operator.ge, ">": operator.gt, "==": operator.eq, "!=": operator.ne}
NUMBERS = st.sampled_from([-math.inf, -2.5, -1.0, -0.0, 0.5, 1.0, 2.0, 2.75, 1e30, math.inf, math.nan])


@settings(deadline=None)
@given(st.sampled_from(sorted(OPS)), NUMBERS, st.integers(0, 4), st.booleans())
def test_a_whole_number_against_a_float(op: str, number: float, q: int, turned: bool) -> None:
    sides: list[Expr] = [ix.as_float(Q), Const(number)]
    wanted = OPS[op](q, number)
    if turned:
        sides.reverse()
        wanted = OPS[op](number, q)
    found = ix.compare(op, *sides)
    assert ix.evaluate(found, {"q": q}, lambda *_: None) is wanted
    assert isinstance(found, ix.Test | Const)


def test_positions_as_floats_are_compared_as_whole_numbers() -> None:
    assert ix.compare("<=", ix.as_float(K), ix.as_float(Q)) == ix.compare("<=", K, Q)
    apart = ix.add(ix.as_float(Q), ix.as_float(K), -1)
    assert ix.compare("<", apart, Const(2.5)) == ix.compare("<=", ix.add(Q, K, -1), Const(2))


def test_truth_values_are_compared_as_numbers() -> None:
    flag = Load("flag", (K,), "bool")
    assert ix.compare("==", flag, Const(1.0)) == flag
    assert ix.compare("<", flag, ix.TRUE) == ix.invert(flag)
    assert ix.compare("==", ix.TRUE, Const(1.0)) == ix.TRUE


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("a", "b"), [(math.nan, 1.0), (1.0, 2.0), (2.0, 1.0), (1.0, 1.0), (math.inf, math.nan)])
def test_floats_of_tensors(op: str, a: float, b: float) -> None:
    found = ix.compare(op, Load("x", (Q,), "float"), Load("y", (Q,), "float"))
    assert ix.evaluate(found, {"q": 0}, lambda name, _: {"x": a, "y": b}[name]) is OPS[op](a, b)


def test_comparisons_of_floats_with_nan_are_not_turned_round() -> None:
    x, y = Load("x", (Q,), "float"), Load("x", (K,), "float")
    assert ix.invert(ix.compare("<", x, y)) != ix.compare(">=", x, y)


def test_a_sum_with_a_choice_is_compared_in_each_branch() -> None:
    """transformers 4.57 adds the padding mask to a causal mask, and looks where that gives zero."""
    later, padding = ix.compare(">", Index("k"), Index("q")), Load("m", (Index("b"), Index("k")), "int")
    total = ix.add(ix.where(later, Const(-3e38), Const(0.0)), ix.apply("rounded", padding))
    asked = ix.compare("==", total, Const(0.0))
    assert asked == ix.apply("and", ix.invert(later), ix.compare("==", padding, ix.ZERO))


def test_a_sum_with_a_whole_number_equals_only_what_it_can_reach() -> None:
    """A row of ids may hold any number of int64."""
    later, ids = ix.compare(">", Index("k"), Index("q")), Load("ids", (Index("b"), Index("k")), "int")
    for fill, is_settled in ((-3e38, True), (-1e20, True), (-1e18, False), (-65504.0, False)):
        total = ix.add(ix.where(later, Const(fill), Const(0.0)), ix.apply("rounded", ids))
        asked = ix.compare("==", total, Const(0.0))
        assert (asked == ix.apply("and", ix.invert(later), ix.compare("==", ids, ix.ZERO))) is is_settled
