"""Ranks that have attended to keys of their own merge what they have: one all-gather of outputs, each with its logsumexp."""

from __future__ import annotations

import torch

from attn_compiler.context_parallel import merging
from attn_compiler.context_parallel.collectives import parts
from attn_compiler.torch_private.op_library import LIBRARY, NAMESPACE

_NAME = "merged_over_ranks"


def _merged(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None, size: int, group: str) -> torch.Tensor:
    """out: (B, H, Q, D). lse: (B, H, Q), in the dtype that is merged in. sinks: (H,). Without a gradient: caches have none."""
    sent = torch.cat((out.to(lse.dtype), lse.unsqueeze(-1)), -1)
    outs, lses = torch.split(parts(sent, size, group), [out.shape[-1], 1], -1)
    return merging.merged(outs, lses.squeeze(-1), sinks).to(out.dtype)


if not hasattr(getattr(torch.ops, NAMESPACE), _NAME):
    LIBRARY.define(f"{_NAME}(Tensor out, Tensor lse, Tensor? sinks, int size, str group) -> Tensor")
    # Spelled out below autograd, so that Inductor sees the collective and fuses what is around it.
    LIBRARY.impl(_NAME, _merged, "Autograd")
    LIBRARY.impl(_NAME, _merged, "CompositeExplicitAutograd")

merged_over_ranks = getattr(torch.ops, NAMESPACE).merged_over_ranks.default
