"""Attention over parts of the keys, put together by the logarithms of the sums that the softmax of each part divided by."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def merged(outs: Tensor, lses: Tensor, sinks: Tensor | None = None) -> Tensor:
    """What attention gives over the keys of all parts. A part without keys for a row counts for nothing there, and a row of no part is 0.

    outs: (parts, B, H, Q, D). lses: (parts, B, H, Q), natural logarithms, -inf where a part has no keys for a row; in the dtype that
    is computed in. sinks: (H,), one more logit a head, which takes its share of the weights and has no value.
    """
    peak = lses.amax(0)
    if sinks is not None:
        logits = sinks.to(lses.dtype).view(1, -1, 1)
        peak = torch.maximum(peak, logits)
    peak = torch.where(peak == -math.inf, 0.0, peak)
    weights = torch.exp(lses - peak)
    total = weights.sum(0)
    if sinks is not None:
        total = total + torch.exp(logits - peak)
    total = torch.where(total == 0, 1.0, total)
    return ((weights / total).unsqueeze(-1) * outs).sum(0)
