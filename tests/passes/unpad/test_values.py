"""Which axes hold rows and positions, however they were split, and whether the model's own value is there."""

from __future__ import annotations

import pytest
import sympy

from attn_compiler.passes.graph.axes import Atom
from attn_compiler.passes.unpad.values import Indexed, Kind, Need, Value, places


def _atom(size: int) -> Atom:
    return Atom(sympy.Integer(size))


def test_places_are_axes_that_hold_an_atom() -> None:
    batch, seq, other = _atom(3), _atom(10), _atom(4)
    assert places(((batch,), (seq,), (other,)), seq) == [1]
    assert places(((batch, seq), (other,)), seq) == [0]
    assert places(((other,),), seq) == []
    assert places(((seq,), (other, seq)), seq) == [0, 1]
    assert places((), seq) == []


def test_a_part_of_an_axis_is_found_in_what_was_split() -> None:
    seq, whole = _atom(10), _atom(30)
    assert places(((whole,),), seq) == []
    whole.parts = (_atom(3), seq)
    assert places(((whole,),), seq) == [0]
    # What was split into others is not there any more.
    seq.parts = (_atom(2), _atom(5))
    assert places(((whole,),), seq) == []


@pytest.mark.parametrize(
    ("kind", "is_exact"), [(Kind.ORIGINAL, True), (Kind.RETURNED, True), (Kind.PACKED, False), (Kind.LOST, False)]
)
def test_the_model_s_own_value(kind: Kind, is_exact: bool) -> None:
    assert Value(kind=kind).is_exact is is_exact


def test_a_form_is_made_once() -> None:
    """Needs are keys: equal forms of one node are one."""
    node = object()
    forms = [Indexed(batch=0, seq=1, rank=3), Indexed(batch=0, seq=1, rank=3), Indexed(batch=1, seq=0, rank=3), "plain"]
    assert len({Need(node, form) for form in forms}) == 3  # type: ignore[arg-type]
