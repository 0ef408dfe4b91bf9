"""Noise as large as a rounding."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from attn_compiler.spec.dtypes import HALVES
from attn_compiler.spec.numerics import FLOOR_ULPS

#: divided by a dtype's eps: added to numbers this low, a score of 16 loses all digits
_MASKS = -64.0


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Numbers between -1 and 1, the same ones for the same seed."""

    seed: int
    _generators: dict[torch.device, torch.Generator] = field(default_factory=dict)

    def like(self, x: torch.Tensor) -> torch.Tensor:
        if x.device not in self._generators:
            self._generators[x.device] = torch.Generator(x.device).manual_seed(self.seed)
        drawn = torch.rand(x.shape, generator=self._generators[x.device], device=x.device, dtype=x.dtype)
        return drawn * 2 - 1

    def on_step(self, value: Any, own: Any, inputs: Iterable[Any]) -> Any:
        """Return a step's result as another rounding might have made it. own: the step's value in the model, whose dtype it is rounded to.
        Integers, and values that share memory with an input, stay."""
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        if not isinstance(own, torch.Tensor) or own.dtype not in FLOOR_ULPS:
            return value
        if any(shares_memory(value, x) for x in inputs if isinstance(x, torch.Tensor)):
            return value
        return self.on(value, own.dtype)

    def on(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor as another rounding to the dtype might have made it. Masking numbers stay: each is the same for all keys. If they
        mask all keys of a query, noise would give one key all the weight."""
        eps = torch.finfo(dtype).eps
        return torch.where(x <= _MASKS / eps, x, x * (1 + FLOOR_ULPS[dtype] * eps * self.like(x)))


def shares_memory(x: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors may have elements in common: of one storage, or without a storage."""
    if not x.layout == other.layout == torch.strided:
        return True
    return x.numel() > 0 and x.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


# ---- noise for roundings of a fused kernel that the model's own operations do not have --------------------------------
#
# A softmax's backward is `w * (dw - sum(w * dw))`. The model sums over its own weights. A fused kernel computes `sum(do * o)` from a
# rounded output. If one key has all the weight, the model's difference is exactly zero, and the kernel's is that rounding.

#: A half is rounded once, to the nearest. A wider output has the error of its own sum.
_ULPS = {**FLOOR_ULPS, **dict.fromkeys(HALVES, 0.5)}

_BACKWARD = torch.ops.aten._softmax_backward_data.default


@contextlib.contextmanager
def fused_noise(noise: Noise | None, dtype: torch.dtype | None) -> Iterator[None]:
    """Disturb the sum of every softmax's backward in the block by a rounding of its largest summand. SDPA runs as two products and a
    softmax in the block. dtype: of a kernel's rounded output. Without noise or a dtype nothing changes."""
    if noise is None or dtype not in _ULPS:
        yield
        return
    with sdpa_kernel(SDPBackend.MATH), _Disturbed(noise, _ULPS[dtype] * torch.finfo(dtype).eps):
        yield


class _Disturbed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, noise: Noise, rounding: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._noise = noise
        self._rounding = rounding

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not _BACKWARD or not result.numel():
            return result
        upstream, weights, dim = args[:3]
        largest = upstream.abs().amax(dim, keepdim=True)
        return result + self._rounding * weights * largest * self._noise.like(largest)
