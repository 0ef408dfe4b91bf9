"""A softmax beside a logsumexp of the same scores: one site, which gives both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.passes.compiling import compiled

B, H, D = 2, 3, 8
Tensor = torch.Tensor
Both = tuple[Tensor, Tensor]


def scored(q: Tensor, k: Tensor) -> Tensor:
    scores = q @ k.mT * D**-0.5
    return scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)


def after(q: Tensor, k: Tensor, v: Tensor) -> Both:
    scores = scored(q, k)
    out = scores.softmax(-1) @ v
    return out, scores.logsumexp(-1)


def before(q: Tensor, k: Tensor, v: Tensor) -> Both:
    """What is made of it waits for the output."""
    scores = scored(q, k)
    lse = scores.logsumexp(-1, keepdim=True)
    entropy = (lse.exp() + 1).log().squeeze(-1).transpose(1, 2)
    return scores.softmax(-1) @ v, entropy * 2


def cast(q: Tensor, k: Tensor, v: Tensor) -> Both:
    scores = scored(q, k)
    lse = scores.to(torch.float64).transpose(1, 2).logsumexp(-1)
    return scores.softmax(-1) @ v, lse


def of_the_weights(q: Tensor, k: Tensor, v: Tensor) -> Both:
    scores = scored(q, k)
    lse = scores.logsumexp(-1, keepdim=True)
    return torch.exp(scores - lse) @ v, lse.squeeze(-1)


FORMS = {form.__name__: form for form in (after, before, cast, of_the_weights)}


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("function", FORMS.values(), ids=FORMS)
def test_both_come_from_one_kernel(function: Callable[..., Both], grad: bool) -> None:
    run = compiled(function, lowerings=["math"])
    for length in (13, 20):
        torch.manual_seed(0)
        given = [torch.randn(B, H, length, D).requires_grad_(grad) for _ in range(3)]
        wide = [x.detach().double().requires_grad_(grad) for x in given]
        got, right = run(*given), function(*wide)
        leaves: list[Any] = []
        for mine, wanted in zip(got, right, strict=True):
            torch.testing.assert_close(mine.double(), wanted, atol=3e-6, rtol=3e-5)
            assert mine.shape == wanted.shape
        if grad:
            leaves = [
                torch.autograd.grad(sum(x.double().sin().sum() for x in y), z) for y, z in ((got, given), (right, wide))
            ]
            for mine, wanted in zip(*leaves, strict=True):
                torch.testing.assert_close(mine.double(), wanted, atol=2e-5, rtol=1e-4)
    for report in run.reports:
        (site,) = report.sites
        assert site.spec.lse == ("differentiated" if grad else "read")
        assert site.decision.lowering == "math"


def test_what_is_written_to_does_not_wait() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Both:
        scores = scored(q, k)
        lse = scores.logsumexp(-1).mul_(2.0)
        return scores.softmax(-1) @ v, lse

    run = compiled(function, lowerings=["math"])
    given = [torch.randn(B, H, 13, D) for _ in range(3)]
    torch.testing.assert_close(run(*given), function(*given))
    (miss,) = run.report.misses
    assert "can wait for the output" in miss.reason.rule
    assert miss.reason.remedy == "take one logsumexp, and compute the output before what is made of the logsumexp"


def test_a_learned_number_in_the_maximum_alone_gets_its_zeros() -> None:
    """Found by the fuzzer. A softmax does not depend on it, and a caller may ask for its gradient."""

    def attention(sinks: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.mT
        e = (scores - torch.maximum(scores.amax(-1, keepdim=True), sinks)).exp()
        return (e @ v) / e.sum(-1, keepdim=True)

    sinks, (q, k, v) = torch.randn(3, 1, 1, requires_grad=True), (torch.randn(3, 5, 4) for _ in range(3))
    run = compiled(attention, strict=True)
    (gradient,) = torch.autograd.grad(run(sinks, q, k, v).sum(), sinks)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-5, rtol=0)
    assert run.report.num_sites == 0
    run = compiled(attention, strict=True)
    run(sinks.detach(), q, k, v)
    assert run.report.num_sites == 1
