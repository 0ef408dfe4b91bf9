"""A match to an AttentionSpec: the operands are made on fake values, so that shapes, strides and dtypes are what a kernel would see.

Masks stay as they are here: absent, `is_causal`, or one dense tensor that combines everything that is added or masked.
"""

from __future__ import annotations

import torch

from attn_compiler import masks, scores, torch_compat
from attn_compiler.passes import emit, program
from attn_compiler.passes.axes import AxisError
from attn_compiler.passes.emit import FakeBuilder
from attn_compiler.passes.mirror import Mirror
from attn_compiler.passes.program import Tensors
from attn_compiler.passes.site import Match, Miss, Site
from attn_compiler.passes.unit import Unit
from attn_compiler.report import Reason
from attn_compiler.spec import AttentionSpec, Dim, TensorSpec


def run(unit: Unit, mirror: Mirror) -> None:
    """Give every site its spec. A site whose operands can't be arranged becomes a miss."""
    kept = []
    builder: FakeBuilder[torch.Tensor] = FakeBuilder(mirror, unit.mode)
    for site in unit.sites:
        try:
            site.spec = describe(mirror, site.match, builder)
        except AxisError as error:
            unit.misses.append(_miss(site, error))
        else:
            kept.append(site)
    unit.sites = kept


def _miss(site: Site, error: AxisError) -> Miss:
    reason = Reason(rule="q, k, v and the mask can be brought into (batch, heads, sequence, head dim)", observed=str(error))
    return Miss(anchor=site.match.anchor, nearest=site.match.pattern, stopped_at=site.match.out, reason=reason)


def compute_dtype(mirror: Mirror, match: Match) -> torch.dtype:
    """The dtype that the model multiplies q and k in (autocast included)."""
    value = match.first.meta["val"]
    dtype: torch.dtype = value.dtype
    return dtype


def describe(mirror: Mirror, match: Match, builder: FakeBuilder[torch.Tensor]) -> AttentionSpec:
    """The spec of one match. Raises AxisError."""
    out = emit.example(mirror, match.out)
    needs_grad = bool(out.requires_grad)
    tensors = program.build(mirror, match, builder, compute_dtype(mirror, match))
    return AttentionSpec(
        q=_tensor_spec(tensors.q, emit.example(mirror, match.q.root)),
        k=_tensor_spec(tensors.k, emit.example(mirror, match.k.root)),
        v=_tensor_spec(tensors.v, emit.example(mirror, match.v.root)),
        mask=_mask_spec(mirror, match, tensors, needs_grad),
        score=_score_spec(mirror, match, tensors, needs_grad),
        device=out.device.type,
        out_dtype=_name(out.dtype),
        needs_grad=needs_grad,
        returns_weights=match.returns_weights,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dims(sizes: torch.Size | tuple[int, ...]) -> tuple[Dim, ...]:
    return tuple(torch_compat.dim_of(s) for s in sizes)


def _tensor_spec(value: torch.Tensor, root: torch.Tensor) -> TensorSpec:
    return TensorSpec(
        shape=_dims(value.shape),
        strides=_dims(value.stride()),
        dtype=_name(value.dtype),
        requires_grad=bool(root.requires_grad),
    )


def _wants_bias_gradient(mirror: Mirror, match: Match) -> bool:
    return any(emit.example(mirror, t.operand.root).requires_grad for t in match.additive)


def _mask_spec(
    mirror: Mirror, match: Match, tensors: Tensors[torch.Tensor], needs_grad: bool
) -> masks.MaskSpec:
    kinds: list[masks.MaskKind] = [masks.Causal()] if match.is_causal else []
    if tensors.mask is not None and not (needs_grad and _wants_bias_gradient(mirror, match)):
        terms = len(match.additive) + len(match.allowed)
        kinds.append(masks.Dense(shape=_dims(tensors.mask.shape), dtype=_name(tensors.mask.dtype), terms=terms))
    return masks.MaskSpec(kinds=tuple(kinds))


def _score_spec(
    mirror: Mirror, match: Match, tensors: Tensors[torch.Tensor], needs_grad: bool
) -> scores.ScoreSpec:
    changes: list[scores.ScoreChange] = [scores.Unusual(what=what) for what in match.unusual]
    if match.softcap is not None:
        changes.append(scores.Softcap(cap=match.softcap))
    if tensors.mask is not None and needs_grad and _wants_bias_gradient(mirror, match):
        changes.append(scores.DenseBias(shape=_dims(tensors.mask.shape), dtype=_name(tensors.mask.dtype)))
    if match.sinks is not None:
        changes.append(scores.Sinks(requires_grad=emit.example(mirror, match.sinks.root).requires_grad))
    return scores.ScoreSpec(
        scale=match.scale,
        runtime_scale=bool(match.factors),
        changes=tuple(changes),
        dropout_p=match.dropout_p,
        softmax_dtype=match.softmax_dtype,
    )
