"""Sinks that a model applies behind the softmax, in every spelling: a site with sinks, and the numbers of a column beside the scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes.compiling import Compiled, compiled

B, H, D = 2, 3, 8
SIZES = (13, 20)
Function = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
#: of the logsumexp (B, H, S, 1) and the logits (1, H, 1, 1): what the output is multiplied by
Share = Callable[[Tensor, Tensor], Tensor]


def masked(q: Tensor, k: Tensor) -> Tensor:
    """Scores that are causal; the first two keys are padding in the second row, so that queries there have none."""
    scores = q @ k.mT * D**-0.5
    index = torch.arange(scores.shape[-1])
    padding = index >= 2 * torch.arange(B)[:, None, None, None]
    return scores.masked_fill((index > index[:, None]) | ~padding, torch.finfo(scores.dtype).min)


def exact(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = masked(q, k)
    column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v


def joined(lse: Tensor, sinks: Tensor) -> Tensor:
    return torch.cat([lse, sinks.expand_as(lse)], -1)


def stable(lse: Tensor, sinks: Tensor) -> Tensor:
    top = torch.maximum(lse, sinks.expand_as(lse))
    own = (lse - top).exp()
    return own / (own + (sinks - top).exp())


SHARES: dict[str, Share] = {
    "sigmoid": lambda lse, s: torch.sigmoid(lse - s),
    "of the other": lambda lse, s: 1 - torch.sigmoid(s - lse),
    "of what is negated": lambda lse, s: torch.sigmoid(-(s - lse)),
    "exp of logsigmoid": lambda lse, s: F.logsigmoid(lse - s).exp(),
    "exp of softplus": lambda lse, s: torch.exp(-F.softplus(s - lse)),
    "tanh": lambda lse, s: 0.5 * (1 + torch.tanh((lse - s) / 2)),
    "one over": lambda lse, s: 1 / (1 + torch.exp(s - lse)),
    "reciprocal": lambda lse, s: torch.reciprocal(1 + torch.exp(-(lse - s))),
    "exponentials": lambda lse, s: lse.exp() / (lse.exp() + s.exp()),
    "powers of two": lambda lse, s: 1 / (1 + torch.exp2((s - lse) / math.log(2))),
    "logaddexp": lambda lse, s: torch.exp(lse - torch.logaddexp(lse, s.expand_as(lse))),
    "log of a sum": lambda lse, s: torch.exp(lse - torch.log(lse.exp() + s.exp())),
    "logsumexp": lambda lse, s: torch.exp(lse - joined(lse, s).logsumexp(-1, keepdim=True)),
    "softmax": lambda lse, s: joined(lse, s).softmax(-1)[..., :1],
    "softmax, split": lambda lse, s: joined(lse, s).softmax(-1).split(1, dim=-1)[0],
    "softmax, stacked": lambda lse, s: torch.stack([s.expand_as(lse), lse]).softmax(0)[1],
    "log_softmax": lambda lse, s: torch.stack([lse, s.expand_as(lse)], 1).log_softmax(1).select(1, 0).exp(),
    "stable": stable,
    "wide": lambda lse, s: torch.sigmoid(lse.float() - s.float()).to(lse.dtype),
}


def by_share(share: Share) -> Function:
    def function(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        scores = masked(q, k)
        return scores.softmax(-1) @ v * share(scores.logsumexp(-1, keepdim=True), sinks.view(1, -1, 1, 1))

    return function


def of_granite(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = masked(q, k)
    share = (torch.logsumexp(scores, dim=-1) - sinks.view(1, -1, 1)).to(torch.float32).sigmoid()
    out = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v
    return (out * share.unsqueeze(-1).to(out.dtype)).transpose(1, 2).contiguous().transpose(1, 2)


def after_a_transpose(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = masked(q, k)
    out = (scores.softmax(-1) @ v).transpose(1, 2)
    return (torch.sigmoid(scores.logsumexp(-1).transpose(1, 2) - sinks)[..., None] * out).transpose(1, 2)


def in_place(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = masked(q, k)
    out = scores.softmax(-1) @ v
    out.mul_(scores.logsumexp(-1, keepdim=True).sub_(sinks[:, None, None]).sigmoid_())
    return out.transpose(1, 2).clone().transpose(1, 2)


def as_a_divisor(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = masked(q, k)
    return scores.softmax(-1) @ v / (1 + torch.exp(sinks[:, None, None] - scores.logsumexp(-1, keepdim=True)))


def on_the_weights(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = masked(q, k)
    share = torch.sigmoid(scores.logsumexp(-1, keepdim=True) - sinks[:, None, None])
    return (scores.softmax(-1) * share) @ v


def less_the_logsumexp(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = masked(q, k)
    lse = scores.logsumexp(-1, keepdim=True)
    return torch.exp(scores - lse) @ v * torch.sigmoid(lse - sinks[:, None, None])


def over_all_heads_at_once(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    batch, heads, length, _ = q.shape
    scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).view(batch, heads, length, length) * D**-0.5
    index = torch.arange(length)
    shut = (index > index[:, None]) | (index < 2 * torch.arange(batch)[:, None, None, None])
    scores = scores.masked_fill(shut, torch.finfo(scores.dtype).min).flatten(0, 1)
    out = torch.bmm(scores.softmax(-1), v.flatten(0, 1)).unflatten(0, (batch, heads))
    return out * torch.sigmoid(scores.logsumexp(-1).unflatten(0, (batch, heads)) - sinks[:, None])[..., None]


FORMS: dict[str, Function] = {
    **{name: by_share(share) for name, share in SHARES.items()},
    "granite": of_granite,
    "after a transpose": after_a_transpose,
    "in place": in_place,
    "as a divisor": as_a_divisor,
    "on the weights": on_the_weights,
    "less the logsumexp": less_the_logsumexp,
    "all heads at once": over_all_heads_at_once,
}


def inputs(length: int, *, grad: bool = False, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    made = [*(torch.randn(B, H, length, D) for _ in range(3)), torch.randn(H)]
    return [x.to(dtype).requires_grad_(grad) for x in made]


def check(function: Function, like: Function, *, grad: bool, **options: Any) -> Compiled:
    run = compiled(function, **{"lowerings": ["math"], **options})
    for length in SIZES:
        given = inputs(length, grad=grad)
        wide = [x.detach().double().requires_grad_(grad) for x in given]
        results, right = run(*given), like(*wide)
        torch.testing.assert_close(results.double(), right, atol=3e-6, rtol=3e-5)
        if grad:
            found = torch.autograd.grad(results.sin().sum(), given)
            for mine, wanted in zip(found, torch.autograd.grad(right.sin().sum(), wide), strict=True):
                torch.testing.assert_close(mine.double(), wanted, atol=2e-5, rtol=1e-4)
    return run


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("function", FORMS.values(), ids=FORMS)
def test_is_a_site_with_sinks(function: Function) -> None:
    run = check(function, exact, grad=True)
    for report in run.reports:
        assert not report.misses
        (site,) = report.sites
        assert site.spec.score.sinks is not None
        assert site.spec.score.sinks.requires_grad
        assert site.spec.lse == "unread"
    assert not {"logsumexp", "sigmoid", "tanh", "exp"} & set(run.calls)


@pytest.mark.parametrize("logit", [0.0, 0.75])
def test_one_number_for_all_heads(logit: float) -> None:
    """A logit of 0 is the softmax with a one in its denominator."""
    run = check(
        by_share(lambda lse, s: torch.sigmoid(lse - logit)),
        lambda q, k, v, s: exact(q, k, v, torch.full_like(s, logit)),
        grad=False,
    )
    assert all(report.sites[0].spec.score.sinks is not None for report in run.reports)


def test_half_precision_is_as_near_as_the_model() -> None:
    given = inputs(SIZES[0], dtype=torch.bfloat16)
    run = compiled(of_granite, lowerings=["math"])
    got, right = run(*given), exact(*(x.double() for x in given))
    assert (got - right).abs().max() <= 2 * (of_granite(*given) - right).abs().max()
    assert run.site.spec.score.sinks is not None
