from __future__ import annotations

import pytest
from hypothesis import given

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr, Index, Load
from tests.index_expr.expressions import expressions

B, Q, K = map(Index, "bqk")
MASK, BIAS, FLAG = Load("mask", (B, K), "int"), Load("bias", (Q,), "float"), Load("flag", (K,), "bool")


def test_loads_come_outermost_first() -> None:
    inner = Load("order", (K,), "int")
    outer = Load("mask", (B, inner), "int")
    found = ix.apply("and", ix.as_bool(outer), ix.compare("<=", K, Q))
    assert list(ix.loads(found)) == [outer, inner]


def test_an_index_is_found_wherever_it_is() -> None:
    x = ix.apply("and", ix.as_bool(MASK), ix.compare("<=", ix.apply("abs", ix.add(K, ix.ONE)), Const(3)))
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
        (ix.as_bool(MASK), (MASK, False)),
        (ix.invert(ix.as_bool(MASK)), (MASK, True)),
        (ix.as_bool(BIAS), (BIAS, False)),
        (ix.compare("==", BIAS, Const(0.0)), (BIAS, True)),
        (ix.compare("==", MASK, Const(1)), (ix.compare("==", MASK, Const(1)), False)),
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
        (ix.add(Q, MASK), True),
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
        (MASK, False),
        (BIAS, False),
    ],
)
def test_which_numbers_are_truth_values(x: Expr, is_truth: bool) -> None:
    assert ix.is_truth(x) == is_truth
