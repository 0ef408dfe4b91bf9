"""Padding as masks, as drawings, at padded positions, and by rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Index, Load
from attn_compiler.passes.unpad import masks
from attn_compiler.passes.unpad.forms import KeepsPadding
from attn_compiler.passes.unpad.masks import PackedPairs, Padding, PositionBand
from attn_compiler.reasons.codes import Code
from attn_compiler.spec.masks import Alignment, Causal, Document, KeyPadding, MaskKind, MaskSpec, SlidingWindow
from attn_compiler.spec.scores import Softcap
from tests.lowerings.specs import make_spec
from tests.near_miss import linear_variants
from tests.passes.unpad.encoder import (
    HEADS,
    MASK as ENCODED_MASK,
    WIDTH,
    WORDS,
    Encoder,
    check,
    compiled,
    ids_of,
    on_real_tokens,
    report,
)

# What all attentions of a graph leave out is one mask of padding.
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
    padding, pairs = masks.padding_and_pairs([_site(*kinds), _site(PADDED)])
    assert padding == Padding(tensor=MASK, negated=False)
    assert pairs == [PackedPairs(band=one, scores=None) for one in (band, PositionBand())]
    assert pairs[0].count_positions is (band.left is not None or band.right is not None)


def test_a_mask_may_be_zero_where_a_token_is_real() -> None:
    negated = KeyPadding(condition=ix.compare("==", LOAD, ix.ZERO))
    assert masks.padding_and_pairs([_site(negated)])[0].negated
    with pytest.raises(KeepsPadding) as caught:
        masks.padding_and_pairs([_site(negated), _site(PADDED)])
    assert caught.value.reason.observed == "the mask of another layer is another tensor"


@pytest.mark.parametrize(
    ("relation", "number", "negated"), [("==", 1, False), (">=", 1, False), ("<=", 0, True), ("!=", 1, True)]
)
def test_a_mask_that_is_0_or_1_may_be_asked_otherwise(relation: str, number: int, negated: bool) -> None:
    asked = KeyPadding(condition=ix.compare(relation, LOAD, ix.Const(number)))
    assert masks.padding_and_pairs([_site(asked)])[0] == Padding(tensor=MASK, negated=negated, is_asked=True)
    if not negated:
        assert masks.padding_and_pairs([_site(PADDED), _site(asked), _site(PADDED)])[0].is_asked


def test_what_two_numbers_do_not_tell_is_no_padding() -> None:
    for condition in (
        ix.compare("==", LOAD, ix.Const(2)),
        ix.compare(">=", LOAD, ix.Const(-3)),
        ix.compare(">=", LOAD, K),
        ix.compare("==", LOAD, Load("other", (B, K), "int")),
        ix.compare("==", Load("mask", (B, Index("q")), "int"), ix.Const(1)),
    ):
        with pytest.raises(KeepsPadding):
            masks.padding_and_pairs([_site(KeyPadding(condition=condition))])


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
        masks.padding_and_pairs(sites)
    assert observed in caught.value.reason.observed
    assert caught.value.reason.code is Code.PADDING_MASK


def test_a_mask_that_was_not_understood_says_why() -> None:
    site = _site(PADDED)
    site.spec = dataclasses.replace(site.spec, mask=MaskSpec(reason="it is made in another graph"))
    with pytest.raises(KeepsPadding) as caught:
        masks.padding_and_pairs([site])
    assert "it is made in another graph" in caught.value.reason.observed


def test_a_site_without_a_spec_is_a_fault() -> None:
    site = _site(PADDED)
    site.spec = None
    with pytest.raises(ValueError, match="layer has no spec"):
        masks.padding_and_pairs([site])


# What draws random numbers draws them once.
Op = Callable[[Tensor], Tensor]


class Twice(Encoder):
    """Gives back what it drew, and the same again as layers read it."""

    def __init__(self, op: Op) -> None:
        super().__init__()
        self.op = op

    def forward(self, ids: Tensor, mask: Tensor, **further: Tensor) -> tuple[Tensor, Tensor]:
        drawn = self.op(self.words(ids))
        return drawn, drawn + 0 * self.layers[0](drawn, self.allowed(mask))


@pytest.fixture
def noisy() -> Iterator[Op]:
    """Somebody's op, which is told by its tags alone."""
    library = torch.library.Library("drawing_of_somebody", "FRAGMENT")
    tags = (torch.Tag.pointwise, torch.Tag.nondeterministic_seeded)
    library.define("noisy(Tensor x) -> Tensor", tags=tags)
    library.impl("noisy", lambda x: x + torch.rand_like(x), "CompositeExplicitAutograd")
    yield lambda x: torch.ops.drawing_of_somebody.noisy(x.detach())
    library._destroy()


DRAWN: dict[str, Op] = {
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rrelu of rrelu": lambda x: F.rrelu(-F.rrelu(x, training=True), 0.2, 0.9, training=True),
    "rrelu and a view": lambda x: F.rrelu(x.unflatten(-1, (2, -1)), training=True).flatten(-2),
    "rrelu in half": lambda x: F.rrelu(x.bfloat16(), training=True).float(),
    "rrelu times": lambda x: x * F.rrelu(x, 0.5, 0.6, training=True),
    "dropout": lambda x: F.dropout(x, 0.5, training=True),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "feature dropout": lambda x: F.dropout1d(x, 0.5, training=True),
    "feature alpha dropout": lambda x: F.feature_alpha_dropout(x, 0.5, training=True),
    "bernoulli": lambda x: x * torch.bernoulli(x.sigmoid()),
    "normal": lambda x: x + torch.normal(x.detach(), 1.0),
    "poisson": lambda x: x + torch.poisson(x.detach().abs()),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn_like": lambda x: x + torch.randn_like(x),
    "randint_like": lambda x: x + torch.randint_like(x, 5),
    "gumbel": lambda x: F.gumbel_softmax(x, dim=-1),
    "exponential": lambda x: x + torch.empty_like(x).exponential_(),
}


def _are_equal(op: Op) -> bool:
    first, second = on_real_tokens(compiled(Twice(op))(ids_of(ENCODED_MASK), ENCODED_MASK), ENCODED_MASK)
    return torch.equal(first, second)


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("name", DRAWN)
def test_what_is_drawn_is_one_draw(name: str) -> None:
    assert _are_equal(DRAWN[name])


def test_an_op_that_is_not_known_is_told_by_its_tags(noisy: Op) -> None:
    assert _are_equal(noisy)


@pytest.mark.parametrize("between", [DRAWN["rrelu"], DRAWN["alpha dropout"], DRAWN["bernoulli"]])
def test_what_draws_between_layers_keeps_padding_in(between: Op) -> None:
    compiled(Encoder(between=between))(ids_of(ENCODED_MASK), ENCODED_MASK)
    kept = report().kept
    assert kept is not None
    assert kept.code is Code.PADDING_DRAWN
    assert kept.remedy is not None


def test_dropout_between_layers_does_not() -> None:
    compiled(Encoder(between=DRAWN["dropout"]))(ids_of(ENCODED_MASK), ENCODED_MASK)
    assert report().kept is None


@pytest.mark.parametrize("between", [lambda x: F.rrelu(x, training=False), lambda x: F.dropout(x, 0.0, training=True)])
def test_what_is_told_to_draw_nothing_is_packed(between: Op) -> None:
    assert check(Encoder(between=between), close=2e-5).kept is None


# Sums over positions leave padding out where what they read is known to be 0 there.
Pooling = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _wide(mask: torch.Tensor) -> torch.Tensor:
    return mask[:, :, None]


KNOWN: dict[str, Pooling] = {
    "masked_fill of equal": lambda x, m: x.masked_fill(_wide(m == 0), 0.0).sum(1),
    "masked_fill of not": lambda x, m: x.masked_fill(~_wide(m.bool()), 0).sum(1) / m.sum(1, keepdim=True),
    "where": lambda x, m: torch.where(_wide(m).bool(), x, 0.0).sum(1),
    "where of zeros": lambda x, m: torch.where(_wide(m).bool(), x, torch.zeros_like(x)).sum(1),
    "where of a number, turned": lambda x, m: torch.where(_wide(m) == 0, 0.0, x).sum(1),
    "one minus the mask": lambda x, m: (x * (1 - (1 - _wide(m)))).sum(1),
    "a cast and a comparison": lambda x, m: (x * (_wide(m).float() > 0.5)).sum(1),
    "a sum with what is 0": lambda x, m: (x * _wide(m) * 2 + 0 * _wide(m)).sum((0, 1)),
    "a sum over no axes is one over all": lambda x, m: (x * _wide(m)).sum(()),
    "one at padding": lambda x, m: x.masked_fill(_wide(m == 0), 1.0).sum(1),
    "two results of numbers": lambda x, m: (x * _wide(m) * torch.frexp(torch.ones_like(x)).mantissa).sum(1),
    "not a number that is 1": lambda x, m: (x * (2 - 2 * (_wide(m) == 0).to(x.dtype)) / 2).sum(1),
}

AT_PADDING_OTHER: dict[str, Pooling] = {
    "the other way round": lambda x, m: x.masked_fill(_wide(m == 1), 0.0).sum(1),
    "where turned": lambda x, m: torch.where(_wide(m).bool(), 0.0, x).sum(1),
    "more than the mask": lambda x, m: (x * (_wide(m) + 1)).sum(1),
    "a mask of something else": lambda x, m: (x * _wide(m.flip(1))).sum(1),
    "a threshold below 0": lambda x, m: (x * (_wide(m).float() > -0.5)).sum(1),
    "dropout of the mask": lambda x, m: (x * (1 - torch.bernoulli(_wide(m).float()))).sum(1),
    "the sign of a zero": lambda x, m: torch.signbit(x * _wide(m)).cumsum(1),
    "infinities of both signs": lambda x, m: (1 / (x * _wide(m))).sigmoid().sum(1),
    "memory as it lies": lambda x, m: (x * _wide(m)).cumsum(1).as_strided((WIDTH, 3), (1, WIDTH)),
    "a call that is not looked into": lambda x, m: torch.vmap(lambda y: y.cumsum(0))(x * _wide(m)),
}


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("name", KNOWN)
def test_what_is_known_at_padding_is_packed(name: str) -> None:
    found = check(Encoder(ending=KNOWN[name]), close=2e-5)
    assert found.kept is None, found.kept
    assert found.last[-1].failed == ()


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("name", AT_PADDING_OTHER)
def test_what_is_not_zero_keeps_its_padding(name: str) -> None:
    model = Encoder(ending=AT_PADDING_OTHER[name])
    compiled(model)(ids_of(ENCODED_MASK), ENCODED_MASK)
    assert report().kept is not None


# Single lines of the table, where an op's arguments decide whether it commutes with packing.
ALL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "amax": lambda x: x.amax(),
    "amin": lambda x: x.amin(),
    "sum": lambda x: x.sum(()),
    "mean": lambda x: x.mean(()),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, dim=()),
}


@pytest.mark.parametrize("name", ALL)
def test_no_axes_are_all_axes(name: str) -> None:
    model = Encoder(ending=lambda x, mask: ALL[name](x)).eval()
    out = compiled(model)(ids_of(ENCODED_MASK), ENCODED_MASK)
    assert report().kept is not None
    torch.testing.assert_close(out, model(ids_of(ENCODED_MASK), ENCODED_MASK))


def test_gradients_that_count_how_often_a_token_occurs() -> None:
    model = Encoder()
    model.words = nn.Embedding(WORDS, WIDTH, scale_grad_by_freq=True)
    assert check(model).kept is not None


SEVERAL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "frexp": lambda x: torch.frexp(x).mantissa,
    "frexp, put together": lambda x: torch.ldexp(*torch.frexp(x)),
    "frexp of a part": lambda x: x * torch.frexp(x[..., :1]).exponent,
    "aminmax": lambda x: x - torch.aminmax(x, dim=-1, keepdim=True).min,
    "max": lambda x: x - x.max(-1, keepdim=True).values,
    "topk": lambda x: x - x.topk(2, -1).values.sum(-1, keepdim=True),
    "sort": lambda x: x.sort(-1).values,
    "median": lambda x: x - x.median(-1, keepdim=True).values,
    "cummax": lambda x: x.cummax(-1).values,
    "var_mean": lambda x: x - torch.var_mean(x, -1, keepdim=True)[1],
    "native_layer_norm": lambda x: torch.native_layer_norm(x, [WIDTH], None, None, 1e-5)[0],
    "qr": lambda x: x + torch.linalg.qr(x).Q.sum(),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_several_results_are_a_refusal_and_no_fault(name: str) -> None:
    """A fault would raise: `compiled` is strict."""
    kept = check(Encoder(between=SEVERAL[name]), close=2e-5).kept
    assert kept is not None
    assert kept.code is Code.MIXES_POSITIONS


@pytest.mark.parametrize("is_masked", [False, True])
def test_linear_attention_below_an_attention_reads_what_is_known_at_padding(is_masked: bool) -> None:
    function = linear_variants.own("mamba2_chunk_scan")

    def ending(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        heads = (x * mask[..., None] if is_masked else x).unflatten(-1, (2, -1))
        decay = -torch.ones(2)
        out = function(heads, heads[..., 0], decay, heads, heads, chunk_size=16, dt_softplus=True)
        return out.flatten(2)  # type: ignore[no-any-return]

    model = Encoder(ending=ending).eval()
    kept = check(model).kept
    assert (kept is None) is is_masked
    assert kept is None or (kept.code is Code.MIXES_POSITIONS and "linear attention" in kept.observed)


# Which values exist for real tokens alone.
def test_queries_of_other_tokens_keep_padding_in() -> None:
    class Cross(Encoder):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor, **further: torch.Tensor) -> torch.Tensor:
            queries, keys = (
                self.words(x).view(*ids.shape, HEADS, -1).transpose(1, 2) for x in (further["asking"], ids)
            )
            return F.scaled_dot_product_attention(queries, keys, keys, attn_mask=self.allowed(mask)).transpose(1, 2)

    model, asking = Cross(), ids_of(ENCODED_MASK).flip(0)
    out = compiled(model)(ids_of(ENCODED_MASK), ENCODED_MASK, asking=asking)
    kept = report().kept
    assert kept is not None
    assert "same tokens" in kept.rule
    torch.testing.assert_close(out, model(ids_of(ENCODED_MASK), ENCODED_MASK, asking=asking))


def test_dropout_that_is_given_back_is_the_one_that_layers_read() -> None:
    class Shown(Encoder):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor, **further: torch.Tensor) -> tuple[torch.Tensor, ...]:
            x = F.dropout(self.words(ids), 0.5, self.training)
            return x, self.layers[0](x, self.allowed(mask))

    for training in (True, False):
        model = Shown().train(training)
        given, out = compiled(model)(ids_of(ENCODED_MASK), ENCODED_MASK)
        expected = model.layers[0](given, model.allowed(ENCODED_MASK))
        torch.testing.assert_close(
            on_real_tokens(out, ENCODED_MASK), on_real_tokens(expected, ENCODED_MASK), atol=2e-6, rtol=1e-5
        )
        assert (report().kept is not None) is training
