"""What draws random numbers draws them once: two outputs that the model makes of one draw stay equal at real tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

from attn_compiler.reasons.codes import Code
from tests.passes.unpad.encoder import MASK, Encoder, check, compiled, ids_of, on_real_tokens, report

Tensor = torch.Tensor
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
    first, second = on_real_tokens(compiled(Twice(op))(ids_of(MASK), MASK), MASK)
    return torch.equal(first, second)


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("name", DRAWN)
def test_what_is_drawn_is_one_draw(name: str) -> None:
    assert _are_equal(DRAWN[name])


def test_an_op_that_is_not_known_is_told_by_its_tags(noisy: Op) -> None:
    assert _are_equal(noisy)


@pytest.mark.parametrize("between", [DRAWN["rrelu"], DRAWN["alpha dropout"], DRAWN["bernoulli"]])
def test_what_draws_between_layers_keeps_padding_in(between: Op) -> None:
    compiled(Encoder(between=between))(ids_of(MASK), MASK)
    kept = report().kept
    assert kept is not None
    assert kept.code is Code.PADDING_DRAWN
    assert kept.remedy is not None


def test_dropout_between_layers_does_not() -> None:
    compiled(Encoder(between=DRAWN["dropout"]))(ids_of(MASK), MASK)
    assert report().kept is None


@pytest.mark.parametrize("between", [lambda x: F.rrelu(x, training=False), lambda x: F.dropout(x, 0.0, training=True)])
def test_what_is_told_to_draw_nothing_is_packed(between: Op) -> None:
    assert check(Encoder(between=between), close=2e-5).kept is None
