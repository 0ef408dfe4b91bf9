"""cuDNN's backward as PyTorch has it, `attn_compiler::sdpa_cudnn_backward`, for leaf ops with another forward.

It needs out and lse of any forward, and no package besides PyTorch. Gradients of q, k and v lie in memory as those do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attn_compiler.lowerings import sdpa_limits
from attn_compiler.lowerings.ops import register_backward
from attn_compiler.lowerings.sdpa import SdpaCudnn
from attn_compiler.lowerings.triton_plan import Call
from attn_compiler.report import Reason
from attn_compiler.spec import AttentionSpec
from attn_compiler.target import Target

Tensors = Sequence[torch.Tensor]

#: its name without "_backward"
FAMILY = "sdpa_cudnn"


def why_not(spec: AttentionSpec, target: Target) -> list[Reason]:
    """What keeps this backward from an attention: all that keeps cuDNN's own, and what its forward would have to hand over."""
    reasons = list(SdpaCudnn().why_not(spec, target))
    if sdpa_limits.additive(spec) is not None:
        reasons.append(Reason(rule="no tensor joins the scores", observed="a mask or a bias"))
    if spec.score.dropout_p:
        rule = "no dropout: the forward's own random numbers would be needed"
        reasons.append(Reason(rule=rule, observed=f"{spec.score.dropout_p:g}"))
    return reasons


def gradients(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    operands: Tensors,
    out: torch.Tensor,
    lse: torch.Tensor,
    text: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """As `ops.BACKWARD_SCHEMA` says. text: a `triton_plan.Call`. Of the lse nobody takes a gradient: graphs read out alone."""
    spec = Call.from_text(text).spec
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
        0.0,
        sdpa_limits.causal_flag(spec),
        scale=spec.score.scale,
    )
    return grad_q, grad_k, grad_v, []


def differentiable(operands: Tensors, text: str) -> list[bool]:
    """No operand gets a gradient."""
    return [False] * len(operands)


register_backward(
    FAMILY, backward=gradients, differentiable=differentiable, dispatch_key="CUDA", gradient=torch.empty_like
)
