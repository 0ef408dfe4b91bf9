"""The decode leaf ops in plain PyTorch, which run in place of a kernel that fails. Imports no Triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attn_compiler.lowerings.decode import plan as decode_plan
from attn_compiler.lowerings.decode.plan import DecodeCall
from attn_compiler.lowerings.shared.calls.by_definition import Attention

#: operands that mask and change scores, by their names in `kernel_plan.Plan`
_READ = {"bounds": "rows", "keys": "keys", "mask": "mask", "bias": "bias", "distances": "distances", "slopes": "slopes"}
_READ |= {"sinks": "sinks"}


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Sequence[torch.Tensor], text: str
) -> Attention:
    """Return the attention of a call of `attn_compiler::decode`, or of `decode_latent`, whose k and v are the latent. Raises ValueError if
    the number of operands is not the text's."""
    call = DecodeCall.from_text(text)
    plan = decode_plan.plan_of(call)
    given = dict(zip(plan.operands, operands, strict=True))
    if "rope" in given:
        k = torch.cat((k, given["rope"]), 3)
    k, v = (
        x if scale is None else x.float() * scale for x, scale in ((k, given.get("k_scale")), (v, given.get("v_scale")))
    )
    score = call.spec.score
    tensors = {_READ[name]: tensor for name, tensor in given.items() if name in _READ}
    if plan.means == "finite":
        tensors["rows"] = _all_where_none(tensors["rows"], k.shape[2])
    if plan.bounds_of == "row":
        within = _within(torch.unflatten(tensors.pop("rows"), 2, (q.shape[1], -1)), k.shape[2])
        tensors["mask"] = within & tensors["mask"] if "mask" in tensors else within
    return Attention(
        q=q,
        k=k,
        v=v,
        tensors=tensors,
        scale=score.scale,
        change=score.pointwise,
        means=-torch.inf if plan.means == "all" else None,
    )


def _all_where_none(bounds: torch.Tensor, seqlen_kv: int) -> torch.Tensor:
    """Return the bounds with empty ones replaced by those of all keys."""
    first, end = bounds
    none = first >= end
    return torch.stack([torch.where(none, 0, first), torch.where(none, seqlen_kv, end)])


def _within(bounds: torch.Tensor, seqlen_kv: int) -> torch.Tensor:
    """Return (2, ...) bounds as a mask of keys, bool (..., Skv)."""
    at = torch.arange(seqlen_kv, device=bounds.device)
    return (at >= bounds[0, ..., None]) & (at < bounds[1, ..., None])
