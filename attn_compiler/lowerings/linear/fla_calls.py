"""Calls of flash-linear-attention's functions. Imports them, so it is imported late.

Only documented functions are called. A backward runs the function once more under autograd, so its own buffers stay its affair: only
operands are kept from the forward.
"""

from __future__ import annotations

from typing import Any

import torch
from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from fla.ops.kda import chunk_kda, fused_recurrent_kda
from torch import Tensor

from attn_compiler.lowerings.linear.plain_calls import gradients
from attn_compiler.lowerings.shared.launching.on_device import on
from attn_compiler.spec.linear import LinearForm


def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, skip: Tensor | None, state: Tensor | None, text: str
) -> tuple[Tensor, Tensor]:
    """Compute `fla_chunks`: q and k are normalised. skip: always None."""
    function = _function(LinearForm.from_text(text), is_one=v.shape[1] == 1)
    with on(v.device), torch.no_grad():
        return _called(function, q, k, v, g, beta, state)


def backward(grad_out: Tensor, grad_last: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, g, beta, skip and state; an empty tensor for an absent operand."""
    *operands, text = given
    function = _function(LinearForm.from_text(text), is_one=False)

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, _: Any, state: Any) -> tuple[Tensor, Tensor]:
        return _called(function, q, k, v, g, beta, state)

    return gradients(run, grad_out, grad_last, operands)


def _function(form: LinearForm, *, is_one: bool) -> Any:
    """Return the function of a form, and for one token the one without a backward."""
    if is_one:
        return fused_recurrent_kda if form.channel else fused_recurrent_gated_delta_rule
    return chunk_kda if form.channel else chunk_gated_delta_rule


def _called(function: Any, q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> tuple[Tensor, Tensor]:
    """Call a function. Its default scale is the delta rule's, one over the root of the channels of k."""
    found: tuple[Tensor, Tensor] = function(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True)
    return found[0], found[1]
