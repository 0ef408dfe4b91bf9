"""SDPA called again on real tensors, which need no gradients here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

_SDPA = (F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default)


def exactly(target: Callable[..., Any] | str, *, wider: bool) -> AbstractContextManager[Any]:
    """Inside, a call of SDPA in a wider dtype is what SDPA is defined as. Its kernels have other limits there than in the model's dtype."""
    return sdpa_kernel(SDPBackend.MATH) if wider and target in _SDPA else contextlib.nullcontext()


def with_rows(
    target: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call; of SDPA with a mask of two axes or more.

    PyTorch's kernels can't read a mask of one axis. The model's own call may have had gradients, for which SDPA took none of them.
    """
    if target not in _SDPA:
        return args, dict(kwargs)
    if "attn_mask" in kwargs:
        return args, {**kwargs, "attn_mask": _rows(kwargs["attn_mask"])}
    return (*args[:3], *map(_rows, args[3:4]), *args[4:]), dict(kwargs)


def _rows(mask: Any) -> Any:
    return mask[None] if isinstance(mask, torch.Tensor) and mask.dim() == 1 else mask
