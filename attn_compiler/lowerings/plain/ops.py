"""The leaf op of the reference, on any device.

Its operands are, each only if the spec has it, the Dense mask, the DenseBias, the Sinks (Hq,); its text is `AttentionSpec.to_text()`.
"""

from __future__ import annotations

from typing import Any

import torch

from attn_compiler.lowerings.plain import reference
from attn_compiler.lowerings.shared.calls.leaf_calls import BackwardArguments, Gradients
from attn_compiler.lowerings.shared.ops.leaf_ops import Tensors, empty_gradient, empty_outputs, register_family
from attn_compiler.spec.attention import AttentionSpec


def _reference_differentiable(operands: Tensors, spec: str) -> list[bool]:
    return reference.differentiable(operands, AttentionSpec.from_text(spec))


def _reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Tensors, spec: str
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = empty_outputs(q, v)
    exact_out, exact_lse = reference.forward(q, k, v, operands, AttentionSpec.from_text(spec))
    return out.copy_(exact_out), lse.copy_(exact_lse)


def _reference_backward(*arguments: Any) -> Gradients:
    grad_out, grad_lse, q, k, v, operands, _, _, spec = BackwardArguments(*arguments)
    parsed = AttentionSpec.from_text(spec)
    *exact, exact_operands = reference.backward(grad_out, grad_lse, q, k, v, operands, parsed)
    wanted = reference.differentiable(operands, parsed)
    targets = [tensor for tensor, is_wanted in zip(operands, wanted, strict=True) if is_wanted]
    grad_q, grad_k, grad_v = (empty_gradient(t).copy_(grad) for t, grad in zip((q, k, v), exact, strict=True))
    grads = [empty_gradient(t).copy_(grad) for t, grad in zip(targets, exact_operands, strict=True)]
    return grad_q, grad_k, grad_v, grads


register_family(
    "reference",
    forward=_reference,
    backward=_reference_backward,
    differentiable=_reference_differentiable,
    dispatch_key="CompositeExplicitAutograd",
)
