"""Gradients of what has no tokens, and of results whose gradients lie in any way."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from attn_compiler.lowerings.linear import triton_op
from tests.lowerings.linear.triton_problems import FORMS, problem


def test_no_tokens_have_the_gradient_of_the_state() -> None:
    form = FORMS["delta"]
    given = dict(zip(form.roles, problem(form, (0, 2, 2, 16, 16)), strict=True))
    _, last = triton_op.run(list(given.values()), form.text)
    noise = torch.randn_like(last)
    (found,) = torch.autograd.grad(last, [given["state"]], noise)
    assert torch.equal(found, noise)


def test_the_gradient_of_a_result_may_lie_in_any_way() -> None:
    form = FORMS["delta"]
    given = problem(form, (70, 2, 2, 16, 16))
    out, _ = triton_op.run(given, form.text)
    noise = torch.randn_like(out)
    plain = torch.autograd.grad(out, given, noise, retain_graph=True)
    turned = torch.autograd.grad(out, given, noise.mT.contiguous().mT)
    for one, other in zip(plain, turned, strict=True):
        assert torch.equal(one, other)
