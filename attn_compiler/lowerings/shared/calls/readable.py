"""Checks for tensors that our Triton kernels can't read where they are, and copies of those."""

from __future__ import annotations

import torch

from attn_compiler.lowerings.shared.calls.arguments import alignment, is_far
from attn_compiler.torch_private.symbols import statically_known


def _misaligned(*tensors: torch.Tensor) -> bool:
    """Return whether any tensor begins between two vectors, in half precision on a GPU. Triton 3.6 compiles wrong code for those where a
    head dim takes two tiles: it reads the wrong elements, or beyond the tensor."""
    return any(x.is_cuda and x.element_size() < 4 and alignment(x) == 1 for x in tensors)


def is_unreadable(*tensors: torch.Tensor) -> bool:
    """Return whether the kernels can't read any of these tensors where it is."""
    return any(not statically_known(x.stride(3) == 1) or is_far(x) for x in tensors) or _misaligned(*tensors)


def readable(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a copy of it if a kernel can't read it where it is.

    This is the one copy outside of the graph. The layout pass handles known strides. No stride tells where a tensor begins in its memory,
    and a slice at an odd element is rare. The layout of an upstream gradient is unknown: a sum expands one number.
    """
    if not is_unreadable(x):
        return x
    copied = x.clone(memory_format=torch.contiguous_format)
    if _misaligned(copied):
        raise ValueError(
            f"the Triton kernels take head dims that are multiples of 8 in half precision, got {x.shape[3]}"
        )
    return copied
