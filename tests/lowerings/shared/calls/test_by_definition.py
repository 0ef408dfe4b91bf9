"""Attention by its definition, held against the oracle that kernels are held against: every part, and gradients."""

from __future__ import annotations

import pytest
import torch

from attn_compiler.lowerings.shared.calls import by_definition
from attn_compiler.lowerings.shared.calls.arguments import prepare
from attn_compiler.lowerings.shared.calls.by_definition import philox
from tests.lowerings import kernel_problems
from tests.lowerings.kernel_cases import ALL, Case
from tests.lowerings.kernel_problems import Problem, build

Tensor = torch.Tensor


def _results(problem: Problem) -> list[Tensor]:
    with kernel_problems.planned(problem.plan):
        attention = prepare(problem.text).attention(problem.q, problem.k, problem.v, problem.named)
    with torch.no_grad():
        out, lse = by_definition.forward(attention)
        if not problem.case.needs_grad:
            return [out, lse]
        grad_out, grad_lse = kernel_problems.upstream(problem, out, lse)
        grads = by_definition.backward(attention, grad_out, grad_lse, out, lse)
    return [out, lse, grads.q, grads.k, grads.v, *(grads.further[name] for name in problem.plan.differentiable)]


@pytest.mark.in_turns
@pytest.mark.parametrize("most", [1 << 25, 1 << 10], ids=["at once", "in parts"])
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_outputs_and_gradients(case: Case, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_definition, "_MOST_SCORES", most)
    problem = build(case)
    kernel_problems.assert_within_rule(_results(problem), problem)


def test_the_lse_of_all_parts_of_a_merged_attention() -> None:
    """Weights are those of the lse that is given, and minus delta takes the place of its gradient."""
    torch.manual_seed(0)
    q, k, v, grad_out = (torch.randn(1, 2, 7, 4, dtype=torch.float64) for _ in range(4))
    wide_k, wide_v = (torch.cat((x, torch.randn_like(x)), 2).requires_grad_() for x in (k, v))
    whole = (q @ wide_k.mT).softmax(-1) @ wide_v
    right_k, right_v = torch.autograd.grad(whole, [wide_k, wide_v], grad_out)
    lse = torch.logsumexp(q @ wide_k.detach().mT, -1)
    minus_delta = -(whole.detach() * grad_out).sum(-1)
    part = by_definition.Attention(q=q, k=k, v=v, tensors={}, scale=1.0)
    found = by_definition.backward(part, grad_out, minus_delta, torch.zeros_like(grad_out), lse)
    torch.testing.assert_close(found.k, right_k[:, :, :7])
    torch.testing.assert_close(found.v, right_v[:, :, :7])


def test_nan_at_what_nobody_uses_gets_nowhere() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 6, 4) for _ in range(3))
    keys = torch.tensor([[True, True, True, True, False, False]])
    clean = by_definition.Attention(q=q, k=k, v=v, tensors={"keys": keys}, scale=0.5)
    k_bad, v_bad = (torch.where(keys[:, None, :, None], x, torch.nan) for x in (k, v))
    bad = by_definition.Attention(q=q, k=k_bad, v=v_bad, tensors={"keys": keys}, scale=0.5)
    for one, other in zip(by_definition.forward(clean), by_definition.forward(bad), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_philox() -> None:
    """The known answers of Random123 for 4x32-10: zeros, ones and digits of pi (the fourth number of the counter is 0 here)."""
    zero = torch.zeros((), dtype=torch.int64)
    assert int(philox(torch.zeros(1, dtype=torch.int64), zero, zero, zero)) == 0x6627E8D5
