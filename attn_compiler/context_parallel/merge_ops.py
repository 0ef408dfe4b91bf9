"""Ranks merge attention over their own keys: one all-gather of outputs, each with its logsumexp."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attn_compiler.context_parallel.collectives import parts
from attn_compiler.torch_private.op_library import LIBRARY, NAMESPACE

_NAME = "merged_over_ranks"


def merged(outs: Tensor, lses: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Return attention over the keys of all parts. A part without keys for a row counts for nothing there; a row of no part is 0.

    outs: (parts, B, H, Q, D). lses: (parts, B, H, Q), natural logarithms, -inf where a part has no keys for a row; in the dtype of the
    computation. sinks: (H,), one more logit a head, which takes its share of the weights and has no value.
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


def _merged(out: Tensor, lse: Tensor, sinks: Tensor | None, size: int, group: str) -> Tensor:
    """Merge all ranks' outputs, without a gradient: caches have none.

    out: (B, H, Q, D). lse: (B, H, Q), in the dtype of the merge. sinks: (H,).
    """
    sent = torch.cat((out.to(lse.dtype), lse.unsqueeze(-1)), -1)
    outs, lses = torch.split(parts(sent, size, group), [out.shape[-1], 1], -1)
    return merged(outs, lses.squeeze(-1), sinks).to(out.dtype)


if not hasattr(getattr(torch.ops, NAMESPACE), _NAME):
    LIBRARY.define(f"{_NAME}(Tensor out, Tensor lse, Tensor? sinks, int size, str group) -> Tensor")
    # Decomposed below autograd, so that Inductor sees the collective and fuses the ops around it.
    LIBRARY.impl(_NAME, _merged, "Autograd")
    LIBRARY.impl(_NAME, _merged, "CompositeExplicitAutograd")

merged_over_ranks = getattr(torch.ops, NAMESPACE).merged_over_ranks.default
