"""Restores q, k and v for the backward of an attention in FP8 from the rounded tensors, so the forward writes no copies of q and k for it.

`<family>_rounded_given` (shared/ops/given_ops.py) passes on out and lse of a leaf op without a gradient, and has the backward of a family.
That backward gets the rounded q, k and v in the model's dtype, since its weights come from their scores and the forward's lse. Scores of
the model's own q and k differ, by unbounded factors where scores are large or a scale is too old. With the model's own v, the gradients of
a row's scores would no longer add up to 0: where keys have a mean, q's gradient would be less exact. Gradients pass through as if nothing
had been rounded, rotated or moved.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from attn_compiler.lowerings.base import Emitter, Operands
from attn_compiler.lowerings.fp8 import quantise, rounding
from attn_compiler.lowerings.fp8.quantise import Rounded
from attn_compiler.lowerings.shared.ops.given_ops import Read, Tensors, register_given
from attn_compiler.lowerings.shared.ops.leaf_ops import Differentiable, OfTensor, as_it_is
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.codec import Codec, Coded


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept(Coded):
    """Layout of the operands after out and lse: those of `Rounded.kept`, by `names`, then the family's.

    block: positions that share a scale; None: all. rotated: q and k were rotated. has_mean, positions_last: as in
    quantise.kept_names. dtype: the model's. call: the family's own text.
    """

    block: int | None
    rotated: bool
    has_mean: bool
    positions_last: bool
    dtype: str
    call: str

    @property
    def names(self) -> tuple[str, ...]:
        return quantise.kept_names(has_mean=self.has_mean, positions_last=self.positions_last)


Kept.codec = Codec((Kept,))


def kept_of(spec: AttentionSpec, text: str, *, positions_last: bool = True) -> Kept:
    """Return the layout of a site. text: the family's own. positions_last: as in `quantise.emit`."""
    recipe = quantise.recipe_of(spec)
    return Kept(
        block=quantise.scales_of(spec).block,
        rotated=recipe.hadamard,
        has_mean=quantise.needs_shift(spec),
        positions_last=positions_last,
        dtype=spec.dtype,
        call=text,
    )


def op_of(family: str) -> str:
    """Return the name of the op with a family's backward."""
    return f"{family}_rounded_given"


def register(family: str, *, differentiable: Differentiable, prepare_grad_out: OfTensor = as_it_is) -> None:
    """Define the op of `op_of`. The family's backward has to be registered; as `ops.register_family` otherwise."""
    register_given(
        family,
        op_of(family),
        leading=lambda text: len(Kept.from_text(text).names),
        read=_read,
        differentiable=differentiable,
        prepare_grad_out=prepare_grad_out,
    )


def call_leaf(
    emitter: Emitter,
    spec: AttentionSpec,
    operands: Operands,
    rounded: Rounded,
    further: Sequence[fx.Node],
    *,
    leaf: str,
    family: str,
    text: str,
) -> fx.Node:
    """Return the output of a leaf op that reads rounded tensors, with the backward of a family if gradients are wanted.

    further: the family's own operands, which the leaf op takes after the rounded ones. text: of both.
    """
    call = getattr(torch.ops.attn_compiler, leaf).default
    shapes = [_shape_of(emitter, x) for x in (operands.q, operands.k, operands.v)]
    detached = [emitter.call(torch.Tensor.detach, x) for x in further] if spec.needs_grad else list(further)
    outputs = emitter.call(call, *shapes, [*rounded.operands, *detached], text)
    out = emitter.call(operator.getitem, outputs, 0)
    if not spec.needs_grad:
        return out
    lse = emitter.call(operator.getitem, outputs, 1)
    return attach(emitter, spec, operands, rounded, [out, lse], further, family=family, text=text)


def attach(
    emitter: Emitter,
    spec: AttentionSpec,
    operands: Operands,
    rounded: Rounded,
    results: Sequence[fx.Node],
    further: Sequence[fx.Node],
    *,
    family: str,
    text: str,
    positions_last: bool = True,
) -> fx.Node:
    """Return the output with a gradient. results: out and lse of the forward. further: the family's own operands. text: the family's.
    positions_last: as in `quantise.emit`."""
    op = getattr(torch.ops.attn_compiler, op_of(family)).default
    tensors = (operands.q, operands.k, operands.v, [*results, *rounded.kept, *further])
    kept = kept_of(spec, text, positions_last=positions_last)
    return emitter.call(operator.getitem, emitter.call(op, *tensors, kept.to_text()), 0)


def _shape_of(emitter: Emitter, x: fx.Node) -> fx.Node:
    """Return an unwritten tensor of x's shape and dtype, for ops that read only these."""
    value = emitter.value(x)
    empty = emitter.call(torch.empty, (1, 1, 1, 1), dtype=value.dtype, device=value.device)
    return emitter.call(torch.Tensor.expand_as, empty, x)


def _read(kept: Tensors, text: str) -> Read:
    how = Kept.from_text(text)
    given = dict(zip(how.names, kept, strict=True))
    v = given["v"] if "v" in given else _restored("v", given, how)
    return Read(q=_restored("q", given, how), k=_restored("k", given, how), v=v, text=how.call)


def exact(spec: AttentionSpec, given: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k and v in float32 as the forward's kernel reads them. given: the operands of `quantise.names`, by name. A shift becomes
    one more element of each head of q and k, so that it is added where the kernel adds it, before scale and softcap."""
    block = quantise.scales_of(spec).block
    q, k = (_descaled(given[f"{x}8"], given[f"descale_{x}"], block) for x in ("q", "k"))
    v = _descaled(rounding.in_order(given["v8"]).transpose(2, 3)[:, :, : k.shape[2]], given["descale_v"], block)
    if "shift" in given:
        q = torch.cat((q, given["shift"][..., None]), -1)
        k = torch.cat((k, torch.ones_like(k[..., :1])), -1)
    return q, k, v


def _descaled(x: torch.Tensor, descale: torch.Tensor, block: int | None) -> torch.Tensor:
    of_positions = descale if block is None else rounding.spread(descale, block, x.shape[2])
    return x.float() * of_positions[..., None]


def _restored(name: str, given: Mapping[str, torch.Tensor], how: Kept) -> torch.Tensor:
    numbers, descale, dtype = given[f"{name}8"], given[f"descale_{name}"], getattr(torch, how.dtype)
    if how.rotated and name != "v":
        numbers = rounding.unrotated(numbers, dtype, near=1 / numbers.shape[3])
    found = _descaled(numbers, descale, how.block)
    return (found + given["mean"][:, :, :1] if name == "k" and how.has_mean else found).to(dtype)
