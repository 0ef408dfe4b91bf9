"""Noise where a fused kernel rounds and the model's own operations do not: in the sum of a softmax's backward.

A softmax's backward is `w * (dw - sum(w * dw))`. The model takes the sum of its own weights. A fused kernel takes `sum(do * o)`, of an
output that is rounded. Where one key has all the weight, the model's difference is exactly zero, and the kernel's is that rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from attn_compiler.spec.dtypes import HALVES
from attn_compiler.verifying.numbers import FLOOR_ULPS, Noise

#: A half is rounded once, to the nearest. A wider output is off by what its own sum is off.
_ULPS = {**FLOOR_ULPS, **dict.fromkeys(HALVES, 0.5)}

_BACKWARD = torch.ops.aten._softmax_backward_data.default


@contextlib.contextmanager
def fused_noise(noise: Noise | None, dtype: torch.dtype | None) -> Iterator[None]:
    """Inside, the sum of every softmax's backward is off by a rounding of its largest summand.

    SDPA runs as two products and a softmax inside. dtype: that a kernel rounds its output to. Without noise or a dtype nothing changes.
    """
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
