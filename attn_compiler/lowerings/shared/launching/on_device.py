"""Steps of leaf-op bodies on a device, whatever their kernels: select the device, and allocate with little work for the host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from attn_compiler.lowerings.shared.launching.dry_run import noter
from attn_compiler.lowerings.shared.ops.leaf_ops import empty_outputs, output_strides
from attn_compiler.torch_private.compat import allocator, empty_strided

T = TypeVar("T")


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make a device current, since kernels run on the current device and its stream, whatever the tensors are on."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


class KnownCalls(dict[tuple[Any, ...], T]):
    """Data that calls of equal keys share. It is cleared when it is full, so it does not grow without a bound."""

    _MOST = 4096

    def keep(self, key: tuple[Any, ...], value: T) -> T:
        if len(self) >= self._MOST:
            self.clear()
        self[key] = value
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Empty:
    """Allocation of a tensor. make(): an unfilled one, on the current device."""

    make: Callable[[], torch.Tensor]

    @staticmethod
    def like(tensor: torch.Tensor) -> Empty:
        return Empty(make=allocator(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device.type))

    @staticmethod
    def zeros_like(tensor: torch.Tensor) -> Empty:
        """Allocate zeros, for a tensor that is only partly written, or summed up in place."""
        make = Empty.like(tensor).make
        return Empty(make=lambda: make().zero_())


def new_outputs(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `ops.empty_outputs` on the current device, for q in half precision or float32."""
    if noter() is not None:
        return empty_outputs(q, v)
    (batch, heads, seqlen_q, _), head_dim, device = q.shape, v.shape[3], q.device.type
    strides = output_strides(heads, seqlen_q, head_dim)
    return empty_strided((batch, heads, seqlen_q, head_dim), strides, q.dtype, device), new_lse(q)


def new_lse(x: torch.Tensor) -> torch.Tensor:
    """Return the lse of `new_outputs` alone. x: q or the output."""
    batch, heads, seqlen_q, _ = x.shape
    strides = (heads * seqlen_q, seqlen_q, 1)
    return empty_strided((batch, heads, seqlen_q), strides, torch.float32, x.device.type)
