"""Results of kernels against the numeric rule (attn_compiler/spec/numerics.py).

The math here is written on its own, from the definition: it shares no code with the reference lowering.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from attn_compiler.spec.masks import Alignment
from attn_compiler.spec.numerics import FACTOR, FACTOR_SOFTCAP, FLOOR_ULPS, difference, exact_dtype
from tests.cases import Inputs

Attention = Callable[[Inputs], torch.Tensor]


def attention(inputs: Inputs) -> torch.Tensor:
    """Attention by its definition, every step in the inputs' dtype. A row without any allowed key gives 0."""
    spec = inputs.spec
    group = inputs.q.shape[1] // inputs.k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1) for t in (inputs.k, inputs.v))
    scores = inputs.q @ k.transpose(-1, -2) * spec.score.scale
    if spec.score.softcap is not None:
        scores = spec.score.softcap * (scores / spec.score.softcap).tanh()
    if inputs.bias is not None:
        scores = scores + inputs.bias
    allowed = torch.ones_like(scores, dtype=torch.bool)
    if inputs.mask is not None and inputs.mask.dtype == torch.bool:
        allowed = allowed & inputs.mask
    elif inputs.mask is not None:
        scores, allowed = scores + inputs.mask, allowed & (inputs.mask > -torch.inf)
    if spec.mask.flagged is not None:
        shift = 0 if spec.mask.flagged.alignment is Alignment.TOP_LEFT else scores.shape[-1] - scores.shape[-2]
        allowed = allowed & torch.ones_like(scores, dtype=torch.bool).tril(shift)
    sinks = None if inputs.sinks is None else inputs.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return _weights(scores, allowed, sinks) @ v


def _weights(scores: torch.Tensor, allowed: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the allowed keys and the sink; -inf never enters it, so that no gradient becomes NaN."""
    lowest = torch.finfo(scores.dtype).min
    scores = scores.where(allowed, lowest)
    joined = scores if sinks is None else torch.cat((scores, sinks), dim=-1)
    weights = joined.softmax(-1)[..., : scores.shape[-1]]
    return weights.where(allowed, 0.0)


def with_gradients(function: Attention, inputs: Inputs, *, seed: int = 1) -> tuple[torch.Tensor, ...]:
    """The output, then the gradients of `inputs.differentiable` for one random upstream gradient."""
    out = function(inputs)
    generator = torch.Generator().manual_seed(seed)
    # Drawn contiguous in float32 and rounded once, so that every dtype and layout gets the same one.
    upstream = torch.randn(out.shape, generator=generator).to(inputs.q.dtype).to(device=out.device, dtype=out.dtype)
    return out, *torch.autograd.grad(out, inputs.differentiable, upstream)


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """The same numbers in another dtype, as new leaves."""
    tensors = {}
    for name in ("q", "k", "v", "mask", "bias", "sinks"):
        tensor = getattr(inputs, name)
        if tensor is None or tensor.dtype == torch.bool:
            continue
        tensors[name] = tensor.detach().to(dtype).requires_grad_(tensor.requires_grad)
    return dataclasses.replace(inputs, **tensors)


def worst(got: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference; infinite where one of them is not finite and the other is something else. NaN is near to nothing."""
    off = difference(got.detach(), exact.detach().double()).masked_fill(got.detach().isnan(), torch.inf)
    return float(off.max()) if off.numel() else 0.0


def assert_within_rule(
    got: Sequence[torch.Tensor], inputs: Inputs, *, names: Sequence[str] = ("out", "dq", "dk", "dv")
) -> None:
    """Hold `got` (as `with_gradients` returns it, or the output alone) against the rule."""
    exact, plain = (
        with_gradients(attention, given) if len(got) > 1 else (attention(given),)
        for given in (cast(inputs, exact_dtype(inputs.q.dtype)), cast(inputs, inputs.q.dtype))
    )
    factor = FACTOR if inputs.spec.score.softcap is None else FACTOR_SOFTCAP
    labels = [*names, *(f"d{name}" for name in ("bias", "sinks") if getattr(inputs, name) is not None)]
    for label, mine, right, usual in zip(labels, got, exact, plain, strict=False):
        allowed = factor * worst(usual, right) + floor(right, inputs.q.dtype, gradient=label != "out")
        found = worst(mine, right)
        assert mine.shape == right.shape, f"{label}: shape {tuple(mine.shape)} instead of {tuple(right.shape)}"
        assert mine.dtype == usual.dtype, f"{label}: {mine.dtype} instead of {usual.dtype}"
        assert found <= allowed, f"{label}: off by {found:.3g}, allowed {allowed:.3g}"


def floor(exact: torch.Tensor, dtype: torch.dtype, *, gradient: bool = False) -> float:
    """Rounding of a result of this size in `dtype`, and of one that cancels to less: terms of size one were rounded for it.

    gradient: of a softmax's scores, which cancels products of whole heads; with a single key it is exactly 0, and the plain math
    has no error at all to compare with. In half precision the products are rounded less than the result.
    """
    size = max(float(exact.detach().abs().max()), 0.5) if exact.numel() else 0.0
    terms = 4.0 if gradient and dtype in (torch.float32, torch.float64) else 1.0
    return FLOOR_ULPS[dtype] * torch.finfo(dtype).eps * size * terms
