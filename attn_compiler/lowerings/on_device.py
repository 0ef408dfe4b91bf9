"""What the bodies of leaf ops do on a device, whatever their kernels: choose it, and allocate with little work for the host.

Imports Inductor (torch_compat), so it comes late.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

from attn_compiler.lowerings.ops import output_strides
from attn_compiler.torch_compat import empty_strided


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Kernels run on the current device and its stream, whatever the tensors are on."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Empty:
    """How a tensor is allocated, on the current device."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @staticmethod
    def like(tensor: torch.Tensor) -> Empty:
        return Empty(shape=tuple(tensor.shape), strides=tensor.stride(), dtype=tensor.dtype, device=tensor.device.type)

    def make(self) -> torch.Tensor:
        return empty_strided(self.shape, self.strides, self.dtype, self.device)


def new_outputs(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.empty_outputs` on the current device, for q in half precision or float32."""
    (batch, heads, seqlen_q, _), head_dim, device = q.shape, v.shape[3], q.device.type
    strides = output_strides(heads, seqlen_q, head_dim)
    out = empty_strided((batch, heads, seqlen_q, head_dim), strides, q.dtype, device)
    return out, empty_strided((batch, heads, seqlen_q), (heads * seqlen_q, seqlen_q, 1), torch.float32, device)
