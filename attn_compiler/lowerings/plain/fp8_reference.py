"""The reference of FP8 attention: the computation of a kernel, tile by tile, in plain PyTorch on any device.

q, k and v are rounded as for `hopper_fp8`. The softmax's weights are rounded as kernels round them: 2**8 times as large, against the
largest score of the tiles so far, the last tile first. Products are summed in float32, where tensor cores keep fewer bits. All scores are
in memory, so it runs only when asked for. The backward is the reference's, from the rounded q, k and v and the lse of the forward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from attn_compiler.lowerings.base import Anywhere, Emitter, Operands, check_fp8_inputs
from attn_compiler.lowerings.fp8 import limits, quantise, restoring, visible_keys
from attn_compiler.lowerings.plain import reference
from attn_compiler.lowerings.shared.limits import common as shared_limits
from attn_compiler.lowerings.shared.ops.leaf_ops import empty_outputs, register_forward
from attn_compiler.reasons.decisions import Reason
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.fp8_recipe import DTYPES
from attn_compiler.spec.target import Target

Tensors = Sequence[torch.Tensor]

#: keys that the online softmax takes at once
TILE = 128
#: factor of weights before rounding: they are up to 256, of 448
WEIGHT = 2.0**8


class ReferenceFp8(Anywhere):
    """`attn_compiler::reference_fp8`: its operands are those of fp8/quantise.py, and then the reference's."""

    name = "reference_fp8"

    def why_not(self, spec: AttentionSpec, target: Target) -> list[Reason]:
        fp8 = [*limits.check_recipe(spec), *check_fp8_inputs(spec), *limits.check_shapes(spec)]
        return [*fp8, *shared_limits.check_not_empty(spec), *reference.check_site(spec)]

    def emit(self, emitter: Emitter, spec: AttentionSpec, operands: Operands) -> fx.Node:
        rounded = quantise.emit(emitter, spec, operands, seen=visible_keys.emit(emitter, spec, operands))
        emitter.note(f"FP8 forward: {quantise.recipe_of(spec).words}; backward in {spec.dtype}")
        further = [node for node in (operands.mask, operands.sinks) if node is not None]
        return restoring.call_leaf(
            emitter, spec, operands, rounded, further, leaf=self.name, family="reference", text=spec.to_text()
        )


def differentiable(operands: Tensors, text: str) -> list[bool]:
    """Return for each of the reference's operands whether it gets a gradient."""
    return reference.differentiable(operands, AttentionSpec.from_text(text))


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Tensors, text: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse, as `ops.LEAF_SCHEMA` says. Of q, k and v only shapes and dtypes are read."""
    spec = AttentionSpec.from_text(text)
    names = quantise.names(spec)
    given = dict(zip(names, operands[: len(names)], strict=True))
    further = operands[len(names) :]
    q_exact, k_exact, v_exact = reference.without_unused(*restoring.exact(spec, given), further, spec)
    logits, sinks = reference.logits(q_exact, k_exact, further, spec)
    dtype = getattr(torch, DTYPES[quantise.recipe_of(spec).forward_format])
    exact_out, exact_lse = _attention(logits, sinks, reference.repeated(v_exact, q), dtype)
    out, lse = empty_outputs(q, v)
    return out.copy_(exact_out), lse.copy_(exact_lse)


def _attention(
    logits: torch.Tensor, sinks: torch.Tensor | None, v: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out (B, Hq, Sq, Dv) and lse (B, Hq, Sq), float32. dtype: of the rounded weights."""
    total = torch.zeros_like(logits[..., 0])
    peak = torch.full_like(total, -torch.inf)
    out = v.new_zeros((*total.shape, v.shape[3]))
    for start in reversed(range(0, logits.shape[3], TILE)):
        part = logits[..., start : start + TILE]
        new_peak = torch.maximum(peak, part.amax(-1))
        shift = torch.where(new_peak == -torch.inf, 0.0, new_peak)
        weights = torch.exp(part - shift[..., None]) * WEIGHT
        decay = torch.exp(peak - shift)
        total = total * decay + weights.sum(-1)
        rounded = weights.to(dtype).float()
        out = out * decay[..., None] + rounded @ v[:, :, start : start + TILE]
        peak = new_peak
    if sinks is not None:
        sink = sinks[None, :, None]
        with_sink = torch.maximum(peak, sink)
        decay = torch.exp(peak - with_sink)
        total = total * decay + torch.exp(sink - with_sink) * WEIGHT
        out, peak = out * decay[..., None], with_sink
    empty = total == 0
    divisor = torch.where(empty, 1.0, total)
    lse = torch.where(empty, -torch.inf, peak + torch.log(divisor / WEIGHT))
    return out / divisor[..., None], lse


register_forward("reference_fp8", forward=forward, dispatch_key="CompositeExplicitAutograd")
restoring.register("reference", differentiable=differentiable)
