"""What expressions are called: by examples, and by evaluating what random masks are called against what they are."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr, Index, Linear, Load, Size
from attn_compiler.passes.recovering import kinds
from attn_compiler.spec import masks
from tests.index_expr.expressions import element
from tests.spec.meanings import Inputs, allows

B, H, Q, K = map(Index, "bhqk")
SQ, SKV = Linear(((Size("s0"), 1),)), Linear(((Size("s1"), 1),))

PADDING = Load("mask", (B, K), "int")
FLAG = Load("flag", (B, ix.ZERO, ix.ZERO, K), "bool")
IDS = Load("ids", (B, K), "int")
LENGTH = Load("length", (B,), "int")
PAST = Load("past", (), "int")
CAUSAL = ix.compare("<=", K, Q)


def at_query(x: Expr) -> Expr:
    return ix.substitute(x, K, Q)


def both(*parts: Expr) -> Expr:
    return ix.apply("and", *parts)


def either(*parts: Expr) -> Expr:
    return ix.apply("or", *parts)


def plus(x: Expr, y: Expr | int) -> Expr:
    return ix.add(x, Const(y) if isinstance(y, int) else y)


def chunk(x: Expr, size: int = 4) -> Expr:
    return ix.apply("floordiv", x, Const(size))


#: name -> (expression, its kinds)
NAMED: dict[str, tuple[Expr, list[masks.MaskKind]]] = {
    "everything": (ix.TRUE, []),
    "causal": (CAUSAL, [masks.Causal()]),
    "causal, turned round": (ix.invert(ix.compare(">", K, Q)), [masks.Causal()]),
    "causal, doubled": (ix.compare(">=", ix.mul(Q, Const(2)), ix.mul(K, Const(2))), [masks.Causal()]),
    "bottom right": (
        ix.compare("<=", ix.add(K, Size("s1"), -1), ix.add(Q, Size("s0"), -1)),
        [masks.Causal(alignment=masks.Alignment.BOTTOM_RIGHT)],
    ),
    "strictly causal": (ix.compare("<", K, Q), [masks.CausalFrom(offset=Const(-1))]),
    "two ahead": (ix.compare("<=", K, plus(Q, 2)), [masks.CausalFrom(offset=Const(2))]),
    "from a cache's length": (ix.compare("<=", K, plus(Q, PAST)), [masks.CausalFrom(offset=PAST)]),
    "from a row's length": (ix.compare("<", K, plus(Q, LENGTH)), [masks.CausalFrom(offset=plus(LENGTH, -1))]),
    "from a size": (ix.compare("<=", K, plus(Q, Size("s9"))), [masks.CausalFrom(offset=Size("s9"))]),
    "a window": (
        both(CAUSAL, ix.compare(">", K, plus(Q, -3))),
        [masks.Causal(), masks.SlidingWindow(left=2, right=None)],
    ),
    "a band": (ix.compare("<=", ix.apply("abs", ix.add(K, Q, -1)), Const(2)), [masks.SlidingWindow(left=2, right=2)]),
    "an uneven band": (
        both(ix.compare("<=", K, plus(Q, 2)), ix.compare(">=", K, plus(Q, -1))),
        [masks.SlidingWindow(left=1, right=2)],
    ),
    "a strict window": (
        both(ix.compare("<", K, Q), ix.compare(">=", K, plus(Q, -3))),
        [masks.CausalFrom(offset=Const(-1)), masks.SlidingWindow(left=3, right=None)],
    ),
    "a prefix of a number": (either(CAUSAL, ix.compare("<", K, Const(3))), [masks.Prefix(length=Const(3))]),
    "a prefix of a size": (either(CAUSAL, ix.compare("<", K, Size("s9"))), [masks.Prefix(length=Size("s9"))]),
    "a prefix of each row": (either(CAUSAL, ix.compare("<", K, LENGTH)), [masks.Prefix(length=LENGTH)]),
    "a padded prefix": (
        both(either(CAUSAL, ix.compare("<", K, LENGTH)), ix.as_bool(PADDING)),
        [masks.Prefix(length=LENGTH), masks.KeyPadding(condition=ix.as_bool(PADDING))],
    ),
    "padding": (ix.as_bool(PADDING), [masks.KeyPadding(condition=ix.as_bool(PADDING))]),
    "padding of a 4-D input": (FLAG, [masks.KeyPadding(condition=FLAG)]),
    "keys of a type": (
        ix.compare("==", PADDING, Const(2)),
        [masks.KeyPadding(condition=ix.compare("==", PADDING, Const(2)))],
    ),
    "right padding": (ix.compare("<", K, LENGTH), [masks.KeyBound(side="last", bound=plus(LENGTH, -1))]),
    "left padding": (ix.compare(">=", K, LENGTH), [masks.KeyBound(side="first", bound=LENGTH)]),
    "the filled part": (ix.compare("<=", K, PAST), [masks.KeyBound(side="last", bound=PAST)]),
    "documents": (ix.compare("==", at_query(IDS), IDS), [masks.Document(of_key=IDS)]),
    "documents of all rows": (
        ix.compare("==", Load("ids", (Q,), "int"), Load("ids", (K,), "int")),
        [masks.Document(of_key=Load("ids", (K,), "int"))],
    ),
    "documents by a float": (
        ix.compare("==", Load("ids", (B, Q), "float"), Load("ids", (B, K), "float")),
        [masks.Document(of_key=Load("ids", (B, K), "float"))],
    ),
    "chunks": (ix.compare("==", chunk(Q), chunk(K)), [masks.Chunked(size=4)]),
    "chunks after padding": (
        ix.compare("==", chunk(ix.add(Q, LENGTH, -1)), chunk(ix.add(K, LENGTH, -1))),
        [masks.Chunked(size=4, start=LENGTH)],
    ),
    "an image block": (
        either(CAUSAL, both(ix.compare("==", at_query(IDS), IDS), ix.compare(">=", IDS, ix.ZERO))),
        [
            masks.AnyOf(
                alternatives=(
                    (masks.Causal(),),
                    (masks.KeyPadding(condition=ix.compare(">=", IDS, ix.ZERO)), masks.Document(of_key=IDS)),
                )
            )
        ],
    ),
    "two prefixes": (
        either(CAUSAL, ix.compare("<", K, LENGTH), ix.compare("==", K, PAST)),
        [
            masks.AnyOf(
                alternatives=(
                    (masks.Causal(),),
                    (masks.KeyBound(side="last", bound=plus(LENGTH, -1)),),
                    (masks.Formula(condition=ix.compare("==", K, PAST)),),
                )
            )
        ],
    ),
}

#: what is one node off from a kind of the table above
UNNAMED: dict[str, Expr] = {
    "nothing": ix.FALSE,
    "causal for some heads": ix.compare("<=", K, plus(Q, Load("offsets", (H,), "int"))),
    "doubled keys": ix.compare("<=", ix.mul(K, Const(2)), Q),
    "keys against queries added": ix.compare("<=", plus(K, Q), Const(4)),
    "a window of a run-time size": ix.compare(">=", K, ix.add(Q, PAST, -1)),
    "a window ahead only": ix.compare(">", K, Q),
    "padding by the query": ix.as_bool(at_query(PADDING)),
    "padding of each head": Load("flag", (B, H, K), "bool"),
    "documents of two tensors": ix.compare("==", at_query(IDS), PADDING),
    "documents, shifted": ix.compare("==", at_query(IDS), plus(IDS, 1)),
    "different documents": ix.compare("!=", at_query(IDS), IDS),
    "chunks of two sizes": ix.compare("==", chunk(Q), chunk(K, 2)),
    "chunks of a shifted key": ix.compare("==", chunk(Q), chunk(plus(K, 1))),
    "neighbouring chunks": ix.compare("==", chunk(Q), plus(chunk(K), 1)),
    "every other key": ix.compare("==", ix.apply("mod", ix.add(Q, K, -1), Const(2)), ix.ZERO),
    "alternatives without a name": either(ix.compare("==", plus(K, Q), Const(4)), ix.compare("==", Q, Const(1))),
}


@pytest.mark.parametrize("name", NAMED)
def test_what_has_a_name(name: str) -> None:
    x, wanted = NAMED[name]
    assert list(kinds.recognise(x, SQ, SKV)) == wanted


@pytest.mark.parametrize("name", UNNAMED)
def test_what_has_none_keeps_its_formula(name: str) -> None:
    assert kinds.recognise(UNNAMED[name], SQ, SKV) == (masks.Formula(condition=UNNAMED[name]),)


def test_bottom_right_of_known_sizes() -> None:
    found = kinds.recognise(ix.compare("<=", K, plus(Q, 3)), Linear((), 5), Linear((), 8))
    assert found == (masks.Causal(alignment=masks.Alignment.BOTTOM_RIGHT),)
    assert kinds.recognise(CAUSAL, Linear((), 5), Linear((), 8)) == (masks.Causal(),)


# ---- what is it called, and is it that? -----------------------------------------------------------------------------


def _load(tensor: str, at: tuple[int, ...]) -> Any:
    return element("bool" if tensor == "flag" else "int", (*at, len(tensor)))


def _agree(x: Expr, seqlen_q: int, seqlen_kv: int) -> None:
    found = kinds.recognise(x, SQ, SKV)
    inputs = Inputs(
        seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, load=_load, sizes={"s0": seqlen_q, "s1": seqlen_kv, "s9": 2}
    )
    for b, h, q, k in itertools.product(range(2), range(2), range(seqlen_q), range(seqlen_kv)):
        allowed = all(allows(kind, b, h, q, k, inputs) for kind in found)
        assert allowed is bool(inputs.value(x, b, h, q, k)), (found, (b, h, q, k))


@pytest.mark.parametrize("sizes", [(5, 5), (3, 6), (6, 3), (1, 4)])
@pytest.mark.parametrize("name", [*NAMED, *UNNAMED])
def test_names_mean_what_they_name(name: str, sizes: tuple[int, int]) -> None:
    _agree(NAMED[name][0] if name in NAMED else UNNAMED[name], *sizes)


OFFSETS = st.one_of(st.integers(-3, 3).map(Const), st.sampled_from([PAST, LENGTH, Size("s9"), Size("s0")]))
SIDES = st.builds(ix.add, st.sampled_from([Q, K, IDS, at_query(IDS), chunk(Q), chunk(K)]), OFFSETS)
ATOMS = st.one_of(
    st.builds(ix.compare, st.sampled_from(["<=", "<", ">=", "==", "!="]), SIDES, SIDES),
    st.sampled_from([x for name, (x, _) in NAMED.items() if "or" not in name]),
    st.sampled_from([FLAG, ix.invert(FLAG)]),
)
MASKS = st.recursive(
    ATOMS, lambda inner: st.builds(ix.apply, st.sampled_from(["and", "or"]), inner, inner), max_leaves=5
)


@settings(max_examples=300, deadline=None)
@given(MASKS, st.integers(1, 4), st.integers(1, 4))
def test_random_masks_are_what_they_are_called(x: Expr, seqlen_q: int, seqlen_kv: int) -> None:
    _agree(x, seqlen_q, seqlen_kv)


def test_every_recogniser_has_an_example() -> None:
    used = {
        recogniser
        for x, _ in NAMED.values()
        for part in kinds.conjuncts(x)
        for recogniser in kinds.RECOGNISERS
        if recogniser(part, SQ, SKV) is not None
    }
    assert used == set(kinds.RECOGNISERS)
