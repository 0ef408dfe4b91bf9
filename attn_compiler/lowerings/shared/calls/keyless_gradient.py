"""`attn_compiler::keyless_gradient`: 0, with the gradients of q and k that come from queries whose keys all got one number added.

The softmax of such a row weighs all keys alike, whatever the scores are, and its derivative is not 0:

    dq_i = s/n Σ_j ((v_j - mean) · g_i) k_j,    dk_j = s/n Σ_i ((v_j - mean) · g_i) q_i

n is the number of keys, s the scale, g the output's gradient, which is 0 in all other rows. Products of (Dv, D) give both sums, so no
pair is visited. v gets its gradient by the mean. Without any key at all the sums are 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_compiler.spec.dtypes import computed_in
from attn_compiler.torch_private.op_library import register_helper


def _nothing(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return zeros, (B, Hq, Sq, Dv), in the compute dtype of `_gradient`."""
    return torch.zeros((), dtype=computed_in(q.dtype), device=q.device).expand(*q.shape[:3], v.shape[3])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, v, ctx.scale = inputs
    ctx.save_for_backward(q, k, v)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v = (x.to(computed_in(x.dtype)) for x in ctx.saved_tensors)
    of_dtype, heads_kv = ctx.saved_tensors[0].dtype, k.shape[1]
    apart = v - v.mean(2, keepdim=True)
    # The axis of query heads becomes (kv head, query head of that group).
    g = torch.unflatten(grad.to(q.dtype) * (ctx.scale / max(k.shape[2], 1)), 1, (heads_kv, -1))
    of_queries = torch.unflatten(q, 1, (heads_kv, -1))
    grad_q = g @ (apart.transpose(2, 3) @ k)[:, :, None]
    grad_k = apart @ (g.transpose(3, 4) @ of_queries).sum(2)
    return grad_q.flatten(1, 2).to(of_dtype), grad_k.to(of_dtype), None, None


register_helper(
    "keyless_gradient",
    "(Tensor q, Tensor k, Tensor v, float scale) -> Tensor",
    function=_nothing,
    differentiated=(_setup, _gradient),
)
