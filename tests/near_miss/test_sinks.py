"""What a model makes of the logsumexp of its scores and is nearly that of sinks: the factor stays, and the site hands on its logsumexp."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attn_compiler.reporting.report import Report
from tests.near_miss.checking import BATCH, HEAD_DIM, HEADS, Case, Cases, check, described, missed, tensors, with_lse

LENGTH = 12
SHAPE = (BATCH, HEADS, LENGTH, HEAD_DIM)
CASES = Cases()


def given(*shape: int) -> list[Tensor]:
    return tensors(SHAPE, SHAPE, SHAPE, shape or (HEADS, 1, 1))


def scored(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT * 0.25).masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -1e30)


def by_factor(factor: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def function(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        scores = scored(q, k)
        return scores.softmax(-1) @ v * factor(scores.logsumexp(-1, keepdim=True), sinks)

    return function


FACTORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "turned round": lambda lse, s: torch.sigmoid(s - lse),
    "twice the difference": lambda lse, s: torch.sigmoid(2 * (lse - s)),
    "a third of the difference": lambda lse, s: torch.sigmoid((lse - s) / 3),
    "times the logits": lambda lse, s: torch.sigmoid(lse * s),
    "the logits besides": lambda lse, s: torch.sigmoid(lse - s) * s,
    "logits of the logsumexp": lambda lse, s: torch.sigmoid(lse - s * lse.mean(2, keepdim=True)),
    "clamped": lambda lse, s: torch.sigmoid((lse - s).clamp(-1, 1)),
    "without its gradient": lambda lse, s: torch.sigmoid(lse.detach() - s),
    "other queries": lambda lse, s: torch.sigmoid(lse.flip(2) - s),
    "two columns": lambda lse, s: torch.exp(lse - torch.cat([lse, lse, s.expand_as(lse)], -1).logsumexp(-1, True)),
    "the sink's own weight": lambda lse, s: torch.stack([lse, s.expand_as(lse)]).softmax(0)[1],
    "written to behind a view": lambda lse, s: _stale(lse - s),
}


def _stale(x: Tensor) -> Tensor:
    view = x.view(x.shape)
    view.sigmoid_()
    return x.view(x.shape).sigmoid()


def without_sinks(report: Report) -> None:
    """The site hands on its logsumexp, or is none where what is made of that is written to."""
    assert all(site.spec.score.sinks is None and site.spec.lse != "unread" for site in report.sites)
    assert report.sites or "can wait" in report.misses[0].reason.rule


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("name", FACTORS)
def test_factors(name: str) -> None:
    check(Case(name=name, function=by_factor(FACTORS[name]), judge=without_sinks, inputs=given))


def by_sum(weights: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda q, k, v, sinks: weights(scored(q, k), sinks) @ v


def _less(a: Tensor) -> tuple[Tensor, Tensor]:
    largest = a.amax(-1, keepdim=True)
    return (a - largest).exp(), largest


def _over(e: Tensor, more: Tensor | float) -> Tensor:
    return e / (e.sum(-1, keepdim=True) + more)


def _less_the_larger(a: Tensor, s: Tensor) -> Tensor:
    largest = torch.maximum(a.amax(-1, keepdim=True), s)
    e = (a - largest).exp()
    return e / ((s - largest).exp() + e.sum(-1, keepdim=True))


def _larger_and_a_little(a: Tensor, s: Tensor) -> Tensor:
    return _over((a - torch.maximum(a.amax(-1, keepdim=True), s + 40)).exp(), 1e-9)


def _put_back(a: Tensor, s: Tensor) -> Tensor:
    largest = a.amax(-1)
    e = (a - largest[..., None]).exp()
    return e / (e.sum(-1) + (s[..., 0] - largest).exp()).unsqueeze(-1)


#: weights of scores and logits
SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "less the maximum": lambda a, s: _over((parts := _less(a))[0], (s - parts[1]).exp()),
    "less the larger one": _less_the_larger,
    "of plain exponentials": lambda a, s: _over(a.exp(), s.exp()),
    "one": lambda a, s: _over(a.exp(), 1.0),
    "put back": _put_back,
}
OTHER_SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a logit that keeps the maximum": lambda a, s: _over(_less(a)[0], s.exp()),
    "less twice the maximum": lambda a, s: _over(_less(a)[0], (s - 2 * _less(a)[1]).exp()),
    "scaled after the maximum": lambda a, s: _over(((a - a.amax(-1, True)) * 2).exp(), (s - a.amax(-1, True)).exp()),
    "scores with an offset": lambda a, s: _over(_less(a + 3)[0], (s - _less(a + 3)[1]).exp()),
    "less than the sum": lambda a, s: _over(a.exp(), -0.5),
    "a logit of the scores": lambda a, s: _over(a.exp(), a[..., :1].exp()),
    "a number beside a larger maximum": _larger_and_a_little,
    "masked afterwards": lambda a, s: _over(a.exp(), s.exp()) * torch.ones(LENGTH, LENGTH).tril(-1),
}


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("name", SUMS)
def test_sinks_in_the_sum_itself(name: str) -> None:
    check(Case(name=name, function=by_sum(SUMS[name]), judge=described("sinks"), inputs=given))


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("name", OTHER_SUMS)
def test_other_terms_of_the_sum(name: str) -> None:
    check(Case(name=name, function=by_sum(OTHER_SUMS[name]), judge=missed(""), inputs=given))


@CASES.near_miss(with_lse, inputs=lambda: given(1, LENGTH, 1))
def a_logit_for_each_query(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    return by_factor(lambda lse, s: torch.sigmoid(lse - s))(q, k, v, sinks)


@CASES.near_miss(missed("nothing besides the softmax", "logsumexp"), inputs=given)
def a_logsumexp_of_other_scores(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = q @ k.mT * 0.25
    share = torch.sigmoid(scores.logsumexp(-1, keepdim=True) - sinks)
    return scores.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -1e30).softmax(-1) @ v * share


@CASES.near_miss(missed("nothing besides the softmax", "logsumexp"), inputs=given)
def a_logsumexp_over_the_queries(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = scored(q, k)
    return scores.softmax(-1) @ v * torch.sigmoid(scores.logsumexp(-2)[..., None] - sinks)


@CASES.near_miss(missed("as the softmax has them", "a number is added"), inputs=given)
def a_logsumexp_of_scores_with_an_offset(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = scored(q, k) + 3.0
    return scores.softmax(-1) @ v * torch.sigmoid(scores.logsumexp(-1, keepdim=True) - sinks)


@CASES.near_miss(with_lse, inputs=given)
def a_logsumexp_that_is_returned(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    scores = scored(q, k)
    lse = scores.logsumexp(-1, keepdim=True)
    return scores.softmax(-1) @ v * torch.sigmoid(lse - sinks), lse


@CASES.near_miss(with_lse, inputs=given)
def an_output_that_is_read_without_its_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = scored(q, k)
    out = scores.softmax(-1) @ v
    return out * torch.sigmoid(scores.logsumexp(-1, keepdim=True) - sinks) + out


@CASES.near_miss(with_lse, inputs=given)
def a_view_of_the_output_before_it_is_written(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = scored(q, k)
    out = scores.softmax(-1) @ v
    view = out.transpose(1, 2)
    out *= torch.sigmoid(scores.logsumexp(-1, keepdim=True) - sinks)
    return view * 1.0


@CASES.near_miss(with_lse, inputs=lambda: [x.detach() for x in given()])
def keys_that_are_written_before_the_factor(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    keys = k + 1
    scores = scored(q, keys)
    out = scores.softmax(-1) @ v
    keys.mul_(2.0)
    return out * torch.sigmoid(scores.logsumexp(-1, keepdim=True) - sinks) + keys.mean()


@CASES.near_miss(with_lse, inputs=lambda: tensors(*[(BATCH, HEADS, HEADS, HEAD_DIM)] * 3, (HEADS, 1, 1)))
def queries_where_heads_would_be(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = q @ k.mT * 0.25
    return scores.softmax(-1) @ v * torch.sigmoid(scores.logsumexp(-1).transpose(1, 2)[..., None] - sinks)


@CASES.near_miss(described("sinks"), inputs=given)
def good(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    return by_factor(lambda lse, s: torch.sigmoid(lse - 2 * s))(q, k, v, sinks)


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sinks(case: Case) -> None:
    check(case)
