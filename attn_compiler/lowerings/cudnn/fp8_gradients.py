"""The backward in FP8, as graph nodes around cuDNN's: the output's gradient is rounded, those of q, k and v are cast.

cuDNN writes its gradients in FP8 on sm90, so their scales have to be known before. They come from bounds that hold for any input. With P
the weights, whose rows add up to at most 1, and g, o, v rows of the output's gradient, the output and v:

    |dP - sum(g · o)| <= 2 |g| max|v|       dS = scale · P (dP - sum(g · o))
    |dQ| <= max|dS / P| · largest of k      |dK| <= sum over queries |dS| · largest of q      |dV| <= sum over queries |g|

Real gradients are far below: by 2^18 for dK of 4096 normal queries. E5M2 has 2^31 from its smallest to its largest number, so on an H200
they lost nothing against scales from the gradients' own largest values (0.075 of dQ's and dK's norm, 0.059 of dV's, either way).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attn_compiler.lowerings.cudnn.plan import FP8_GRADIENT_DTYPE, CudnnCall
from attn_compiler.lowerings.shared.ops.given_ops import Gradients, register_given_with
from attn_compiler.lowerings.shared.ops.leaf_ops import like_output
from attn_compiler.spec.fp8_recipe import LARGEST

_FORMAT = getattr(torch, FP8_GRADIENT_DTYPE)
#: half of the largest number: a rounded number may be a little above its bound
_FITS = LARGEST["e5m2"] / 2
_LARGEST_READ = LARGEST["e4m3"]


def names(call: CudnnCall, *, may_be_empty: bool) -> tuple[str, ...]:
    """Return the names of the operands. used: bool (B, 1, 1, 1), whether a batch row has keys; lengths are at least 1 then. The rest are
    the forward's, and `out` is in FP8."""
    lengths = ("lengths_q", "lengths", *(("used",) if may_be_empty else ())) if call.lengths else ()
    scales = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "descale_out")
    return ("q", "k", "v", "out", "lse", *scales, *lengths)


def gradients(grad_out: torch.Tensor, operands: Sequence[torch.Tensor], text: str) -> Gradients:
    """Return the gradients of q, k and v, in grad_out's dtype."""
    call = CudnnCall.from_text(text)
    plain, may_be_empty = names(call, may_be_empty=False), names(call, may_be_empty=True)
    given = dict(zip(may_be_empty if len(operands) > len(plain) else plain, operands, strict=True))
    upstream = grad_out.float()
    if "used" in given:
        upstream = torch.where(given["used"], upstream, 0.0)
    # Scales come from finite elements alone. Others stay NaN or infinite in every gradient that they reach.
    finite = _finite(upstream)
    scale_out = _scale(_FITS, finite.abs().amax(-1).amax())
    rounded = like_output((upstream * scale_out).to(_FORMAT))
    scales = _scales(call, given, finite)
    read = given | scales | {"descale_grad_out": _one(scale_out.reciprocal())}
    read["descale_ds"] = scales["scale_ds"].reciprocal()
    leaf = torch.ops.attn_compiler.cudnn_fp8_backward.default
    tensors = (given["q"], given["k"], given["v"], [read[n] for n in call.operands], given["out"], given["lse"])
    *grads, _ = leaf(rounded, given["lse"], *tensors, text)
    # Held: else Inductor would compute them anew for each element, and not fuse casts with their readers.
    descales = torch.ops.attn_compiler.held(torch.cat([scales[f"scale_grad_{n}"] for n in "qkv"]).reciprocal())
    wide = (g.float() * descales[i] for i, g in enumerate(grads))
    grad_q, grad_k, grad_v = (g.to(grad_out.dtype) for g in wide)
    return grad_q, grad_k, grad_v


def _scales(call: CudnnCall, given: dict[str, torch.Tensor], upstream: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the scales, float32 (1,) each. upstream: finite."""
    rows = upstream.square().sum(-1).sqrt()
    batch, heads_kv = given["k"].shape[:2]
    of_a_key = rows.sum(-1).reshape(batch, heads_kv, -1).sum(-1).amax()
    largest_v = _finite(given["v"].float()).square().sum(-1).amax().sqrt() * given["descale_v"]
    of_a_weight = 2 * call.scale * largest_v
    largest_q, largest_k = (_LARGEST_READ * given[f"descale_{name}"] for name in "qk")
    return {
        "scale_ds": _one(_scale(_FITS, of_a_weight * rows.amax())),
        "scale_grad_q": _one(_scale(_FITS, of_a_weight * rows.amax() * largest_k)),
        "scale_grad_k": _one(_scale(_FITS, of_a_weight * of_a_key * largest_q)),
        "scale_grad_v": _one(_scale(_FITS, of_a_key)),
    }


def _finite(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isfinite(), x, 0.0)


def _scale(fits: float, largest: torch.Tensor) -> torch.Tensor:
    scale = fits / largest
    # A bound of 0, or one so small that the quotient overflows: any scale does.
    return torch.where((largest > 0) & scale.isfinite(), scale, 1.0)


def _one(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(1)


register_given_with("cudnn_fp8", formula=gradients)
