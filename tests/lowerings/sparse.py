"""Tensors whose offsets pass 2^31, over memory of which nearly no page is ever touched."""

from __future__ import annotations

import torch
from torch import Tensor


def apart(x: Tensor, axis: int, *, beyond: int = 2**31) -> Tensor:
    """The same numbers, with the last index of an axis more than `beyond` elements from the first. The other axes lie together."""
    steps = x.shape[axis] - 1
    if steps < 1:
        raise ValueError(f"an axis of {x.shape[axis]} has no offsets")
    stride = -(-(beyond // steps + 1) // 128) * 128
    strides, span = [0] * x.dim(), 1
    for other in reversed(range(x.dim())):
        if other != axis:
            strides[other], span = span, span * x.shape[other]
    if span > stride:
        raise ValueError(f"{span} elements do not fit between two indices")
    strides[axis] = stride
    memory = torch.empty(stride * steps + span, dtype=x.dtype, device=x.device)
    return memory.as_strided(x.shape, strides).copy_(x.detach())
