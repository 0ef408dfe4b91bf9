"""What no pattern starts from has rows of its own in the report: one for each way, with all modules, and kept with the rewrite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from attn_compiler.passes.matching import unseen
from attn_compiler.reasons.codes import Code
from tests.passes.compiling import compiled

B, H, S, D = 1, 2, 6, 4


def linear_attention(q: Tensor) -> Tensor:
    return q @ (q.mT @ q)


class ByHand(nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        e = (q @ q.mT).exp()
        return (e @ q) / e.sum(-1, keepdim=True).clamp(min=1e-3)


class ByLogarithm(nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        s = q @ q.mT
        largest = s.amax(-1, keepdim=True)
        return (s - (s - largest).exp().sum(-1, keepdim=True).log() - largest).exp() @ q


class Linear(nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        return linear_attention(q)


class Attention(nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q)


def test_each_way_is_a_row_with_all_of_its_modules() -> None:
    model = nn.Sequential(ByHand(), Linear(), ByLogarithm(), ByHand(), Attention(), Linear())
    run = compiled(model)
    q = torch.randn(B, H, S, D) * 0.1
    torch.testing.assert_close(run(q), model(q))
    rows = [(miss.reason.code, miss.modules) for miss in run.report.misses]
    assert rows == [
        (Code.WRITTEN_BY_HAND, ("0", "3")),
        (Code.WRITTEN_BY_HAND, ("2",)),
        (Code.LINEAR_ATTENTION, ("1", "5")),
    ]
    assert run.report.num_sites == 1
    assert all(miss.source is not None and "torch.softmax" in miss.reason.advice for miss in run.report.misses[:2])


def weigh(s: Tensor) -> Tensor:
    e = s.exp()
    return e / e.sum(-1, keepdim=True)


def less(s: Tensor, largest: Tensor) -> Tensor:
    return weigh(s - torch.maximum(s.amax(-1, keepdim=True), largest))


def halved(s: Tensor) -> Tensor:
    with torch.no_grad():
        s = s / 2
    return weigh(s)


@pytest.mark.parametrize(
    ("attend", "code", "seen"),
    [
        (lambda q, s: weigh(s.clamp(-5, 5)) @ q, Code.BEFORE_SOFTMAX, "aten.clamp.default (clamp)"),
        (lambda q, s: ((w := weigh(s)) * (w > 0.01)) @ q, Code.AXES, "another mask than that of the scores"),
        (lambda q, s: ((e := s.exp()) / e.sum(-1, keepdim=True) @ q, e), Code.WRITTEN_BY_HAND, "read elsewhere, too"),
        (lambda q, s: halved(s) @ q, Code.GRADIENT_STOPPED, "div stops it"),
        (lambda q, s: less(s, q[..., :1]) @ q, Code.WRITTEN_BY_HAND, "whose gradient is zeros"),
    ],
)
def test_a_nearer_reason_than_how_a_softmax_is_written_wins(attend: Any, code: Code, seen: str) -> None:
    run = compiled(lambda q: attend(q, q @ q.mT))
    run((torch.randn(B, H, S, D) * 0.1).requires_grad_())
    (miss,) = run.report.misses
    assert (run.report.num_sites, run.report.num_misses, miss.reason.code) == (0, 1, code)
    assert seen in miss.reason.observed
    assert "test_unseen.py:" in miss.stopped_at


def test_a_graph_without_another_attention_has_them_too() -> None:
    run = compiled(nn.Sequential(Linear(), ByHand()))
    run(torch.randn(B, H, S, D))
    assert run.report.num_misses == 2
    assert "no attention was found" not in str(run.report)


def test_a_plain_graph_has_none() -> None:
    assert unseen.find(fx.symbolic_trace(nn.Sequential(nn.Linear(D, D), nn.Softplus()))).rows() == []
