"""Sums of decays over a chunk, each made of what it is a sum of: a difference of two large sums would lose a small one's digits.

A reset is a decay of -inf, and two sums up to it have no difference. So a decay stands for at most a factor of exp(-1000), which is 0 in
every dtype.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_LOWEST = -1000.0
#: whole numbers of this size have sums without rounding in float32, over a chunk
_STEP = 2.0**-8


def bounded(g: Tensor) -> Tensor:
    """`g` with numbers whose sums are finite, where it is not NaN and does not grow."""
    return g.clamp(min=_LOWEST)


def sums(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of g (..., C): the sum after token j and up to token i, (..., C, C), -inf where i is before j; up to each token; after each token."""
    found: tuple[Tensor, Tensor, Tensor] = _Sums.apply(g)  # type: ignore[no-untyped-call]
    return found


class _Sums(torch.autograd.Function):
    """Forwards by differences of sums that have the digits, since that is one pass. Backwards by sums: a number that is not finite reaches
    those decays alone that lie between its tokens, and nothing is added that would be subtracted again."""

    @staticmethod
    def forward(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        whole = (g / _STEP).round() * _STEP
        exact, rest = torch.stack([whole, g - whole]).cumsum(-1)
        between = (exact.unsqueeze(-1) - exact.unsqueeze(-2)) + (rest.unsqueeze(-1) - rest.unsqueeze(-2))
        later = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool, device=g.device).triu(1)
        end = (exact[..., -1:] - exact) + (rest[..., -1:] - rest)
        return between.masked_fill(later, float("-inf")), exact + rest, end

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, of_between: Tensor, of_start: Tensor, of_end: Tensor) -> Tensor:
        # All pairs that a token's decay lies between: sums over earlier tokens, then over later ones.
        of_earlier = of_between.cumsum(-1).tril(-1).sum(-2) + of_end.cumsum(-1)
        return F.pad(of_earlier[..., :-1], (1, 0)) + of_start.flip(-1).cumsum(-1).flip(-1)
