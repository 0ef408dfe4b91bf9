"""A drawing's condition means what the kind's own reference does."""

from __future__ import annotations

import typing

import pytest

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Index, Load
from attn_compiler.reporting.page.conditions import all_of, condition_of
from attn_compiler.spec import masks
from attn_compiler.spec.mask_inputs import Inputs
from attn_compiler.spec.masks import MaskKind

B, K, Q = Index("b"), Index("k"), Index("q")
DOCUMENTS = masks.Document(of_key=Load("documents", (B, K), "int"))
KINDS: list[MaskKind] = [
    masks.Causal(),
    masks.Causal(alignment=masks.Alignment.BOTTOM_RIGHT),
    masks.CausalFrom(offset=Const(-1)),
    masks.CausalFrom(offset=Load("number", (B,), "int")),
    masks.SlidingWindow(left=2, right=None),
    masks.SlidingWindow(left=None, right=1),
    masks.SlidingWindow(left=2, right=1),
    masks.Prefix(length=Load("number", (B,), "int")),
    masks.KeyPadding(condition=ix.as_bool(Load("documents", (B, K), "int"))),
    masks.KeyBound(side="last", bound=Load("number", (B,), "int")),
    masks.KeyBound(side="first", bound=Load("number", (B,), "int")),
    DOCUMENTS,
    masks.Chunked(size=3),
    masks.Chunked(size=3, start=Load("number", (B,), "int")),
    masks.AnyOf(alternatives=((masks.Causal(), masks.SlidingWindow(left=2, right=None)), (DOCUMENTS,))),
    masks.Formula(condition=ix.compare("==", ix.apply("mod", ix.add(Q, K), Const(3)), Const(0))),
]


def _load(tensor: str, at: tuple[int, ...]) -> int:
    return 3 + at[0] if tensor == "number" else (at[1] + at[0]) // 4


def test_every_kind_is_here() -> None:
    assert {type(kind) for kind in KINDS} == set(typing.get_args(MaskKind))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.words)
def test_the_condition_is_the_reference(kind: MaskKind) -> None:
    seqlen_q, seqlen_kv = 7, 11
    inputs = Inputs(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, load=_load)
    condition = condition_of(kind, seqlen_q, seqlen_kv)
    assert condition is not None
    seen = set()
    for b, q, k in ((b, q, k) for b in range(2) for q in range(seqlen_q) for k in range(seqlen_kv)):
        wanted = kind.mask_mod(b, 0, q, k, inputs)
        assert bool(inputs.value(condition, b, 0, q, k)) == wanted, (b, q, k)
        seen.add(wanted)
    assert seen == {True, False}


def test_a_kind_that_is_not_known_has_no_condition() -> None:
    strange: typing.Any = object()
    assert condition_of(strange, 4, 4) is None
    assert all_of((masks.Causal(), strange), 4, 4) is None
    assert condition_of(masks.AnyOf(alternatives=((strange,),)), 4, 4) is None


def test_no_kind_lets_every_pair_through() -> None:
    assert all_of((), 4, 4) == ix.TRUE
