"""Tensors whose elements lie where our Triton kernels can't read them, and copies of those."""

from __future__ import annotations

import torch

from attn_compiler.lowerings.shared.calls.arguments import alignment, is_far
from attn_compiler.torch_private.symbols import statically_known


def _misaligned(*tensors: torch.Tensor) -> bool:
    """Whether any begins between two vectors, in half precision on a GPU: what Triton 3.6 compiles for those reads the wrong
    elements, or beyond the tensor, where a head dim takes two tiles."""
    return any(x.is_cuda and x.element_size() < 4 and alignment(x) == 1 for x in tensors)


def is_unreadable(*tensors: torch.Tensor) -> bool:
    """Whether the kernels can't read any of them where its elements are."""
    return any(not statically_known(x.stride(3) == 1) or is_far(x) for x in tensors) or _misaligned(*tensors)


def readable(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it if its elements are not where a kernel can read them.

    The one copy outside of the graph. The layout pass sees to strides that are known; where a tensor begins in its memory none of them
    says, and a slice at an odd element is rare. Nobody says how an upstream gradient lies: a sum expands one number.
    """
    if not is_unreadable(x):
        return x
    copied = x.clone(memory_format=torch.contiguous_format)
    if _misaligned(copied):
        raise ValueError(
            f"the Triton kernels take head dims that are multiples of 8 in half precision, got {x.shape[3]}"
        )
    return copied
