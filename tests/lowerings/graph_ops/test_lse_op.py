"""The op that passes write where a logsumexp is read, run as it is. What it is lowered to:
passes/matching/patterns/test_lse_call.py."""

from __future__ import annotations

import pytest
import torch

from attn_compiler.lowerings.graph_ops.lse_op import attention_with_lse, softmax_and_lse

NOTHING = -torch.inf


def test_without_a_mask_it_is_sdpa_and_a_logsumexp() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, s, 8, dtype=torch.float64) for n, s in ((4, 5), (2, 7), (2, 7)))
    out, lse = attention_with_lse(q, k, v, scale=0.3)
    right = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(out, right)
    torch.testing.assert_close(lse, torch.logsumexp(q @ k.repeat_interleave(2, 1).mT * 0.3, -1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_of_the_outputs(dtype: torch.dtype) -> None:
    q, k, v = torch.randn(3, 1, 2, 4, 8).to(dtype)
    out, lse = attention_with_lse(q, k, v, None, True, scale=0.5, softcap=2.0)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_a_row_of_nothing_has_no_part_in_any_gradient() -> None:
    scores = torch.tensor([[NOTHING, NOTHING], [0.0, NOTHING], [1e5, 1e5]], dtype=torch.float64, requires_grad=True)
    weights, lse = softmax_and_lse(scores)
    assert weights.tolist() == [[0.0, 0.0], [1.0, 0.0], [0.5, 0.5]]
    assert lse.tolist()[:2] == [NOTHING, 0.0]
    (weights.square().sum() + torch.exp(lse - 1e5).sum()).backward()
    assert scores.grad is not None
    assert torch.isfinite(scores.grad).all()
    assert (scores.grad[0] == 0).all()


def test_its_gradients_are_those_of_differences() -> None:
    torch.manual_seed(1)
    tensors = [torch.randn(1, n, s, 4, dtype=torch.float64, requires_grad=True) for n, s in ((2, 3), (1, 5), (1, 5))]
    mask = torch.rand(3, 5) < 0.6
    mask[0] = True

    def both(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = attention_with_lse(q, k, v, mask, scale=0.4, softcap=1.0)
        return out, torch.exp(lse)

    assert torch.autograd.gradcheck(both, tensors)
