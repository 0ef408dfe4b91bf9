from __future__ import annotations

import itertools

import pytest
from hypothesis import given, strategies as st

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Apply, Const, Expr, Index, Linear, Load, Size
from attn_compiler.index_expr.dividing import divide

B, H = Index("b"), Index("h")
RANGES = {"b": Linear((), 2), "h": Linear((), 3)}


def _flat(heads: int, const: int = 0) -> Expr:
    return ix.add(ix.add(ix.mul(B, Const(heads)), H), Const(const))


def _by(op: str, x: Expr, divisor: int) -> Expr:
    return ix.apply(op, x, Const(divisor))


def test_an_index_of_two_axes_in_one_is_taken_apart() -> None:
    assert divide(_by("floordiv", _flat(4), 4), RANGES) == B
    assert divide(_by("mod", _flat(4), 4), RANGES) == H
    assert divide(_by("floordiv", _flat(4, 8), 4), RANGES) == ix.add(B, Const(2))
    assert divide(_by("mod", H, 4), RANGES) == H
    assert divide(_by("floordiv", H, 4), RANGES) == Const(0)


@pytest.mark.parametrize("op", ["floordiv", "mod"])
def test_what_may_reach_the_divisor_stays(op: str) -> None:
    for x in (_by(op, _flat(3), 3), _by(op, _flat(4, 1), 4), _by(op, _flat(4), 8), _by(op, Index("q"), 4)):
        assert isinstance(divide(x, RANGES), Apply)
    unknown = {"b": Linear((), 2), "h": Linear(((Size("s0"), 1),), -1)}
    assert isinstance(divide(_by(op, _flat(4), 4), unknown), Apply)


def test_divisions_inside_of_everything_are_carried_out() -> None:
    rest = _by("mod", _flat(4), 4)
    x = ix.where(ix.compare("<=", rest, Const(1)), Load("table", (rest,), "float"), Const(0.0))
    assert divide(x, RANGES) == ix.where(ix.compare("<=", H, Const(1)), Load("table", (H,), "float"), Const(0.0))


@given(
    st.integers(-6, 6), st.integers(-6, 6), st.integers(-9, 9), st.integers(1, 6), st.sampled_from(["floordiv", "mod"])
)
def test_what_is_carried_out_is_the_same_everywhere(x: int, y: int, const: int, divisor: int, op: str) -> None:
    form = ix.add(ix.add(ix.mul(B, Const(x)), ix.mul(H, Const(y))), Const(const))
    before = _by(op, form, divisor)
    after = divide(before, RANGES)
    for b, h in itertools.product(range(3), range(4)):
        values = {"b": b, "h": h}
        load = lambda *_: None  # noqa: E731
        assert ix.evaluate(after, values, load) == ix.evaluate(before, values, load)
