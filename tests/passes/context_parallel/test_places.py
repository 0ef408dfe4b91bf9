"""When two dimensions hold the same sequence at the same place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sympy
from torch import fx

from attn_compiler.passes.context_parallel.places import Mixes, Place, alike, has, place_of
from attn_compiler.passes.graph.axes import Atom, AxisError, Dim


def _atom(size: int) -> Atom:
    return Atom(sympy.Integer(size))


SEQUENCE, OTHER_SEQUENCE = _atom(6), _atom(6)
CONTEXT: Any = SimpleNamespace(atoms=frozenset({SEQUENCE, OTHER_SEQUENCE}))


@pytest.mark.parametrize(
    ("one", "other", "are_alike"),
    [
        ((SEQUENCE,), (SEQUENCE,), True),
        ((SEQUENCE,), (OTHER_SEQUENCE,), False),
        # As many elements are not the same positions.
        ((SEQUENCE,), (_atom(6),), False),
        ((_atom(6),), (_atom(6),), True),
        ((_atom(2), SEQUENCE), (_atom(2), SEQUENCE), True),
        ((_atom(2), SEQUENCE), (SEQUENCE, _atom(2)), False),
        ((_atom(2), SEQUENCE), (_atom(3), SEQUENCE), False),
        ((_atom(1), SEQUENCE, _atom(1)), (SEQUENCE,), True),
        ((SEQUENCE,), (), False),
        ((), (_atom(1),), True),
    ],
)
def test_the_same_sequence_among_axes_of_the_same_sizes(one: Dim, other: Dim, are_alike: bool) -> None:
    assert alike(CONTEXT.atoms, one, other) is are_alike
    assert alike(CONTEXT.atoms, other, one) is are_alike


def test_a_dimension_that_was_split_holds_what_its_parts_hold() -> None:
    whole = _atom(12)
    assert not has(CONTEXT, (whole,))
    whole.parts = (_atom(2), SEQUENCE)
    assert has(CONTEXT, (whole,))


def test_what_mixes_has_no_place() -> None:
    graph = fx.Graph()
    one, other = graph.placeholder("one"), graph.placeholder("other")
    place = Place(dims=((SEQUENCE,),))
    context: Any = SimpleNamespace(places={one: place, other: Mixes(at=other, why="it is sorted")})
    assert place_of(context, one) is place
    with pytest.raises(AxisError, match="it is sorted"):
        place_of(context, other)
