"""Masks that one graph makes and another one uses."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

B, H, S, D = 2, 3, 16, 8
PADDING = torch.arange(S) < torch.tensor([[S], [9]])


def attend(q: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask, scale=0.3)


def causal(q: Tensor) -> Tensor:
    at = torch.arange(q.shape[2])
    return at[:, None] >= at


def padded(q: Tensor) -> Tensor:
    return causal(q) & PADDING[:, None, None, :]


def window(q: Tensor) -> Tensor:
    """The last query sees but a few keys; each sees its own."""
    at = torch.arange(q.shape[2])
    return padded(q) & (at[:, None] - at < 4)
