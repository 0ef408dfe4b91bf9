"""A tensor in FP8 or int8 by ordinary nodes of the graph, where its scale is a number of the recipe: Inductor fuses the cast into whatever
made the tensor, which is then never written in the model's dtype.

Where something has to be found Inductor 2.11 does it more slowly than an op (rounding.py). Of rotary embedding, magnitudes of blocks
and cast it makes three kernels, each with a pass of its own over memory. With the largest magnitude of each row for steps to come it makes
one. On an H200 that took as long as rotary embedding and op (123 µs for q and k of 67 MB each), or 70 µs longer (in prefill).
"""

from __future__ import annotations

import torch
from torch import fx

from attn_compiler.lowerings.base import Emitter
from attn_compiler.lowerings.fp8.rounding import How


def rounded(emitter: Emitter, x: fx.Node, how: How, seen: fx.Node | None = None) -> tuple[fx.Node, fx.Node]:
    """As fp8_rounding.round_fp8 does it, with how.magnitude: what x, (B, H, S, D) and without a gradient, becomes, as x lies; and the
    descale, float32 (1, 1, 1). seen: as there. Raises ValueError without a magnitude."""
    if how.magnitude is None:
        raise ValueError("nodes round by magnitudes that are known beforehand")
    scale = how.fits / how.magnitude
    wide = emitter.call(torch.Tensor.to, x, torch.float32)
    inside = emitter.call(torch.clamp, emitter.call(torch.mul, wide, scale), -how.largest, how.largest)
    # Clamping alone would make a number of what is infinite.
    other = 0.0 if how.dtype == torch.int8 else float("nan")
    finite = emitter.call(torch.where, emitter.call(torch.isfinite, wide), inside, other)
    if seen is not None:
        of_positions = emitter.call(torch.unsqueeze, emitter.call(torch.unsqueeze, seen, 1), 3)
        finite = emitter.call(torch.where, of_positions, finite, 0.0)
    whole = emitter.call(torch.round, finite) if how.dtype == torch.int8 else finite
    descale = emitter.call(torch.full, (1, 1, 1), 1 / scale, device=emitter.value(x).device)
    return emitter.call(torch.Tensor.to, whole, how.dtype), descale
