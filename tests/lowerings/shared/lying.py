"""Tensors that lie otherwise than `torch.empty(4, 8)`, by what differs."""

from __future__ import annotations

import torch

LYING_OTHERWISE = {
    "strides": torch.empty(8, 4).t(),
    "shape": torch.empty(4, 9),
    "dtype": torch.empty(4, 8, dtype=torch.float16),
    "alignment": torch.empty(4 * 8 + 1)[1:].view(4, 8),
}
