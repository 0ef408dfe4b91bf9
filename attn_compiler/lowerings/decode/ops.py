"""The leaf op of the decode kernel, `attn_compiler::decode`, without a backward. Its text is a `plan.DecodeCall`.

operands: the plan's, in its order. The first call imports triton, not the import of this file. `attn_compiler::decode_latent` is the same
over a latent, which is its k and its v; its out is float32. `attn_compiler::decode_count` makes the counters: int32 zeros on a tensor's
device, once for all sites of a graph. Bounds go through `attn_compiler::decode_bounds`, a copy, for the same reason: Inductor would
compute them anew for every layer.
"""

from __future__ import annotations

import torch

from attn_compiler.lowerings.shared.ops.leaf_ops import Tensors, fake_forward, late, register_forward
from attn_compiler.torch_private.op_library import register_helper


def _fake_of_latent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Tensors, spec: str
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = fake_forward(q, k, v, operands, spec)
    return torch.empty_like(out, dtype=torch.float32), lse


register_helper(
    "decode_bounds", "(Tensor bounds) -> Tensor", function=lambda x: x.clone(memory_format=torch.contiguous_format)
)
register_helper(
    "decode_count",
    "(Tensor like, SymInt length) -> Tensor",
    function=lambda like, length: torch.zeros(length, dtype=torch.int32, device=like.device),
)
register_forward(
    "decode",
    forward=late("decode.launch", "forward", site="ForwardSite", notes=True),
    dispatch_key="CompositeExplicitAutograd",
)
register_forward(
    "decode_latent",
    forward=late("decode.latent_launch", "forward", site="ForwardSite", notes=True),
    dispatch_key="CompositeExplicitAutograd",
    fake=_fake_of_latent,
)
