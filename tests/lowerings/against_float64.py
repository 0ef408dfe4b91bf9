"""An attention that was compiled beside the same in eager float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.passes.compiling import Compiled


def assert_same(
    run: Compiled, attend: Callable[..., Tensor], given: Callable[[], list[Tensor]], within: float = 2e-5
) -> None:
    """Outputs, and gradients where there are any. The eager side computes in float64."""
    ours, theirs = given(), given()
    wide = [x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in theirs]
    found, expected = run(*ours), attend(*wide)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=within)
    if not found.requires_grad:
        return
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    (found * weights).sum().backward()
    (expected * weights.double()).sum().backward()
    for mine, other in zip(ours[:3], wide[:3], strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(mine.grad.double(), other.grad, rtol=0, atol=10 * within)
