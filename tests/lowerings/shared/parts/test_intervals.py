"""Alternatives are an interval of keys where each query has one piece of them."""

from __future__ import annotations

import pytest

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const
from attn_compiler.lowerings.shared.parts.intervals import Q
from attn_compiler.lowerings.shared.parts.site_parts import Parts
from attn_compiler.spec import masks
from attn_compiler.spec.masks import SEQLEN_KV, Causal
from tests.lowerings.shared.parts.test_site_parts import parts


def _rectangle(queries: tuple[int, int], keys: tuple[int, int]) -> tuple[masks.MaskKind, ...]:
    sides = (ix.compare(">=", Q, Const(queries[0])), ix.compare("<", Q, Const(queries[1])))
    first, last = (
        masks.KeyBound(side="first", bound=Const(keys[0])),
        masks.KeyBound(side="last", bound=Const(keys[1] - 1)),
    )
    return (first, last, *(masks.Formula(condition=side) for side in sides))


_BLOCKS = tuple(_rectangle((a, b), (a, b)) for a, b in ((0, 16), (16, 40), (40, 64)))
_FROM_ZERO = tuple(
    (masks.KeyBound(side="last", bound=Const(n)), *_rectangle((n, 64), (0, 64))[2:]) for n in (7, 31, 63)
)


@pytest.mark.parametrize(
    "alternatives",
    [_BLOCKS, _FROM_ZERO, ((Causal(),), (masks.KeyBound(side="last", bound=Const(9)),)), (_BLOCKS[0], _BLOCKS[2])],
    ids=["blocks", "prefixes", "causal or a prefix", "blocks with rows between"],
)
def test_alternatives_of_one_piece_for_each_query_are_an_interval(
    alternatives: tuple[tuple[masks.MaskKind, ...], ...],
) -> None:
    kind = masks.AnyOf(alternatives=alternatives)
    rows = parts(kind).rows
    assert rows is not None
    for q in range(64):
        lower = 0 if rows.lower is None else ix.evaluate(rows.lower, {"q": q, "Skv": 64}, lambda *_: None)
        assert rows.upper is not None
        upper = ix.evaluate(ix.substitute(rows.upper, SEQLEN_KV, Const(64)), {"q": q}, lambda *_: None)
        allowed = [k for k in range(64) if ix.evaluate(kind.condition, {"q": q, "k": k}, lambda *_: None)]
        assert allowed == list(range(max(lower, 0), min(upper, 64))), q


@pytest.mark.parametrize(
    "alternatives",
    [
        (_rectangle((0, 20), (0, 8)), _rectangle((16, 64), (24, 40))),
        (_rectangle((0, 64), (0, 8)), (Causal(), masks.KeyBound(side="first", bound=Const(32)))),
        (_BLOCKS[0], (masks.Formula(condition=ix.compare("!=", Q, Const(3))), *_BLOCKS[1][:2])),
    ],
    ids=["two pieces for some", "a prefix and a window", "queries that are not shown to be others"],
)
def test_alternatives_of_two_pieces_are_none(alternatives: tuple[tuple[masks.MaskKind, ...], ...]) -> None:
    assert parts(masks.AnyOf(alternatives=alternatives)) == Parts(mask=True)
