"""What of an additive term masks, and what it adds: the sum of both is the term, by its meaning."""

from __future__ import annotations

import math

import pytest

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr, Index, Load
from attn_compiler.passes.recovering.added import Summand, split, total

B, Q, K = map(Index, "bqk")
CAUSAL = ix.compare("<=", K, Q)
BIAS = Load("bias", (B, Q, K), "float")
LOWEST = -3.4028234663852886e38


def masked(fill: float, condition: Expr = CAUSAL) -> Expr:
    """0 where the condition holds, and the fill elsewhere."""
    return ix.where(condition, Const(0.0), Const(fill))


@pytest.mark.parametrize("fill", [-math.inf, LOWEST, -1e9, -65504.0])
def test_a_fill_masks_and_nothing_is_left_to_add(fill: float) -> None:
    found = split(masked(fill))
    assert (found.allowed, found.added, found.fills) == (CAUSAL, (), {fill})


def test_a_number_that_is_no_fill_is_added() -> None:
    term = masked(-1e4)
    assert (split(term).allowed, split(term).added) == (ix.TRUE, (Summand(value=term),))


def test_the_weight_counts_for_what_masks_and_for_what_is_added() -> None:
    found = split(ix.add(masked(-1e9), BIAS), 0.5)
    assert found.allowed == CAUSAL
    assert found.fills == {-5e8}
    assert found.added == (Summand(value=BIAS, weight=0.5),)
    # Turned round, the fill is the highest number instead of the lowest.
    assert split(masked(-1e9), -1.0).allowed == ix.TRUE


def test_factors_are_read_through() -> None:
    assert split(ix.apply("div", BIAS, Const(4.0))).added == (Summand(value=BIAS, weight=0.25),)
    assert split(ix.mul(BIAS, Const(3.0)), 2.0).added == (Summand(value=BIAS, weight=6.0),)


def test_a_number_for_all_keys_masks_none_of_them() -> None:
    found = split(Const(-math.inf))
    assert (found.allowed, found.added, found.fills) == (ix.TRUE, (Summand(value=Const(-math.inf)),), frozenset())
    assert split(ix.add(BIAS, Const(-1e9))).allowed == ix.TRUE


def test_what_scores_or_other_summands_undo_masks_nothing() -> None:
    term = ix.add(masked(-65504.0), ix.mul(Const(7e4), ix.as_float(ix.compare("<=", K, Const(3)))))
    assert split(masked(-65504.0), scores_up_to=40000.0).allowed == ix.TRUE
    assert split(masked(-65504.0), scores_up_to=30.0).allowed == CAUSAL
    assert split(term).allowed == ix.TRUE
    assert total(split(term).added) == term


def test_summands_are_one_expression_again() -> None:
    parts = (Summand(value=BIAS, weight=2.0), Summand(value=Const(1.5)))
    assert total(parts) == ix.add(ix.mul(BIAS, Const(2.0)), Const(1.5))
    assert total(()) == Const(0.0)
