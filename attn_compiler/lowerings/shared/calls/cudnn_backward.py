"""cuDNN's backward as PyTorch has it, `attn_compiler::sdpa_cudnn_backward`, for leaf ops with another forward.

It needs out and lse of any forward, and no package besides PyTorch. Gradients of q, k and v lie in memory as those do.

PyTorch keeps the graphs that cuDNN runs by how q, k and v lie, and not by how out and its gradient do (aten/src/ATen/native/cudnn/MHA.cpp,
MHACacheKeyWrapper). A call of which those lie otherwise than when the graph was built reads the wrong numbers, and says nothing. On an
H200, torch 2.11, after SDPA's own backward of the same q, k and v as (B, H, S, D) in memory, dQ and dK were wrong by 0.52 of their norms.
So all calls from here have out and its gradient as BSHD (`grad_out_as_read`), and graphs of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attn_compiler.lowerings.shared.calls import cudnn_called
from attn_compiler.lowerings.shared.calls.leaf_calls import BackwardArguments, Gradients
from attn_compiler.lowerings.shared.limits import mask_limits
from attn_compiler.lowerings.shared.ops.leaf_ops import like_output, register_backward
from attn_compiler.lowerings.shared.parts.kernel_plan import Call
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.target import Target

Tensors = Sequence[torch.Tensor]

#: As a number 0, so nothing is dropped; its bits are part of what PyTorch knows a graph by, and no call of SDPA's has these.
_NO_DROPOUT = -0.0

#: bytes that cuDNN's kernels read at once: a tensor that begins between two vectors is copied, which a forward by another family may read
_VECTOR = 16

#: its name without "_backward"
FAMILY = "sdpa_cudnn"


def why_not(spec: AttentionSpec, target: Target) -> list[Reason]:
    """What keeps this backward from an attention: all that keeps cuDNN's own, and what its forward would have to hand over."""
    reasons = cudnn_called.why_not(spec, target)
    if spec.added_tensor is not None:
        reasons.append(Reason(code=Code.MASK_TENSOR, rule="no tensor joins the scores", observed="a mask or a bias"))
    if spec.score.dropout_p:
        rule = "no dropout: the forward's own random numbers would be needed"
        reasons.append(Reason(code=Code.DROPOUT, rule=rule, observed=f"{spec.score.dropout_p:g}"))
    return reasons


def gradients(*arguments: Any) -> Gradients:
    """As `ops.BACKWARD_SCHEMA` says. text: a `kernel_plan.Call`. Of the lse nobody takes a gradient: graphs read out alone."""
    grad_out, _, q, k, v, _, out, lse, text = BackwardArguments(*arguments)
    spec = Call.from_text(text).spec
    q, k, v = (x if x.data_ptr() % _VECTOR == 0 else x.clone() for x in (q, k, v))
    # Random numbers that no weight is dropped by.
    nothing = torch.zeros((), dtype=torch.int64, device=q.device)
    grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad_out,
        q,
        k,
        v,
        out,
        lse[..., None],
        nothing,
        nothing,
        None,
        None,
        None,
        q.shape[2],
        k.shape[2],
        _NO_DROPOUT,
        mask_limits.causal_flag(spec),
        scale=spec.score.scale,
    )
    return grad_q, grad_k, grad_v, []


#: what the gradient of the output is made before the backward
grad_out_as_read = like_output


def differentiable(operands: Tensors, text: str) -> list[bool]:
    """No operand gets a gradient."""
    return [False] * len(operands)


register_backward(
    FAMILY, backward=gradients, differentiable=differentiable, dispatch_key="CUDA", gradient=torch.empty_like
)
