"""How far numbers go: no value of random expressions is outside, with what is read between 0 and 1."""

from __future__ import annotations

import itertools
import math

import pytest

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Apply, Const, Expr, Index, Linear, Load
from attn_compiler.index_expr.reach import Reach, is_known, reach

Q, K = Index("q"), Index("k")
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
