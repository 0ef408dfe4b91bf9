from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from attn_compiler.verifying import rounding, running
from attn_compiler.verifying.values import Values
from tests.verifying.planning import Tensor, planned, qkv

HALF = torch.finfo(torch.bfloat16).eps
SINGLE = torch.finfo(torch.float32).eps
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


def _alibi(q: Tensor, k: Tensor, slopes: Tensor) -> Tensor:
    return slopes[:, None, None] * (torch.arange(k.shape[-2]) - torch.arange(q.shape[-2])[:, None])


def _relative(make: Callable[..., Tensor], dtype: torch.dtype = torch.float32) -> float:
    def function(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=make(q, k, slopes))

    found = planned(function, *qkv(dtype=dtype), SLOPES.to(dtype))
    return rounding.relative(found.check("bias").site, Values(bodies=found.plan.mirrors))


def test_each_rounded_operation_counts_in_its_own_dtype() -> None:
    assert _relative(_alibi) == pytest.approx(3 * SINGLE)
    assert _relative(_alibi, torch.bfloat16) == pytest.approx(3 * HALF)
    more = _relative(lambda q, k, s: _alibi(q, k, s) / 3 + s[:, None, None], torch.bfloat16)
    assert more == pytest.approx(5 * HALF)


def test_a_conversion_counts_in_the_dtype_that_it_rounds_to() -> None:
    single = _relative(lambda q, k, s: _alibi(q, k, s.float()).bfloat16(), torch.bfloat16)
    assert single == pytest.approx(3 * HALF + 2 * SINGLE)


def test_what_only_moves_elements_does_not_count() -> None:
    assert _relative(lambda q, k, s: _alibi(q, k, s)[None].expand(2, -1, -1, -1).contiguous()) == pytest.approx(
        3 * SINGLE
    )


def test_what_is_handed_to_a_body_counts_with_the_widest_rounding_outside() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        bias = _alibi(q, k, slopes.bfloat16()).float()

        def body(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

        return checkpoint(body, q, k, v, use_reentrant=False)

    found = planned(function, *(x.requires_grad_() for x in qkv()), SLOPES)
    check = found.check("bias")
    assert rounding.relative(check.site, Values(bodies=found.plan.mirrors)) >= 8 * HALF
    assert [v.skipped for v in running.run_checks(found.plan, found.args).found] == [None] * 3
