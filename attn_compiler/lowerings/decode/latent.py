"""Our own kernel over the latent that k and v are made of: it reads only the filled part of the cache, and once for both products.

q is multiplied by k's weight in the model's dtype. The kernel's result is float32. It is multiplied by v's weight as the sum of two
numbers of the model's dtype: rounding it to one would be most of the error. Imports no Triton.
"""

from __future__ import annotations

import dataclasses
import operator

import torch
from torch import fx

from attn_compiler.lowerings.base import Emitter, LayoutDemand, Operands
from attn_compiler.lowerings.decode import gathered, latent_hopper, latent_schedule, operands as decode_operands
from attn_compiler.lowerings.decode.plan import DecodeCall
from attn_compiler.lowerings.decode.takes import OF_LATENT
from attn_compiler.lowerings.shared.limits import kernel_limits
from attn_compiler.lowerings.shared.parts import latents
from attn_compiler.lowerings.shared.parts.by_parts import ByParts
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason, refuse
from attn_compiler.spec.attention import AttentionSpec, LatentSpec
from attn_compiler.spec.dtypes import HALVES
from attn_compiler.spec.target import Target

#: the widest latent and rope part that shared memory has room for; bytes of a vector
_MOST_RANK, _MOST_ROPE, _VECTOR = 512, 128, 16


class DecodeLatent(ByParts):
    """`attn_compiler::decode_latent` (ops.py)."""

    name = "decode_latent"

    def unavailable(self, target: Target) -> list[Reason]:
        return kernel_limits.check_machine(target)

    def why_not(self, spec: AttentionSpec, target: Target) -> list[Reason]:
        refused = latents.check_latent(spec)
        if spec.latent is None:
            return refused
        refused += kernel_limits.check_site(spec, target, OF_LATENT)
        # Only a spec that is not refused has known parts.
        return refused or [
            *OF_LATENT.check_parts(spec, "no {} over a latent"),
            *_check_sizes(spec, spec.latent),
            *_check_layouts(spec.latent),
        ]

    def demand(self, spec: AttentionSpec) -> LayoutDemand:
        """Demand no strides: the kernel reads neither k nor v, and q is computed again."""
        return LayoutDemand(last_stride_one=False)

    def gives_means(self, spec: AttentionSpec, target: Target) -> bool:
        return gathered.chosen_of(spec) is None

    def emit(self, emitter: Emitter, spec: AttentionSpec, operands: Operands) -> fx.Node:
        latent = spec.latent
        if latent is None:
            raise ValueError("the site has no latent")
        dtype = emitter.value(operands.q).dtype
        emitter.note(latents.note(spec, latent))
        chosen = gathered.read(emitter, spec, operands, of_latent=True)
        spec, operands = chosen.spec, chosen.operands
        given = latents.given(operands)
        emitter.note(latent_hopper.note(latent_hopper.refused(spec, emitter.target)))
        nope, of_rope = latents.parts_of_q(emitter, latent, operands.q)
        parts = [latents.by_heads(emitter, nope, given.weight_k), *(() if of_rope is None else (of_rope,))]
        q = emitter.call(torch.cat, parts, -1)
        call = DecodeCall(spec=spec, schedule=latent_schedule.schedule(spec, emitter.target), of_latent=True)
        read = dataclasses.replace(operands, k=given.latent, v=given.latent)
        text, further = decode_operands.emit(emitter, call, read)
        leaf = torch.ops.attn_compiler.decode_latent.default
        outputs = emitter.call(leaf, q, given.latent, given.latent, further, text)
        out = emitter.call(operator.getitem, outputs, 0)
        weight = emitter.call(torch.transpose, given.weight_v, 1, 2)
        return chosen.restored(emitter, _times(emitter, out, weight, dtype))


def _times(emitter: Emitter, out: fx.Node, weight: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Multiply float32 (B, H, Sq, rank) by each head's weight, with products in `dtype`: of the rounded numbers, and of their rounding
    errors."""
    if dtype not in HALVES:
        return latents.by_heads(emitter, out, weight)
    queries = emitter.value(out).shape[2]
    rounded = emitter.call(torch.Tensor.to, out, dtype)
    rest = emitter.call(torch.Tensor.to, emitter.call(torch.sub, out, rounded), dtype)
    both = latents.by_heads(emitter, emitter.call(torch.cat, [rounded, rest], 2), weight)
    halves = (emitter.call(torch.narrow, both, 2, first, queries) for first in (0, queries))
    return emitter.call(torch.add, *halves)


def _check_sizes(spec: AttentionSpec, latent: LatentSpec) -> list[Reason]:
    rope = 0 if latent.rope is None else latent.rope.shape[3]
    multiple = 8 if spec.dtype != "float32" else 1
    sizes = ((latent.rank, _MOST_RANK), (rope, _MOST_ROPE))
    if all(isinstance(size, int) and size <= most and size % multiple == 0 for size, most in sizes):
        return []
    rule = f"the latent has at most {_MOST_RANK} dims, and {_MOST_ROPE} beside it, in half precision multiples of 8"
    return refuse(Code.LATENT, rule, f"{latent.rank} and {rope}")


def _check_layouts(latent: LatentSpec) -> list[Reason]:
    """Refuse layouts that would need a copy of the whole cache."""
    parts = (("latent", latent.latent), ("part beside it", latent.rope))
    dtype_bytes = 1 if latent.latent.dtype == "float32" else _VECTOR
    demand = LayoutDemand(alignment=dtype_bytes)
    broken = [(name, demand.broken_by(tensor)) for name, tensor in parts if tensor is not None]
    return [
        Reason(code=Code.LAYOUT, rule=f"the {name} is read as it lies", observed=why)
        for name, why in broken
        if why is not None
    ]
