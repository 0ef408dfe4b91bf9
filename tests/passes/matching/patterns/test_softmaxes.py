"""Which exponentials are a softmax, of what, and over which axis. Whole programs: tests/passes/matching/test_written_out.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from attn_compiler.passes.matching.patterns import softmaxes
from attn_compiler.passes.matching.patterns.softmaxes import Normalised, Softmax
from tests.passes.compiling import mirror_of

Tensor = torch.Tensor
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
