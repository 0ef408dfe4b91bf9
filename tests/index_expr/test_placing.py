"""Terms are put in order by how they are written, whatever their size, and alike terms stand at one place."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Apply, Const, Expr, Index, Load, placing
from attn_compiler.index_expr.placing import beginning, place

B, Q, K = Index("b"), Index("q"), Index("k")
MASK = Load("mask", (B, K), "int")
ONE_AXIS = Load("bounds", (Q,), "float")

EXPRESSIONS: dict[str, Expr] = {
    "index": Q,
    "constant": Const(-1.5),
    "size": ix.Size("s0"),
    "sum": ix.add(ix.add(ix.mul(Q, Const(3)), K), Const(-2)),
    "load": MASK,
    "load of one axis": ONE_AXIS,
    "condition": ix.apply("and", ix.compare("<=", K, Q), ix.as_bool(MASK)),
    "choice": ix.where(ix.compare("<=", K, Q), Const(0.0), Const(-1.0)),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
@pytest.mark.parametrize("most", [0, 1, 7, 10_000])
def test_a_beginning_is_what_python_writes(name: str, most: int) -> None:
    x = EXPRESSIONS[name]
    assert beginning(x, most) == str(x)[:most]


def test_a_place_depends_on_the_expression_alone() -> None:
    same = Load("mask", (Index("b"), Index("k")), "int")
    assert same is not MASK
    assert place(same) == place(MASK)
    assert len({place(x) for x in EXPRESSIONS.values()}) == len(EXPRESSIONS)


def test_sums_hold_their_terms_in_that_order_however_they_are_written() -> None:
    loads = [Load(name, (K,), "int") for name in ("c", "a", "b", "aa")]
    for seed in range(5):
        shuffled = random.Random(seed).sample(loads, len(loads))
        assert functools.reduce(ix.add, shuffled) == functools.reduce(ix.add, loads)


def _nested(inner: Expr, times: int) -> Expr:
    """As many nodes as there are steps, and 2 ** times words."""
    for _ in range(times):
        inner = Apply("minimum", (inner, inner))
    return inner


def test_a_large_expression_takes_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    written = placing._written
    monkeypatch.setattr(placing, "_written", lambda item: seen.append(item) or written(item))
    words, _ = place(_nested(ONE_AXIS, 200))
    assert len(words) == placing._FAR_ENOUGH
    assert len(seen) < placing._FAR_ENOUGH


def test_what_begins_alike_is_told_apart_by_its_end() -> None:
    one, other = (_nested(Load(name, (K,), "float"), 200) for name in ("one", "other"))
    assert place(one) != place(other)
    deep = [Apply("minimum", (_nested(ONE_AXIS, 100), end)) for end in (Q, K)]
    assert place(deep[0])[0] == place(deep[1])[0]
    assert place(deep[0]) != place(deep[1])


def test_it_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x = Load("once", (Q, K), "int")
    found = place(x)
    monkeypatch.setattr(placing, "beginning", None)
    assert place(x) == found
