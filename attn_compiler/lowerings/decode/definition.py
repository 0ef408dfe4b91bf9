"""What the leaf ops for decoding compute, spelled out: what runs in place of a kernel that fails. Imports no Triton."""

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
    """Of a call of `attn_compiler::decode`, or of `decode_latent`, whose k and v are the latent.

    Raises ValueError if the number of operands is not the text's.
    """
    call = DecodeCall.from_text(text)
    given = dict(zip(decode_plan.of(call).operands, operands, strict=True))
    if "rope" in given:
        k = torch.cat((k, given["rope"]), 3)
    k, v = (
        x if scale is None else x.float() * scale for x, scale in ((k, given.get("k_scale")), (v, given.get("v_scale")))
    )
    score = call.spec.score
    return Attention(
        q=q,
        k=k,
        v=v,
        tensors={_READ[name]: tensor for name, tensor in given.items() if name in _READ},
        scale=score.scale,
        change=score.pointwise,
    )
