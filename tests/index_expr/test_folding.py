from __future__ import annotations

import math

import pytest

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr, Index, Load
from attn_compiler.index_expr.folding import EXACT_IN_EVERY_DTYPE, choice_of_numbers, has_value, may_hold, pinned_by

Q, K = Index("q"), Index("k")
LENGTH = Load("length", (), "int")


@pytest.mark.parametrize(
    ("op", "values", "expected"),
    [
        ("floordiv", [7, 2], True),
        ("floordiv", [7, 0], False),
        ("mod", [7, 0], False),
        ("mod", [math.inf, 2], False),
        ("int", [2.5], True),
        ("int", [math.nan], False),
        ("int", [math.inf], False),
        ("rounded", [EXACT_IN_EVERY_DTYPE], True),
        ("rounded", [EXACT_IN_EVERY_DTYPE + 1], False),
        ("rounded", [0.5], False),
        ("div", [1.0, 2.0], False),
        ("exp", [0.0], False),
        ("min", [1, 2], True),
    ],
)
def test_what_is_nobodys_value_is_not_computed_while_compiling(op: str, values: list[float], expected: bool) -> None:
    assert has_value(op, list(values)) is expected


def test_a_choice_between_numbers_is_seen() -> None:
    later = ix.compare(">", K, Q)
    assert choice_of_numbers(ix.where(later, Const(1.5), Const(0.0))) == (later, Const(1.5), Const(0.0))
    assert choice_of_numbers(ix.where(later, ix.as_float(K), Const(0.0))) is None
    assert choice_of_numbers(Q) is None


@pytest.mark.parametrize(
    ("condition", "what", "expected"),
    [
        (ix.compare("==", Q, Const(3)), Index, (Q, Const(3))),
        (ix.compare("==", LENGTH, Const(3)), Load, (LENGTH, Const(3))),
        (ix.compare("==", LENGTH, Const(3)), Index, None),
        (ix.compare("!=", Q, Const(3)), Index, None),
        (ix.compare("==", Q, K), Index, None),
    ],
)
def test_a_condition_may_fix_one_name(
    condition: Expr, what: type[Index | Load], expected: tuple[Expr, Expr] | None
) -> None:
    assert pinned_by(condition, what) == expected


def test_what_surely_is_not_in_an_expression() -> None:
    inside = ix.add(Q, LENGTH)
    assert may_hold(inside, Q)
    assert may_hold(inside, LENGTH)
    assert not may_hold(inside, K)
    assert not may_hold(Q, inside)
    assert not may_hold(Q, LENGTH)
