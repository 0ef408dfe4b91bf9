"""cuDNN's backward as PyTorch has it, `attn_compiler::sdpa_cudnn_backward`, for leaf ops with another forward.

It needs out and lse of any forward, and no package besides PyTorch. Gradients of q, k and v have the strides of those.

PyTorch's cache of cuDNN graphs keys the strides of q, k and v, and not those of out and its gradient (aten/src/ATen/native/cudnn/MHA.cpp,
MHACacheKeyWrapper). A call with other strides of out than the graph was built for silently reads the wrong numbers. On an H200, torch 2.11,
after SDPA's own backward of the same q, k and v as (B, H, S, D) in memory, dQ and dK were wrong by 0.52 of their norms. So all calls from
here have out and its gradient as BSHD (`grad_out_as_read`), and graphs of their own.
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
from attn_compiler.reasons.decisions import Reason, refuse
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.target import Target

Tensors = Sequence[torch.Tensor]

#: Equal to 0, so nothing is dropped. Its bits are part of PyTorch's key of a graph, and no call of SDPA's has them.
_NO_DROPOUT = -0.0

#: bytes that cuDNN's kernels load at once. A tensor that begins between two vectors is copied; forwards of other families may take one.
_VECTOR = 16

#: name of the op without "_backward"
FAMILY = "sdpa_cudnn"


def why_not(spec: AttentionSpec, target: Target) -> list[Reason]:
    """Return why this backward can't serve an attention: cuDNN's own limits, and states of its forward that other forwards lack."""
    reasons = cudnn_called.why_not(spec, target)
    if spec.added_tensor is not None:
        reasons += refuse(Code.MASK_TENSOR, "no tensor joins the scores", "a mask or a bias")
    if spec.score.dropout_p:
        rule = "no dropout: the forward's own random numbers would be needed"
        reasons += refuse(Code.DROPOUT, rule, f"{spec.score.dropout_p:g}")
    return reasons


def gradients(*arguments: Any) -> Gradients:
    """Return the gradients as `ops.BACKWARD_SCHEMA` says. text: a `kernel_plan.Call`. The lse has no gradient: graphs read out alone."""
    grad_out, _, q, k, v, _, out, lse, text = BackwardArguments(*arguments)
    spec = Call.from_text(text).spec
    q, k, v = (x if x.data_ptr() % _VECTOR == 0 else x.clone() for x in (q, k, v))
    # Dropout's random state, which is not used.
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


#: layout of the output's gradient that the backward needs
grad_out_as_read = like_output


def differentiable(operands: Tensors, text: str) -> list[bool]:
    """Return False for every operand: none gets a gradient."""
    return [False] * len(operands)


register_backward(
    FAMILY, backward=gradients, differentiable=differentiable, dispatch_key="CUDA", gradient=torch.empty_like
)
