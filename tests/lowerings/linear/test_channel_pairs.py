"""Products of two tokens with a decay for each channel: what they are pair by pair, their gradients, and what is not finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attn_compiler.lowerings.linear import channel_pairs  # noqa: F401 (the ops are registered by the import)

_OPS: Any = torch.ops.attn_compiler


def _given(size: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    rows, y = torch.randn(2, 3, size, 2, 5, dtype=dtype), torch.randn(2, 3, size, 5, dtype=dtype)
    return rows.requires_grad_(), y.requires_grad_(), (-torch.rand(2, 3, size, 5, dtype=dtype)).requires_grad_()


def _pair_by_pair(rows: Tensor, y: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    size = g.shape[2]
    start = torch.stack([g[:, :, : i + 1].sum(2) for i in range(size)], 2)
    end = torch.stack([g[:, :, i + 1 :].sum(2) for i in range(size)], 2)
    nothing = torch.zeros_like(rows[:, :, 0, :, 0])

    def pair(i: int, j: int) -> Tensor:
        return (rows[:, :, i] * (y[:, :, j] * g[:, :, j + 1 : i + 1].sum(2).exp()).unsqueeze(2)).sum(-1)

    pairs = [[pair(i, j) if j <= i else nothing for j in range(size)] for i in range(size)]
    return torch.stack([torch.stack(row, -1) for row in pairs], 2), start, end


@pytest.mark.parametrize("size", [1, 2, 16])
def test_they_are_what_they_are_pair_by_pair(size: int) -> None:
    given = _given(size)
    found, wanted = _OPS.linear_channel_pairs(*given), _pair_by_pair(*given)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    noise = [torch.randn_like(x) for x in wanted]
    grads = [torch.autograd.grad(outs, given, noise) for outs in (found, wanted)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-11)


def test_a_small_decay_after_a_large_one_has_its_digits() -> None:
    rows, y, g = (x.detach() for x in _given(16, torch.float32))
    g = g * 1e-3
    g[:, :, 5], g[:, :, 9] = -1000.0, -160.0
    wanted = _pair_by_pair(rows.double(), y.double(), g.double())
    torch.testing.assert_close(_OPS.linear_channel_pairs(rows, y, g)[0], wanted[0].float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_what_is_not_finite_stays_where_it_is(which: int) -> None:
    """In results and in gradients, which are finite where they are so pair by pair."""
    for token in range(8):
        given = [x.detach() for x in _given(8)]
        given[which][0, 1, token, ..., 2] = torch.nan
        leaves = [x.requires_grad_() for x in given]
        found, wanted = _OPS.linear_channel_pairs(*leaves)[0], _pair_by_pair(*leaves)[0]
        noise = torch.ones_like(found)
        ours, theirs = (torch.autograd.grad(x, leaves, noise) for x in (found, wanted))
        for one, other in zip((found, *ours), (wanted, *theirs), strict=True):
            kept = other.isfinite()
            assert bool(one[kept].isfinite().all()), token
            torch.testing.assert_close(one[kept], other[kept])
        assert found.isfinite().equal(wanted.isfinite())


def test_fakes_and_strides() -> None:
    given = [x.detach() for x in _given(4)]
    torch.library.opcheck(_OPS.linear_channel_pairs.default, tuple(x.requires_grad_() for x in given))
    turned = [x.detach().mT.contiguous().mT for x in given]
    torch.testing.assert_close(_OPS.linear_channel_pairs(*turned), _OPS.linear_channel_pairs(*given))
