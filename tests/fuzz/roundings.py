"""Roundings put into an exact run, to see how far the results move."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


def disturb(bases: Sequence[torch.Tensor], by: float, seed: int) -> None:
    """Move each number of the tensors by up to its `by`-th part, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for x in bases:
            if x.is_floating_point():
                x.mul_(1 + by * _off(x, generator))


@contextlib.contextmanager
def rounded(by: float, seed: int) -> Iterator[None]:
    """Inside, the backward of a softmax is off by up to the `by`-th part of its largest summand, as a fused kernel's is.

    With an even seed it is off as far as that, and the same way for all rows. The scores of a softmax are off by a rounding to float32: a
    score of a million has no digits behind the point, whatever adds it up. Keys that share the largest score of a row go on sharing it: a
    number that masks is written there, and not added up.

    A softmax gives `w * (dw - sum(w * dw))`. A fused kernel takes `sum(do * o)` for the sum, of an `o` that is rounded. Where one key has
    all the weight, the exact difference is 0 and the kernel's is that rounding. SDPA runs as products and a softmax here.
    """
    with sdpa_kernel(SDPBackend.MATH), _Rounded(by, seed):
        yield


class _Rounded(TorchDispatchMode):
    def __init__(self, by: float, seed: int) -> None:
        super().__init__()
        self._by = by
        self._generator = torch.Generator().manual_seed(seed)
        # Roundings of many rows may all go one way: an instruction that is off by as much everywhere.
        self._is_one_way = seed % 2 == 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is aten._softmax.default:
            args = (self._off_by_a_rounding(args[0], args[1]), *args[1:])
        result = func(*args, **(kwargs or {}))
        if func is not aten._softmax_backward_data.default:
            return result
        upstream, weights, dim = args[:3]
        largest = upstream.abs().amax(dim, keepdim=True) if upstream.numel() else upstream
        off = 1.0 if self._is_one_way else _off(largest, self._generator)
        return result + self._by * weights * largest * off

    def _off_by_a_rounding(self, scores: torch.Tensor, dim: int) -> torch.Tensor:
        if not scores.numel():
            return scores
        off = _off(scores, self._generator)
        largest, at = scores.max(dim, keepdim=True)
        off = torch.where(scores == largest, off.gather(dim, at), off)
        limits, by = torch.finfo(scores.dtype), min(self._by, torch.finfo(torch.float32).eps)
        moved = (scores * (1 + by * off)).clamp(limits.min, limits.max)
        return torch.where(scores.isfinite(), moved, scores)


def _off(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Numbers between -1 and 1, one for each of x's."""
    return (torch.rand(x.shape, generator=generator, dtype=torch.float64) * 2 - 1).to(x.device)
