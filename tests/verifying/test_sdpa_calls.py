"""SDPA as the model called it, run again without gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import attn_compiler
from attn_compiler.verifying import sdpa_calls

Tensor = torch.Tensor


def test_a_mask_of_one_axis_gets_a_second_one() -> None:
    q, mask = torch.ones(1, 1, 2, 4), torch.ones(2)
    args, kwargs = sdpa_calls.with_rows(F.scaled_dot_product_attention, (q, q, q, mask), {"scale": 1.0})
    assert args[3].shape == (1, 2)
    assert kwargs == {"scale": 1.0}
    _, kwargs = sdpa_calls.with_rows(F.scaled_dot_product_attention, (q, q, q), {"attn_mask": mask})
    assert kwargs["attn_mask"].shape == (1, 2)


@pytest.mark.parametrize("mask", [None, torch.ones(2, 2)])
def test_everything_else_stays(mask: Tensor | None) -> None:
    q = torch.ones(1, 1, 2, 4)
    args, _ = sdpa_calls.with_rows(F.scaled_dot_product_attention, (q, q, q, mask), {})
    assert args[3] is mask
    assert sdpa_calls.with_rows(torch.mul, (q, 2), {}) == ((q, 2), {})


@pytest.mark.parametrize("written_out", [False, True])
def test_a_bias_of_one_axis_that_wants_a_gradient_is_verified(written_out: bool) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        if written_out:
            return (q @ k.mT * 0.5 + bias).softmax(-1) @ v
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    given = [torch.randn(2, 2, 3, 4, requires_grad=True) for _ in range(3)]
    bias = torch.randn(3, requires_grad=True)
    options = {"verify": True, "strict": True, "inner": "aot_eager"}
    compiled = torch.compile(attention, backend="attn_compiler", options=options)
    torch.testing.assert_close(compiled(*given, bias), attention(*given, bias))
    assert attn_compiler.reports()
