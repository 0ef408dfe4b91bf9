from __future__ import annotations

import pytest

from attn_compiler.index_expr import Const, Index, Linear
from attn_compiler.index_expr.linear_forms import combine, linear, plain

Q, K = Index("q"), Index("k")


def test_numbers_and_other_expressions_as_forms() -> None:
    assert linear(Const(3)) == Linear((), 3)
    assert linear(Const(True)) == Linear((), 1)
    assert linear(Q) == Linear(((Q, 1),))
    form = combine(linear(Q), linear(K), 2)
    assert linear(form) is form


@pytest.mark.parametrize("factor", [1, -2, 7])
def test_the_order_of_building_does_not_show(factor: int) -> None:
    one = combine(combine(linear(Q), linear(K), factor), linear(Const(5)), 1)
    other = combine(combine(linear(Const(5)), linear(K), factor), linear(Q), 1)
    assert one == other
    assert dict(one.terms) == {Q: 1, K: factor}
    assert one.const == 5


def test_what_cancels_out_is_gone() -> None:
    difference = combine(linear(Q), linear(K), -1)
    assert combine(difference, difference, -1) == Linear(())
    assert combine(difference, linear(K), 1) == linear(Q)
    assert combine(difference, linear(K), 0) is difference


def test_forms_are_wrapped_only_where_needed() -> None:
    assert plain(Linear((), 4)) == Const(4)
    assert plain(linear(Q)) is Q
    doubled, shifted = Linear(((Q, 2),)), Linear(((Q, 1),), 1)
    assert plain(doubled) is doubled
    assert plain(shifted) is shifted
