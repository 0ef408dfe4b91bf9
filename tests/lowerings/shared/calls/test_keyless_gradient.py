"""The gradient of q and k from rows whose keys all got one number added, held against autograd of the definition in float64."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("heads_kv", [4, 2, 1])
def test_against_the_softmax_of_scores_beside_a_large_number(heads_kv: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 4, 7, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, heads_kv, 9, d, dtype=torch.float64, requires_grad=True) for d in (8, 6))
    upstream = torch.randn(2, 4, 7, 6, dtype=torch.float64)
    k_all, v_all = (x.repeat_interleave(4 // heads_kv, 1) for x in (k, v))
    # The number takes the digits of the scores, and their gradient passes on.
    scores = q @ k_all.mT * 0.3
    weights = (scores - scores.detach()).softmax(-1)
    exact = torch.autograd.grad(weights @ v_all, [q, k], upstream)
    out = torch.ops.attn_compiler.keyless_gradient(q, k, v, 0.3)
    assert out.shape == upstream.shape
    assert not out.any()
    found = torch.autograd.grad(out, [q, k], upstream)
    torch.testing.assert_close(found, exact)


def test_half_precision_has_gradients_of_its_own_dtype() -> None:
    q, k, v = (torch.randn(1, 2, 5, 4, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    out = torch.ops.attn_compiler.keyless_gradient(q, k, v, 0.5)
    assert out.dtype == torch.float32
    assert {x.dtype for x in torch.autograd.grad(out.sum(), [q, k])} == {torch.bfloat16}


def test_no_keys_at_all_give_no_gradient() -> None:
    q, k, v = (torch.randn(1, 2, n, 4, requires_grad=True) for n in (5, 0, 0))
    found = torch.autograd.grad(torch.ops.attn_compiler.keyless_gradient(q, k, v, 0.5).sum(), [q, k])
    assert torch.equal(found[0], torch.zeros_like(q))
    assert found[1].shape == k.shape
