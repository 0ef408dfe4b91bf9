"""Attention as plain nodes: two products, and a softmax whose pointwise steps Inductor fuses. It has no kernel of its own.

All scores are in memory, so it is for sizes where that is cheap; there it beats a fused kernel on the CPU (see priorities).
It reads K/V of fewer heads without repeating them: query heads that share one are rows of the same product.

All of it is float32 (float64 for float64), and the output is rounded once. The softmax runs in float64 where the model's own does. A
product in half precision would round the scores themselves: one beyond 65504 is Inf in float16, and one of 300 is off by 1 in bfloat16,
which no later step repairs. PyTorch's own kernels keep the scores in float32, too, and its math the weights and the values.
"""

from __future__ import annotations

import torch
from torch import fx

from attn_compiler.index_expr.on_nodes import size_of
from attn_compiler.lowerings.base import Anywhere, Emitter, Operands, first_two
from attn_compiler.lowerings.graph_ops.merging import as_part
from attn_compiler.lowerings.plain.takes import MATH
from attn_compiler.lowerings.shared.limits import mask_limits
from attn_compiler.lowerings.shared.limits.takes import refused
from attn_compiler.lowerings.shared.parts import score_changes, unused
from attn_compiler.reasons.decisions import Reason
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.dtypes import computed_in
from attn_compiler.spec.target import Target

aten = torch.ops.aten


class PlainMath(Anywhere):
    """All sites but those with returned weights or with score changes and masks of no known kind; any device, any layout."""

    name = "math"

    def cannot_package(self) -> list[Reason]:
        return []

    def why_not(self, spec: AttentionSpec, target: Target) -> list[Reason]:
        return [*refused(MATH, spec), *mask_limits.check_one_tensor(spec)]

    def emit(self, emitter: Emitter, spec: AttentionSpec, operands: Operands) -> fx.Node:
        operands = unused.cleared(emitter, spec, operands)
        weights = attention_weights(emitter, spec, operands, _scores(emitter, spec, operands))
        return _weighted(emitter, spec, operands, weights)

    def emit_with_lse(self, emitter: Emitter, spec: AttentionSpec, operands: Operands) -> tuple[fx.Node, fx.Node]:
        operands = unused.cleared(emitter, spec, operands)
        scores = _softmaxed(emitter, spec, operands, _scores(emitter, spec, operands))
        out = _weighted(emitter, spec, operands, _weights(emitter, spec, scores, operands.sinks))
        lse = _logsumexp(emitter, spec, _with_sinks(emitter, scores, operands.sinks))
        lse = cast(emitter, lse, computed_in(emitter.value(operands.q).dtype))
        return handed_to_merge(emitter, spec, out, lse)


def handed_to_merge(emitter: Emitter, spec: AttentionSpec, out: fx.Node, lse: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return out and lse, through the op that gives the lse of a merged site its gradient (graph_ops/merging.py)."""
    return first_two(emitter, emitter.call(as_part, out, lse)) if spec.lse == "merged" else (out, lse)


def _weighted(emitter: Emitter, spec: AttentionSpec, operands: Operands, weights: fx.Node) -> fx.Node:
    dtype = emitter.value(operands.q).dtype
    if spec.score.dropout_p:
        weights = emitter.call(torch.dropout, weights, spec.score.dropout_p, True)
    weights = cast(emitter, weights, computed_in(dtype))
    rows = _share_rows(emitter, spec, weights)
    out = emitter.call(torch.matmul, rows, cast(emitter, operands.v, computed_in(dtype)))
    return cast(emitter, _own_rows(emitter, spec, out), dtype)


def _scores(emitter: Emitter, spec: AttentionSpec, operands: Operands) -> fx.Node:
    """Return the scaled scores, (B, Hq, Sq, Skv) in the compute dtype."""
    compute = computed_in(emitter.value(operands.q).dtype)
    # Inductor turns a product with a scale behind it into an SDPA call, and so into the kernel that
    # this lowering was preferred to.
    q = emitter.call(torch.mul, cast(emitter, operands.q, compute), spec.score.scale)
    k = emitter.call(torch.transpose, cast(emitter, operands.k, compute), 2, 3)
    return _own_rows(emitter, spec, emitter.call(torch.matmul, _share_rows(emitter, spec, q), k))


def attention_weights(emitter: Emitter, spec: AttentionSpec, operands: Operands, scores: fx.Node) -> fx.Node:
    """Return the softmax's weights for scaled scores (B, Hq, Sq, Skv), which are changed and masked first."""
    return _weights(emitter, spec, _softmaxed(emitter, spec, operands, scores), operands.sinks)


def _softmaxed(emitter: Emitter, spec: AttentionSpec, operands: Operands, scores: fx.Node) -> fx.Node:
    """Return the softmax's input, without sinks."""
    scores = score_changes.applied(emitter.call, scores, spec.score.pointwise)
    scores = _masked(emitter, spec, scores, operands.mask)
    return cast(emitter, scores, torch.float64) if spec.score.softmax_dtype == "float64" else scores


def _masked(emitter: Emitter, spec: AttentionSpec, scores: fx.Node, mask: fx.Node | None) -> fx.Node:
    """Set scores of disallowed pairs to -inf: by `mask`, which selects if it is bool and is added otherwise, and by the causal flag."""
    if mask is not None and emitter.value(mask).dtype == torch.bool:
        scores = emitter.call(torch.where, mask, scores, -torch.inf)
    elif mask is not None:
        scores = emitter.call(torch.add, scores, mask)
    if spec.mask.flagged is not None:
        diagonal = unused.diagonal(emitter, spec.mask.flagged, scores)
        scores = emitter.call(torch.where, diagonal, scores, -torch.inf)
    return scores


def _weights(emitter: Emitter, spec: AttentionSpec, scores: fx.Node, sinks: fx.Node | None) -> fx.Node:
    """Return the softmax over keys and sinks, without the sink's column. 0 in a row without any allowed key."""
    if sinks is None:
        softmax = aten._safe_softmax.default if _can_empty_a_row(spec) else torch.softmax
        return emitter.call(softmax, scores, -1)
    weights = emitter.call(torch.softmax, _with_sinks(emitter, scores, sinks), -1)
    return emitter.call(aten.slice.Tensor, weights, -1, 0, size_of(emitter, scores, 3))


def _with_sinks(emitter: Emitter, scores: fx.Node, sinks: fx.Node | None) -> fx.Node:
    if sinks is None:
        return scores
    batch, seqlen_q = (size_of(emitter, scores, axis) for axis in (0, 2))
    column = emitter.call(torch.Tensor.to, sinks, emitter.value(scores).dtype)
    for axis in (0, 2, 3):
        column = emitter.call(torch.unsqueeze, column, axis)
    column = emitter.call(aten.expand.default, column, [batch, -1, seqlen_q, -1])
    return emitter.call(torch.cat, [scores, column], -1)


def _logsumexp(emitter: Emitter, spec: AttentionSpec, scores: fx.Node) -> fx.Node:
    """Return the logsumexp over keys. A row of -inf has -inf: `torch.logsumexp` would give it a gradient of NaN."""
    if not _can_empty_a_row(spec):
        return emitter.call(torch.logsumexp, scores, -1)
    has_keys = emitter.call(torch.any, emitter.call(torch.ne, scores, -torch.inf), -1, True)
    lse = emitter.call(torch.logsumexp, emitter.call(torch.where, has_keys, scores, 0.0), -1)
    return emitter.call(torch.where, emitter.call(torch.squeeze, has_keys, -1), lse, -torch.inf)


def _can_empty_a_row(spec: AttentionSpec) -> bool:
    return spec.added_tensor is not None or mask_limits.bottom_right(spec)


def _share_rows(emitter: Emitter, spec: AttentionSpec, node: fx.Node) -> fx.Node:
    """(B, Hq, S, X) -> (B, Hkv, Hq // Hkv · S, X): a kv head's query heads as rows of one matrix."""
    if not spec.is_gqa:
        return node
    heads_kv = spec.num_heads_kv
    return emitter.call(torch.flatten, emitter.call(torch.unflatten, node, 1, (heads_kv, -1)), 2, 3)


def _own_rows(emitter: Emitter, spec: AttentionSpec, node: fx.Node) -> fx.Node:
    """Invert `_share_rows`."""
    if not spec.is_gqa:
        return node
    heads_q, heads_kv = spec.num_heads_q, spec.num_heads_kv
    if not isinstance(heads_q, int) or not isinstance(heads_kv, int):
        raise TypeError(f"why_not refuses unknown numbers of heads, got {heads_q!r} and {heads_kv!r}")
    return emitter.call(torch.flatten, emitter.call(torch.unflatten, node, 2, (heads_q // heads_kv, -1)), 1, 2)


def cast(emitter: Emitter, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    return node if emitter.value(node).dtype == dtype else emitter.call(torch.Tensor.to, node, dtype)
