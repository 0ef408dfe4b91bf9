"""Exponentials that are divided by their sum, before or after the product with v, and what is nearly such a division."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_compiler.reporting.report import Report
from tests.near_miss.checking import BATCH, HEAD_DIM, HEADS, Case, check, described, tensors, with_lse

LENGTH = 12
SHAPE = (BATCH, HEADS, LENGTH, HEAD_DIM)
Outputs = Tensor | tuple[Tensor, ...]
#: outputs of scores, v and one logit a head
Function = Callable[[Tensor, Tensor, Tensor], Outputs]


def given() -> list[Tensor]:
    return tensors(SHAPE, SHAPE, SHAPE, (HEADS, 1, 1))


def of_scores(function: Function) -> Callable[..., Outputs]:
    def attention(q: Tensor, k: Tensor, v: Tensor, logits: Tensor) -> Outputs:
        scores = (q @ k.mT * 0.25).masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -1e30)
        return function(scores, v, logits)

    return attention


def _sum(e: Tensor) -> Tensor:
    return e.sum(-1, keepdim=True)


def _less(s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The maximum, the exponentials without it, and their sum."""
    largest = s.amax(-1, keepdim=True)
    e = (s - largest).exp()
    return largest, e, _sum(e)


def _without_the_gradient_of_the_maximum(s: Tensor, v: Tensor, _: Tensor) -> Tensor:
    e = (s - s.max(-1, keepdim=True).values.detach()).exp()
    return e @ v / _sum(e)


def _put_back(s: Tensor, v: Tensor, x: Tensor) -> Tensor:
    largest = s.amax(-1)
    e = (s - largest[..., None]).exp()
    return e @ v / (e.sum(-1) + (x[..., 0] - largest).exp()).unsqueeze(-1)


def _less_the_larger(s: Tensor, v: Tensor, x: Tensor) -> Tensor:
    largest = torch.maximum(s.amax(-1, keepdim=True), x)
    e = (s - largest).exp()
    return e @ v / ((x - largest).exp() + _sum(e))


def _with_the_lse(s: Tensor, v: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    largest, e, total = _less(s)
    return e @ v / total, (largest + total.log()).squeeze(-1)


def _by_the_lse(s: Tensor, v: Tensor, x: Tensor) -> Tensor:
    largest, e, total = _less(s)
    return e @ v / total * torch.sigmoid(largest + total.log() - x)


def _without_rows(s: Tensor, v: Tensor, _: Tensor) -> Tensor:
    e = s.exp()
    return e.masked_fill((torch.arange(LENGTH) < 3)[:, None], 0) @ v / _sum(e)


plain, sinks = described("scale 0.25", "causal (proved)"), described("sinks", "causal (proved)")
DIVIDED: dict[str, tuple[Function, Callable[[Report], None]]] = {
    "after": (lambda s, v, _: (e := s.exp()) @ v / _sum(e), plain),
    "after, less the maximum": (lambda s, v, _: (p := _less(s))[1] @ v / p[2], plain),
    "times a quotient": (lambda s, v, _: (e := s.exp()) @ v * (1 / _sum(e)), plain),
    "weights times a quotient": (lambda s, v, _: ((e := s.exp()) * (1 / _sum(e))) @ v, plain),
    "weights times a power": (lambda s, v, _: ((e := s.exp()) * _sum(e) ** -1) @ v, plain),
    "less a number": (lambda s, v, _: (e := (s - 5).exp()) @ v / _sum(e), plain),
    "beside a little": (lambda s, v, _: (p := _less(s))[1] @ v / (p[2] + 1e-9), plain),
    "kept from zero": (lambda s, v, _: (p := _less(s))[1] @ v / p[2].clamp(min=1e-6), plain),
    "the maximum without its gradient": (_without_the_gradient_of_the_maximum, plain),
    "moved": (lambda s, v, _: ((e := s.exp()) @ v).transpose(1, 2) / e.sum(-1).mT[..., None], plain),
    "cast": (lambda s, v, _: (e := s.double().exp()).float() @ v / _sum(e).float(), plain),
    "dropped": (lambda s, v, _: F.dropout(e := s.exp(), 0.0) @ v / _sum(e), plain),
    "rows left out": (_without_rows, described("3 <= q (proved)")),
    "its logsumexp beside": (_with_the_lse, with_lse),
    "a sink": (lambda s, v, x: (p := _less(s))[1] @ v / (p[2] + (x - p[0]).exp()), sinks),
    "a sink, less the larger one": (_less_the_larger, sinks),
    "a sink, put back": (_put_back, sinks),
    "a sink by the logsumexp": (_by_the_lse, sinks),
    "one more": (lambda s, v, _: (e := s.exp()) @ v / (1 + _sum(e)), sinks),
    "half of one more": (lambda s, v, _: (e := s.exp()) / (_sum(e) + 0.5) @ v, sinks),
    "one more, less the maximum": (lambda s, v, _: (p := _less(s))[1] @ v / (p[2] + (-p[0]).exp()), sinks),
}


def _another_maximum(s: Tensor, v: Tensor, x: Tensor) -> Tensor:
    largest = s.amax(-1, keepdim=True)
    e = (s - largest.detach()).exp()
    return e @ v / (_sum(e) + (x - largest).exp())


def _renormalised(s: Tensor, v: Tensor, x: Tensor) -> Tensor:
    largest, e, total = _less(s)
    weights = e / (total + (x - largest).exp())
    return weights / _sum(weights) @ v


def _written_to(s: Tensor, v: Tensor, _: Tensor) -> Tensor:
    e = s.detach().exp()
    total = _sum(e)
    e[..., 0] = 0
    return e @ v / total


def _dropped(s: Tensor, v: Tensor, _: Tensor) -> Tensor:
    e = F.dropout(s.exp(), 0.5)
    return e @ v / _sum(e)


NOT_DIVIDED: dict[str, Function] = {
    "by nothing": lambda s, v, _: (e := s.exp()) @ v * _sum(e),
    "twice": lambda s, v, _: ((e := s.exp()) / _sum(e)) @ v / _sum(e),
    "twice, once kept from zero": lambda s, v, _: (e := s.exp()) / _sum(e).clamp(min=1e-3) @ v / _sum(e),
    "by a root": lambda s, v, _: (e := s.exp()) @ v / _sum(e).sqrt(),
    "along queries": lambda s, v, _: (e := s.exp()) @ v / e.sum(-2)[..., None],
    "of other exponentials": lambda s, v, _: s.exp() @ v / _sum((s * 2).exp()),
    "of a part": lambda s, v, _: (e := s.exp()) @ v / _sum(e[..., :4]),
    "of other queries": lambda s, v, _: (e := s.exp()) @ v / _sum(e).flip(2),
    "of what dropout left": _dropped,
    "of squares": lambda s, v, _: (e := s.exp()) @ v / _sum(e.square()),
    "without its gradient": lambda s, v, _: (e := s.exp()) @ v / _sum(e).detach(),
    "kept from zero without a maximum": lambda s, v, _: (e := s.exp()) @ v / _sum(e).clamp(min=1e-6),
    "beside more than a little": lambda s, v, _: (p := _less(s))[1] @ v / (p[2] + 1e-6),
    "less than a number": lambda s, v, _: (e := s.exp()) @ v / (_sum(e) - 0.5),
    "masked after the sum": lambda s, v, _: ((e := s.exp()) * torch.ones(LENGTH, LENGTH).tril(-1)) @ v / _sum(e),
    "in whole numbers": lambda s, v, _: (e := s.exp()) @ v / _sum(e).to(torch.int32),
    "returned, too": lambda s, v, _: ((e := s.exp()) @ v / _sum(e), e),
    "written to": _written_to,
    "a logit of the scores": lambda s, v, _: (e := s.exp()) @ v / (_sum(e) + s[..., :1].exp()),
    "a logit for each query": lambda s, v, _: (e := s.exp()) @ v / (_sum(e) + v[..., :1].exp()),
    "less another maximum": _another_maximum,
    "less twice the maximum": lambda s, v, x: (p := _less(s))[1] @ v / (p[2] + (x - 2 * p[0]).exp()),
    "a logit that keeps the maximum": lambda s, v, x: (p := _less(s))[1] @ v / (p[2] + x.exp()),
    "two sinks": lambda s, v, x: (e := s.exp()) @ v / (_sum(e) + 1) * torch.sigmoid(_sum(e).log() - x),
    "a sink, divided by what is left": _renormalised,
}


def no_site(report: Report) -> None:
    assert not report.sites, f"taken for attention: {report.sites}"


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("name", DIVIDED)
def test_divided_by_their_sum(name: str) -> None:
    function, judge = DIVIDED[name]
    check(Case(name=name, function=of_scores(function), judge=judge, inputs=given))


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("name", NOT_DIVIDED)
def test_not_divided_by_their_sum(name: str) -> None:
    check(Case(name=name, function=of_scores(NOT_DIVIDED[name]), judge=no_site, inputs=given))


@pytest.mark.parametrize("dynamic", [False, None])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_sum_in_float32_divides_a_product_in_half_precision(dtype: torch.dtype, dynamic: bool | None) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        _, e, total = _less((q @ k.mT).float() * 0.25)
        return (e.to(dtype) @ v / total).to(dtype)

    def inputs(length: int) -> Callable[[], list[Any]]:
        return lambda: tensors(*[(BATCH, HEADS, length, HEAD_DIM)] * 3, dtype=dtype)

    for length in (LENGTH, LENGTH + 1):
        judge = described("scale 0.25")
        check(Case(name="cast", function=attention, judge=judge, inputs=inputs(length), dynamic=dynamic))
