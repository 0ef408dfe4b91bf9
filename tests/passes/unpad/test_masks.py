"""What all attentions of a graph leave out is one mask of padding; and what positions alone allow each."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Index, Load
from attn_compiler.passes.unpad import masks
from attn_compiler.passes.unpad.masks import PackedPairs, Padding, PositionBand
from attn_compiler.passes.unpad.refusing import KeepsPadding
from attn_compiler.reasons.codes import Code
from attn_compiler.spec.masks import Alignment, Causal, Document, KeyPadding, MaskKind, MaskSpec, SlidingWindow
from attn_compiler.spec.scores import Softcap
from tests.lowerings.specs import make_spec

B, K = Index("b"), Index("k")
LOAD = Load("mask", (B, K), "int")
PADDED = KeyPadding(condition=ix.as_bool(LOAD))
MASK: Any = SimpleNamespace(node="mask", since=None, until=None)
SDPA = torch.ops.aten.scaled_dot_product_attention.default


def _site(*kinds: MaskKind, tensor: Any = MASK, anchor: object = SDPA, **spec: Any) -> Any:
    match = SimpleNamespace(out=None, anchor=SimpleNamespace(target=anchor))
    asked = make_spec(mask=MaskSpec(kinds=kinds), **spec)
    return SimpleNamespace(module="layer", match=match, spec=asked, loads={"mask": tensor})


@pytest.mark.parametrize(
    ("kinds", "band"),
    [
        ((PADDED,), PositionBand()),
        ((Causal(), PADDED), PositionBand(causal=True)),
        ((PADDED, SlidingWindow(left=3, right=None)), PositionBand(left=3)),
        ((SlidingWindow(left=3, right=3), PADDED), PositionBand(left=3, right=3)),
        ((Causal(), SlidingWindow(left=3, right=None), PADDED), PositionBand(causal=True, left=3)),
    ],
)
def test_padding_and_a_band_are_understood(kinds: tuple[MaskKind, ...], band: PositionBand) -> None:
    padding, pairs = masks.of([_site(*kinds), _site(PADDED)])
    assert padding == Padding(tensor=MASK, negated=False)
    assert pairs == [PackedPairs(band=one, scores=None) for one in (band, PositionBand())]
    assert pairs[0].count_positions is (band.left is not None or band.right is not None)


def test_a_mask_may_be_zero_where_a_token_is_real() -> None:
    negated = KeyPadding(condition=ix.compare("==", LOAD, ix.ZERO))
    assert masks.of([_site(negated)])[0].negated
    with pytest.raises(KeepsPadding) as caught:
        masks.of([_site(negated), _site(PADDED)])
    assert caught.value.reason.observed == "the mask of another layer is another tensor"


@pytest.mark.parametrize(
    ("relation", "number", "negated"), [("==", 1, False), (">=", 1, False), ("<=", 0, True), ("!=", 1, True)]
)
def test_a_mask_that_is_0_or_1_may_be_asked_otherwise(relation: str, number: int, negated: bool) -> None:
    asked = KeyPadding(condition=ix.compare(relation, LOAD, ix.Const(number)))
    assert masks.of([_site(asked)])[0] == Padding(tensor=MASK, negated=negated, is_asked=True)
    if not negated:
        assert masks.of([_site(PADDED), _site(asked), _site(PADDED)])[0].is_asked


def test_what_two_numbers_do_not_tell_is_no_padding() -> None:
    for condition in (
        ix.compare("==", LOAD, ix.Const(2)),
        ix.compare(">=", LOAD, ix.Const(-3)),
        ix.compare(">=", LOAD, K),
        ix.compare("==", LOAD, Load("other", (B, K), "int")),
        ix.compare("==", Load("mask", (B, Index("q")), "int"), ix.Const(1)),
    ):
        with pytest.raises(KeepsPadding):
            masks.of([_site(KeyPadding(condition=condition))])


OTHER: Any = SimpleNamespace(node="other", since=None, until=None)
WRITTEN: Any = SimpleNamespace(node="mask", since=None, until="later")


@pytest.mark.parametrize(
    ("sites", "observed"),
    [
        ([], "none"),
        ([_site()], "the mask is none"),
        ([_site(Causal())], "the mask is causal"),
        ([_site(PADDED), _site(PADDED, tensor=OTHER)], "another tensor"),
        ([_site(PADDED, tensor=WRITTEN)], "written in place"),
        ([_site(PADDED, anchor=torch.ops.aten.softmax.int)], "no call of scaled_dot_product_attention"),
        ([_site(PADDED, changes=(Softcap(cap=3.0),))], "the scores are changed: scale 0.125, softcap 3"),
        ([_site(PADDED, returns_weights=True)], "weights are read"),
        ([_site(PADDED, lse="read")], "the logsumexp of the scores is read"),
        ([_site(Causal(alignment=Alignment.BOTTOM_RIGHT), PADDED)], "bottom-right"),
        ([_site(PADDED, Document(of_key=Load("ids", (B, K), "int")))], "document"),
        ([_site(PADDED, SlidingWindow(left=3, right=None), SlidingWindow(left=9, right=None))], "window"),
        ([_site(KeyPadding(condition=ix.as_bool(Load("mask", (K,), "int"))))], "padding is"),
    ],
)
def test_the_rest_keeps_padding_in(sites: list[Any], observed: str) -> None:
    with pytest.raises(KeepsPadding) as caught:
        masks.of(sites)
    assert observed in caught.value.reason.observed
    assert caught.value.reason.code is Code.PADDING_MASK


def test_a_mask_that_was_not_understood_says_why() -> None:
    site = _site(PADDED)
    site.spec = dataclasses.replace(site.spec, mask=MaskSpec(reason="it is made in another graph"))
    with pytest.raises(KeepsPadding) as caught:
        masks.of([site])
    assert "it is made in another graph" in caught.value.reason.observed


def test_a_site_without_a_spec_is_a_fault() -> None:
    site = _site(PADDED)
    site.spec = None
    with pytest.raises(ValueError, match="layer has no spec"):
        masks.of([site])
