"""The scan over chunks: its fake, its formula of autograd, and any strides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attn_compiler.lowerings.linear import scan_ops  # noqa: F401 (the ops are registered by the import)

_OPS: Any = torch.ops.attn_compiler


def _scan(*, with_w: bool, channel: bool) -> tuple[Tensor | None, ...]:
    chunks, pairs, size, dim_k, dim_v = 3, 2, 4, 5, 6
    torch.manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, dtype=torch.float64) * 0.5).requires_grad_()

    u, kd = normal(chunks, pairs, size, dim_v), normal(chunks, pairs, size, dim_k)
    cd = normal(chunks, pairs, dim_k if channel else 1, 1)
    return u, kd, cd, normal(pairs, dim_k, dim_v), normal(chunks, pairs, size, dim_k) if with_w else None


@pytest.mark.parametrize("with_w", [True, False])
@pytest.mark.parametrize("channel", [True, False])
def test_the_formula_of_the_scan_is_its_gradient(with_w: bool, channel: bool) -> None:
    given = _scan(with_w=with_w, channel=channel)

    def outs(*operands: Tensor | None) -> tuple[Tensor, ...]:
        states, last, v = _OPS.linear_scan(*operands)
        return (states, last, v) if with_w else (states, last)

    assert torch.autograd.gradcheck(outs, given)


@pytest.mark.parametrize("with_w", [True, False])
def test_fakes_are_as_what_is_given(with_w: bool) -> None:
    torch.library.opcheck(_OPS.linear_scan.default, _scan(with_w=with_w, channel=True))


def test_any_strides_are_read() -> None:
    given = [None if x is None else x.detach() for x in _scan(with_w=True, channel=True)]
    turned = [None if x is None else x.mT.contiguous().mT for x in given]
    torch.testing.assert_close(_OPS.linear_scan(*turned), _OPS.linear_scan(*given))
