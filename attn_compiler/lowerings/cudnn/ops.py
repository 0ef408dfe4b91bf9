"""The leaf op of cuDNN's own attention, `attn_compiler::cudnn`. Its text is a `plan.CudnnCall`, which names its operands.

Gradients of q, k and v have the same strides as those. A node of the traced backward copies the output's gradient into the output's own
strides where they differ: one plan serves every backward.

The first call imports the code for the device: a dump or a fake needs neither the frontend nor Inductor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attn_compiler.lowerings.cudnn.plan import CudnnCall
from attn_compiler.lowerings.shared.ops.leaf_ops import (
    late,
    like_output,
    register_backward,
    register_family,
    register_forward,
)

Tensors = Sequence[torch.Tensor]


def differentiable(operands: Tensors, text: str) -> list[bool]:
    """Return for each operand whether the backward gives its gradient. Raises ValueError if their number is not the call's."""
    call = CudnnCall.from_text(text)
    if len(call.operands) != len(operands):
        raise ValueError(f"the call has the operands {', '.join(call.operands) or 'none'}; got {len(operands)}")
    return [name in call.by_kernel for name in call.operands]


def in_graph(
    grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, operands: Tensors, text: str
) -> list[torch.Tensor | None]:
    """Return the gradient of the sinks: -exp(sink - lse) · Σ grad_out · out, over batch and queries.

    One reduction when it is fused. cuDNN 9.19 can compute it too, and takes as long for that as for all other gradients: 1792 µs instead
    of 915 for 8 x 32 heads of 64, 2048 queries, window 1024.
    """
    call = CudnnCall.from_text(text)
    if not call.sinks_grad:
        return [None] * len(operands)
    sinks = dict(zip(call.operands, operands, strict=True))["sinks"]
    # Fused, the product is never rounded; unfused, to no less than out itself was.
    total = (grad_out * out).sum(-1, dtype=torch.float32)
    gradient = -(torch.exp(sinks[None, :, None] - lse) * total).sum((0, 2))
    return [gradient if name == "sinks" else None for name in call.operands]


def gradient_like(tensor: torch.Tensor) -> torch.Tensor:
    """Allocate a gradient of q, k or v, unfilled: in the tensor's own strides, without its gaps."""
    return torch.empty_like(tensor)


def gradient_in_fp8(tensor: torch.Tensor) -> torch.Tensor:
    """Allocate the same in the format of gradients."""
    return torch.empty_like(tensor, dtype=torch.float8_e5m2)


register_family(
    "cudnn",
    forward=late("cudnn.launch", "forward", site="ForwardSite"),
    backward=late("cudnn.launch", "gradients", site="BackwardSite"),
    differentiable=differentiable,
    gradient=gradient_like,
    prepare_grad_out=like_output,
    in_graph=in_graph,
    dispatch_key="CUDA",
)

# q, k, v and out in FP8: the texts are calls with fp8="forward" and "backward". The forward has no gradient of its own.
register_forward("cudnn_fp8", forward=late("cudnn.launch", "forward", site="ForwardSite"), dispatch_key="CUDA")
register_backward(
    "cudnn_fp8",
    backward=late("cudnn.launch", "gradients", site="BackwardSite"),
    differentiable=differentiable,
    gradient=gradient_in_fp8,
    dispatch_key="CUDA",
)
