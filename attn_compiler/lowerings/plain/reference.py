"""The reference: attention exactly as its spec says, on any device, forward and backward. In float32, or in the widest dtype of the model.

Slow and large (all scores are in memory): other lowerings are compared with it, and it runs only when asked for.

    s = scale · (q kᵀ);  s = softcap · tanh(s / softcap);  s = s + mask + bias;  p = softmax([s, sinks])[..., :Skv];  out = p v

A row without any allowed key (and without a sink) gives 0, its lse is -inf, and its gradients are 0. The values of such a query, and of a
key that no query may see, reach no result, even if they are NaN.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from attn_compiler.lowerings.base import Anywhere, Emitter, Operands, first_two
from attn_compiler.lowerings.plain.plain_math import handed_to_merge
from attn_compiler.lowerings.plain.takes import REFERENCE
from attn_compiler.lowerings.shared.limits import mask_limits
from attn_compiler.lowerings.shared.limits.takes import refused
from attn_compiler.lowerings.shared.parts import score_changes
from attn_compiler.reasons.decisions import Reason
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.dtypes import computed_in
from attn_compiler.spec.masks import Alignment, Causal
from attn_compiler.spec.target import Target

Tensors = Sequence[torch.Tensor]


class Reference(Anywhere):
    """`attn_compiler::reference` (ops.py): every spec without dropout and returned weights."""

    name = "reference"

    def why_not(self, spec: AttentionSpec, target: Target) -> list[Reason]:
        return check_site(spec)

    def emit(self, emitter: Emitter, spec: AttentionSpec, operands: Operands) -> fx.Node:
        return emitter.call(operator.getitem, _outputs(emitter, spec, operands), 0)

    def emit_with_lse(self, emitter: Emitter, spec: AttentionSpec, operands: Operands) -> tuple[fx.Node, fx.Node]:
        return handed_to_merge(emitter, spec, *first_two(emitter, _outputs(emitter, spec, operands)))


def _outputs(emitter: Emitter, spec: AttentionSpec, operands: Operands) -> fx.Node:
    further = [node for node in (operands.mask, operands.sinks) if node is not None]
    leaf = torch.ops.attn_compiler.reference.default
    return emitter.call(leaf, operands.q, operands.k, operands.v, further, spec.to_text())


def check_site(spec: AttentionSpec) -> list[Reason]:
    """Return why the reference can't compute a site."""
    return [*refused(REFERENCE, spec), *mask_limits.check_one_tensor(spec)]


# ---- the leaf op's two bodies ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Scores:
    """Scores of one call, all (B, Hq, Sq, Skv) in the compute dtype.

    changed: scale · (q kᵀ) after the change of each score. logits: after masks and biases, -inf where a pair is not allowed.
    sinks: (Hq,) in the compute dtype, or None.
    """

    changed: torch.Tensor
    logits: torch.Tensor
    sinks: torch.Tensor | None


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Tensors, spec: AttentionSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out (B, Hq, Sq, Dv) and lse (B, Hq, Sq), the natural logarithm of the softmax's denominator, sinks included.

    Both come in the compute dtype. operands: see `ops.LEAF_SCHEMA`. Sizes are those of the tensors, not the spec's.
    """
    q, k, v = without_unused(q, k, v, operands, spec)
    scores = _scores(q, k, operands, spec)
    out = _weights(scores)[..., : k.shape[2]] @ repeated(v, q).to(scores.logits.dtype)
    return out, torch.logsumexp(_terms(scores), dim=-1)


def backward(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    operands: Tensors,
    spec: AttentionSpec,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return the gradients of q, k, v and of `differentiable(operands, spec)`, in the compute dtype. grad_lse: gradient of the lse."""
    q, k, v = without_unused(q, k, v, operands, spec)
    scores = _scores(q, k, operands, spec)
    dtype = scores.logits.dtype
    all_weights = _weights(scores)
    weights, of_sinks = all_weights[..., : k.shape[2]], all_weights[..., k.shape[2] :]
    grad_out = grad_out.to(dtype)
    grad_v = _folded(weights.transpose(-1, -2) @ grad_out, v)
    grad_weights = grad_out @ repeated(v, q).to(dtype).transpose(-1, -2)
    # The softmax's own term and the lse's: both add a multiple of the row's weights.
    row = grad_lse.to(dtype)[..., None] - (weights * grad_weights).sum(-1, keepdim=True)
    grad_logits = weights * (grad_weights + row)
    grad_raw = score_changes.through(grad_logits, scores.changed, spec.score.pointwise) * spec.score.scale
    grad_q = grad_raw @ repeated(k, q).to(dtype)
    grad_k = _folded(grad_raw.transpose(-1, -2) @ q.to(dtype), k)
    return grad_q, grad_k, grad_v, _operand_gradients(grad_logits, row * of_sinks, operands, spec)


def without_unused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Tensors, spec: AttentionSpec
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q with 0 in rows without any allowed key, and k and v with 0 at keys that no query may see. Weights of 0 times values that are
    not finite would be NaN. Without any mask the tensors themselves are returned."""
    allowed = _allowed(q, k, operands, spec)
    if allowed is None:
        return q, k, v
    of_heads = allowed.any(-2)
    if of_heads.shape[1] > 1:
        of_heads = torch.unflatten(of_heads, 1, (k.shape[1], -1)).any(2)
    seen, has_keys = of_heads[..., None], allowed.any(-1, keepdim=True)
    return torch.where(has_keys, q, 0.0), torch.where(seen, k, 0.0), torch.where(seen, v, 0.0)


def _allowed(q: torch.Tensor, k: torch.Tensor, operands: Tensors, spec: AttentionSpec) -> torch.Tensor | None:
    """Return which pairs are allowed, bool (B|1, Hq|1, Sq, Skv); None if every pair is."""
    pairs = q.new_zeros((1, 1, q.shape[2], k.shape[2]), dtype=torch.bool)
    found = [] if spec.mask.flagged is None else [_causal(spec.mask.flagged, pairs)[None, None]]
    for tensor in _split(operands, spec)[0]:
        truth = tensor if tensor.dtype == torch.bool else tensor != -torch.inf
        found.append(truth.reshape((1,) * (4 - truth.dim()) + truth.shape) | pairs)
    return functools.reduce(operator.and_, found) if found else None


def differentiable(operands: Tensors, spec: AttentionSpec) -> list[bool]:
    """Return for each operand whether it gets a gradient: a bias or sinks whose spec asks for it; a mask never does."""
    dense, bias, sinks = spec.mask.dense, spec.score.bias, spec.score.sinks
    wanted = [False] * (dense is not None)
    wanted += [bias.requires_grad] if bias is not None else []
    wanted += [sinks.requires_grad] if sinks is not None else []
    if len(wanted) != len(operands):
        raise ValueError(f"the spec has {len(wanted)} operands (mask, bias, sinks), got {len(operands)}")
    return wanted


def _split(operands: Tensors, spec: AttentionSpec) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Return the tensors that are added to the scores (mask and bias), and the sinks."""
    differentiable(operands, spec)
    if spec.score.sinks is None:
        return list(operands), None
    return list(operands[:-1]), operands[-1]


def _scores(q: torch.Tensor, k: torch.Tensor, operands: Tensors, spec: AttentionSpec) -> _Scores:
    if mask_limits.check_masks(spec):
        raise ValueError(f"the reference does not know the mask {spec.mask.words}")
    # The dtype of the widest step of the model.
    dtype = torch.float64 if spec.score.softmax_dtype == "float64" else computed_in(q.dtype)
    added, sinks = _split(operands, spec)
    raw = (q.to(dtype) @ repeated(k, q).to(dtype).transpose(-1, -2)) * spec.score.scale
    changed = logits = score_changes.applied(operator.call, raw, spec.score.pointwise)
    for tensor in added:
        logits = torch.where(tensor, logits, -torch.inf) if tensor.dtype == torch.bool else logits + tensor.to(dtype)
    if spec.mask.flagged is not None:
        logits = torch.where(_causal(spec.mask.flagged, logits), logits, -torch.inf)
    return _Scores(changed=changed, logits=logits, sinks=None if sinks is None else sinks.to(dtype))


def _causal(kind: Causal, logits: torch.Tensor) -> torch.Tensor:
    seqlen_q, seqlen_kv = logits.shape[-2:]
    shift = 0 if kind.alignment is Alignment.TOP_LEFT else seqlen_kv - seqlen_q
    rows = torch.arange(seqlen_q, device=logits.device)[:, None]
    return torch.arange(seqlen_kv, device=logits.device)[None, :] <= rows + shift


def _terms(scores: _Scores) -> torch.Tensor:
    """Return the softmax's input: (B, Hq, Sq, Skv), and one more column where there are sinks."""
    if scores.sinks is None:
        return scores.logits
    sinks = scores.sinks[None, :, None, None].expand(*scores.logits.shape[:3], 1)
    return torch.cat((scores.logits, sinks), dim=-1)


def _weights(scores: _Scores) -> torch.Tensor:
    """Return the softmax of all terms; 0 in a row without any allowed key. It is not computed from the lse: beside numbers as large as
    those of masks (-1e9) an lse can't hold the logarithm of the number of keys."""
    weights: torch.Tensor = torch.ops.aten._safe_softmax.default(_terms(scores), -1)
    return weights


def _operand_gradients(
    grad_logits: torch.Tensor, grad_sinks: torch.Tensor, operands: Tensors, spec: AttentionSpec
) -> list[torch.Tensor]:
    """Return the gradients of bias and sinks. grad_sinks: (B, Hq, Sq, 1). A sink has no value, so only the row's common term reaches it."""
    added, sinks = _split(operands, spec)
    wanted = differentiable(operands, spec)
    gradients = [grad_logits.sum_to_size(x.shape) for x, is_wanted in zip(added, wanted, strict=False) if is_wanted]
    if sinks is not None and wanted[-1]:
        gradients.append(grad_sinks.sum((0, 2, 3)))
    return gradients


def logits(
    q: torch.Tensor, k: torch.Tensor, operands: Tensors, spec: AttentionSpec
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return logits (B, Hq, Sq, Skv), -inf where a pair is not allowed, and the sinks (Hq,), both in the compute dtype."""
    scores = _scores(q, k, operands, spec)
    return scores.logits, scores.sinks


def repeated(tensor: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Repeat (B, Hkv, ...) to (B, Hq, ...): query head h reads kv head h // (Hq // Hkv)."""
    return tensor.repeat_interleave(_group(q.shape[1], tensor.shape[1]), dim=1)


def _folded(grad: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Sum gradients of query heads that read one kv head: the inverse of `repeated`."""
    batch, heads_kv = like.shape[:2]
    return grad.reshape(batch, heads_kv, _group(grad.shape[1], heads_kv), *grad.shape[2:]).sum(2)


def _group(heads_q: int, heads_kv: int) -> int:
    """Return how many query heads read one kv head. In a tensor of three axes the first counts as heads, and may be an empty batch."""
    return heads_q // heads_kv if heads_kv else 1
