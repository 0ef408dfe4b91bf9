"""Which exponentials are a softmax, of what, and over which axis. Whole programs: tests/passes/matching/test_written_out.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_compiler.passes.graph import axes, views
from attn_compiler.passes.matching.patterns import shares, softmaxes
from attn_compiler.passes.matching.patterns.shares import QueryNumbers
from attn_compiler.passes.matching.patterns.softmaxes import Normalised, Softmax
from tests.passes.compiling import compiled, mirror_of

aten = torch.ops.aten


def _read(function: Callable[[Tensor], Tensor | tuple[Tensor, ...]]) -> tuple[list[Softmax], torch.fx.Node]:
    """What each exponential and softmax of `function` is, and the scores (2, 4, 5, 6) that it is given."""

    def run(x: Tensor) -> tuple[Tensor, ...]:
        found = function(x.sin())
        return tuple(y.cos() for y in (found if isinstance(found, tuple) else (found,)))

    mirror = mirror_of(run, torch.randn(2, 4, 5, 6))
    anchors = [n for n in mirror.graph.nodes if n.target in softmaxes.CALLS | softmaxes.WRITTEN_OUT]
    (sin,) = (n for n in mirror.graph.nodes if n.target is aten.sin.default)
    return [softmax for n in anchors if (softmax := softmaxes.read(mirror, n)) is not None], sin


def _over(s: Tensor, dim: int) -> Tensor:
    e = s.exp()
    return e / e.sum(dim, keepdim=True)


@pytest.mark.parametrize(
    ("function", "dim"),
    [
        (lambda s: s.softmax(-2), -2),
        (lambda s: F.log_softmax(s, -1).exp(), -1),
        (lambda s: _over(s, -1), -1),
        (lambda s: _over(s, 1), 1),
        (lambda s: _over(s, 2), 2),
        (lambda s: (e := s.exp()) / e.sum(-1).unsqueeze(-1), -1),
        (lambda s: (e := s.exp()) / e.sum(-1)[..., None], -1),
        (lambda s: (e := s.exp()) * e.sum(-1, keepdim=True).reciprocal(), -1),
        (lambda s: (s - s.logsumexp(-1, keepdim=True)).exp(), -1),
        (lambda s: (s - s.logsumexp(1)[:, None]).exp(), 1),
    ],
)
def test_a_softmax(function: Callable[[Tensor], Tensor], dim: int) -> None:
    (found,), scores = _read(function)
    assert found.scores is scores
    assert found.dim % 4 == dim % 4
    assert found.node in found.nodes
    assert scores not in found.nodes
    (user,) = (user for user in found.node.users if user not in found.nodes)
    assert (user.target is aten.cos.default) == found.is_divided


def _in_place(s: Tensor) -> Tensor:
    e = s.exp()
    total = e.sum(-1, keepdim=True)
    e[..., 0] = 0
    return e / total


@pytest.mark.parametrize(
    "function",
    [
        lambda s: s.exp(),
        lambda s: (e := s.exp()) / e.sum((-1, -2), keepdim=True),
        lambda s: (e := s.exp()) / e.sum(),
        lambda s: (e := s.exp()) / e.amax(-1, keepdim=True),
        lambda s: (e := s.exp()) * e.reciprocal().sum(-1, keepdim=True),
        lambda s: (s - s.logsumexp(-1, keepdim=True).reciprocal()).exp(),
        lambda s: (e := s.exp()) / e.square().sum(-1, keepdim=True),
        lambda s: (e := s.exp()[..., :5]) / e.sum(-1)[:, :, None],
        lambda s: (s - s.logsumexp(-1, keepdim=True).detach()).exp(),
        lambda s: (s - 2 * s.logsumexp(-1, keepdim=True)).exp(),
        lambda s: torch.sub(s, s.logsumexp(-1, keepdim=True), alpha=2).exp(),
        lambda s: (s.logsumexp(-1, keepdim=True) - s).exp(),
        lambda s: (s - (s + 1).logsumexp(-1, keepdim=True)).exp(),
        lambda s: (s.log_softmax(-1) * 2).exp(),
        lambda s: ((x := s.log_softmax(-1)).exp(), x),
        _in_place,
    ],
)
def test_what_is_none(function: Callable[[Tensor], Tensor]) -> None:
    assert _read(function)[0] == []


@pytest.mark.parametrize(
    ("function", "is_one"),
    [
        (lambda w: w / w.sum(-1, keepdim=True), True),
        (lambda w: w / w.sum(-1)[..., None], True),
        (lambda w: w / (w.sum(-1, keepdim=True) + 1e-9), False),
        (lambda w: w * w.sum(-1, keepdim=True).reciprocal(), False),
        (lambda w: w / w.sum(-1, keepdim=True).reciprocal(), False),
        (lambda w: w / w.cos().sum(-1, keepdim=True), False),
        (lambda w: w / w.sum(), False),
        (lambda w: w / 2, False),
    ],
)
def test_a_division_by_the_own_sum(function: Callable[[Tensor], Tensor], is_one: bool) -> None:
    mirror = mirror_of(lambda x: function(x.sin()).tan(), torch.randn(2, 4, 5, 6))
    (last,) = (n.args[0] for n in mirror.graph.nodes if n.target is aten.tan.default)
    (weights,) = (n for n in mirror.graph.nodes if n.target is aten.sin.default)
    found = softmaxes.normalised(mirror, last)
    assert (found == Normalised(weights=weights, dim=3)) == is_one
    assert found is None or is_one or found.floored


B, H, D = 2, 3, 8


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


X, Y = shares.X, sympy.Symbol("exp of arg1_1", positive=True)


SHAPE = (2, 3, 5)


QUOTIENTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], object]] = {
    "sigmoid": (lambda lse, s: torch.sigmoid(lse - s), X / (X + Y)),
    "of twice": (lambda lse, s: torch.sigmoid((lse - s) * 2), X**2 / (X**2 + Y**2)),
    "sum": (lambda lse, s: 2 + torch.exp(lse + s), 2 + X * Y),
    "halves": (lambda lse, s: torch.tanh(lse / 2), (X - 1) / (X + 1)),
    "a third": (lambda lse, s: torch.exp(lse / 3), None),
    "floored": (lambda lse, s: torch.div(lse.exp(), s, rounding_mode="floor"), None),
    "scaled sum": (lambda lse, s: torch.exp(torch.sub(lse, s, alpha=2)), None),
    "unknown": (lambda lse, s: torch.erf(lse) - s, None),
}


@pytest.mark.parametrize("name", QUOTIENTS)
def test_is_this_quotient(name: str) -> None:
    function, wanted = QUOTIENTS[name]
    mirror = mirror_of(function, torch.randn(SHAPE), torch.randn(3, 1))
    lse = next(node for node in mirror.graph.nodes if node.op == "placeholder")
    (result,) = next(node for node in mirror.graph.nodes if node.op == "output").all_input_nodes
    reading = shares.Reading(
        mirror, {lse: QueryNumbers(of=(X,), dims=axes.fresh(axes.shape_exprs(views.value(lse))), power=1.0)}
    )
    value = reading.value(result)
    if wanted is None:
        assert value is None
    else:
        assert value is not None
        assert value.power is None
        assert sympy.simplify(value.of[0] - wanted) == 0
