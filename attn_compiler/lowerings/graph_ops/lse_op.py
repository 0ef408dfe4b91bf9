"""`attn_compiler::scaled_dot_product_attention_with_lse`: the op that passes insert where the logsumexp of an attention is read.

Patterns match it (passes/matching/patterns/lse_call.py). A site that no lowering takes keeps the op, which then runs the products here.

    out, lse = softmax(scores) v, logsumexp(scores);  scores = softcap · tanh(scale · (q kᵀ) / softcap), masked

query: (B, Hq, Sq, D).
key, value: (B, Hkv, Skv, D) and (B, Hkv, Skv, Dv). Query head h reads head h // (Hq // Hkv).
attn_mask: truth values, or numbers that are added after the softcap; it broadcasts to (B, Hq, Sq, Skv).
is_causal: query i sees keys up to i.
out: in value's dtype. 0 in a row without any allowed key.
lse: (B, Hq, Sq), float32, or float64 for float64, the natural logarithm. -inf in a row without any allowed key, which has no gradient.
is_part: the gradient of the lse is minus delta, as merging.py says.
"""

from __future__ import annotations

import math

import torch

from attn_compiler.lowerings.graph_ops.merging import as_part
from attn_compiler.torch_private.op_library import LIBRARY, NAMESPACE

_NAME = "scaled_dot_product_attention_with_lse"
_SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, bool is_causal=False, *, float scale, "
    "float? softcap=None, bool is_part=False) -> (Tensor out, Tensor lse)"
)


def _composite(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    *,
    scale: float,
    softcap: float | None = None,
    is_part: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(query.dtype, torch.float32)
    groups = query.shape[1] // key.shape[1]
    keys, values = (x.to(wide).repeat_interleave(groups, 1) for x in (key, value))
    scores = (query.to(wide) * scale) @ keys.transpose(2, 3)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = torch.where(attn_mask, scores, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    if is_causal:
        pairs = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        scores = torch.where(pairs.tril(), scores, -math.inf)
    weights, lse = softmax_and_lse(scores)
    out = (weights @ values).to(value.dtype)
    return as_part(out, lse) if is_part else (out, lse)


def softmax_and_lse(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute both over the last axis. A row of -inf gets weights of 0, an lse of -inf, and no gradient: `torch.logsumexp` gives NaN."""
    peak = scores.detach().amax(-1, keepdim=True)
    is_empty = peak == -math.inf
    shift = torch.where(is_empty, 0.0, peak)
    exponentials = torch.exp(scores - shift)
    total = torch.where(is_empty, 1.0, exponentials.sum(-1, keepdim=True))
    lse = torch.where(is_empty, -math.inf, shift + torch.log(total))
    return exponentials / total, lse.squeeze(-1)


if not hasattr(getattr(torch.ops, NAMESPACE), _NAME):
    LIBRARY.define(_NAME + _SCHEMA)
    LIBRARY.impl(_NAME, _composite, "CompositeImplicitAutograd")

attention_with_lse = getattr(torch.ops, NAMESPACE).scaled_dot_product_attention_with_lse.default
