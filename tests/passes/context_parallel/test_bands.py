"""Distances that are bounded, as two bounds: the same pairs, and kinds that kernels know."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr, Index
from attn_compiler.passes.context_parallel import bands
from attn_compiler.passes.recovering import kinds
from attn_compiler.spec import masks

Q, K = Index("q"), Index("k")
SIZE = ix.linear(Const(12))


def _within(width: int, shift: int = 0) -> Expr:
    return ix.compare("<=", ix.apply("abs", ix.add(ix.add(Q, Const(shift)), K, -1)), Const(width))


@given(width=st.integers(0, 6), shift=st.integers(-4, 4), is_negated=st.booleans())
def test_the_same_pairs_take_part(width: int, shift: int, is_negated: bool) -> None:
    condition = _within(width, shift)
    condition = ix.apply("not", condition) if is_negated else ix.apply("or", condition, ix.compare("==", K, Const(0)))
    opened = bands.opened(condition)
    for q in range(12):
        for k in range(12):
            at = {"q": q, "k": k}
            assert ix.evaluate(opened, at, None) == ix.evaluate(condition, at, None)  # type: ignore[arg-type]


def test_a_band_stays_a_window() -> None:
    assert kinds.recognise(bands.opened(_within(3)), SIZE, SIZE) == (masks.SlidingWindow(left=3, right=3),)


def test_a_band_that_is_moved_is_known_by_its_bounds() -> None:
    (formula,) = kinds.recognise(_within(3, 3), SIZE, SIZE)
    assert isinstance(formula, masks.Formula)
    found = kinds.recognise(bands.opened(_within(3, 3)), SIZE, SIZE)
    assert found == (masks.SlidingWindow(left=0, right=6),)


@pytest.mark.parametrize(
    "condition",
    [
        ix.compare("<=", K, Q),
        ix.compare("<=", ix.apply("abs", Q), Const(3)),
        ix.compare(">=", ix.apply("abs", ix.add(Q, K, -1)), Const(3)),
    ],
)
def test_what_is_no_bounded_distance_stays(condition: Expr) -> None:
    assert bands.opened(condition) == condition
