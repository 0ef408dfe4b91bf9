"""Nodes that clear values that take no part in an attention: keys that no query may see, and queries without keys.

Plain products multiply those by weights of 0, and 0 · NaN is NaN. So one element of padding that is not finite would reach every row, and
every gradient. Masks that always use every key and query get no nodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import fx

from attn_compiler.index_expr.on_nodes import size_of
from attn_compiler.lowerings.base import Emitter, Operands
from attn_compiler.spec import dims
from attn_compiler.spec.attention import AttentionSpec, TensorSpec
from attn_compiler.spec.masks import Alignment, Causal


def cleared(emitter: Emitter, spec: AttentionSpec, operands: Operands) -> Operands:
    """Return the operands with 0 in rows of q without keys, and at keys in k and v that no query may see.

    Values of q reach other rows' results in a backward alone. So do those of k, unless a mask is added to the scores: NaN plus -inf is NaN.
    """
    seen, has_keys = _used(emitter, spec, operands)
    adds = operands.mask is not None and emitter.value(operands.mask).dtype != torch.bool
    q, k, v = operands.q, operands.k, operands.v
    if has_keys is not None and spec.needs_grad:
        q = emitter.call(torch.where, has_keys, q, 0.0)
    if seen is not None:
        v = emitter.call(torch.where, seen, v, 0.0)
        k = emitter.call(torch.where, seen, k, 0.0) if spec.needs_grad or adds else k
    return dataclasses.replace(operands, q=q, k=k, v=v)


def with_keys_cleared(emitter: Emitter, spec: AttentionSpec, operands: Operands) -> Operands:
    """Return the operands with 0 at keys in k that no query may see, for a kernel that adds a mask where the model replaces scores by
    numbers. The model replaces scores of such keys whatever they are, NaN too."""
    if not spec.decomposed or spec.mask.dense is None or not spec.mask.dense.is_bool:
        return operands
    seen, _ = _used(emitter, dataclasses.replace(spec, needs_grad=False), operands)
    return (
        operands if seen is None else dataclasses.replace(operands, k=emitter.call(torch.where, seen, operands.k, 0.0))
    )


def without_unseen(
    emitter: Emitter, spec: AttentionSpec, operands: Operands, x: fx.Node, *, of_scores: bool = False
) -> fx.Node:
    """Return x, (B, 1, Skv, X), with 0 at keys that no query of any head may see. of_scores: it only makes scores; a bool mask hides
    them."""
    one_head = dataclasses.replace(spec, k=_of_one_head(spec.k), v=_of_one_head(spec.v))
    seen, _ = _used(emitter, one_head, operands)
    adds = operands.mask is not None and emitter.value(operands.mask).dtype != torch.bool
    return x if seen is None or (of_scores and not adds) else emitter.call(torch.where, seen, x, 0.0)


def _of_one_head(tensor: TensorSpec) -> TensorSpec:
    batch, _, *others = tensor.shape
    return dataclasses.replace(tensor, shape=(batch, 1, *others))


def diagonal(emitter: Emitter, kind: Causal, scores: fx.Node) -> fx.Node:
    """Return (Sq, Skv), True where key k is allowed for query q. It is computed where it is used, never stored."""
    return _diagonal(
        emitter, kind, size_of(emitter, scores, 2), size_of(emitter, scores, 3), emitter.value(scores).device
    )


def _diagonal(
    emitter: Emitter, kind: Causal, seqlen_q: int | fx.Node, seqlen_kv: int | fx.Node, device: torch.device
) -> fx.Node:
    rows = emitter.call(torch.arange, seqlen_q, device=device)
    if kind.alignment is Alignment.BOTTOM_RIGHT:
        rows = emitter.call(torch.add, rows, seqlen_kv)
        rows = emitter.call(torch.sub, rows, seqlen_q)
    keys = emitter.call(torch.arange, seqlen_kv, device=device)
    return emitter.call(torch.le, keys, emitter.call(torch.unsqueeze, rows, 1))


def _used(emitter: Emitter, spec: AttentionSpec, operands: Operands) -> tuple[fx.Node | None, fx.Node | None]:
    """Return which keys are seen, broadcastable to k and v, and which queries have keys, broadcastable to q. None: all."""
    sizes = (spec.seqlen_q, spec.seqlen_kv, spec.num_heads_kv)
    # Shared by all layers that have the mask.
    key = ("used", operands.mask if spec.mask.dense is not None else None, spec.mask.flagged, sizes)
    if spec.mask.dense is None and not _leaves_over(spec):
        return None, None

    def allowed() -> fx.Node:
        first, *others = _conditions(emitter, spec, operands)
        for other in others:
            first = emitter.call(torch.logical_and, first, other)
        return first

    def seen() -> fx.Node:
        found = emitter.call(torch.any, emitter.once((*key, "allowed"), allowed), -2)
        shape = emitter.value(found).shape
        if spec.is_gqa and len(shape) > 1 and not dims.same(shape[-2], 1):
            found = emitter.call(torch.any, emitter.call(torch.unflatten, found, -2, (spec.num_heads_kv, -1)), -2)
        return emitter.call(torch.unsqueeze, found, -1)

    def has_keys() -> fx.Node:
        return emitter.call(torch.any, emitter.once((*key, "allowed"), allowed), -1, True)

    return (emitter.once((*key, "seen"), seen), emitter.once((*key, "has keys"), has_keys) if spec.needs_grad else None)


def _conditions(emitter: Emitter, spec: AttentionSpec, operands: Operands) -> Iterator[fx.Node]:
    """Yield the pairs allowed by the dense mask, and by a diagonal, as bool."""
    if operands.mask is not None and spec.mask.dense is not None:
        is_bool = emitter.value(operands.mask).dtype == torch.bool
        truth = operands.mask if is_bool else emitter.call(torch.ne, operands.mask, -torch.inf)
        yield truth if emitter.value(truth).dim() > 1 else emitter.call(torch.unsqueeze, truth, 0)
    if spec.mask.flagged is not None:
        queries, keys = size_of(emitter, operands.q, 2), size_of(emitter, operands.k, 2)
        yield _diagonal(emitter, spec.mask.flagged, queries, keys, emitter.value(operands.q).device)


def _leaves_over(spec: AttentionSpec) -> bool:
    """Return whether a diagonal alone can leave a key that no query sees, or a query that sees no key."""
    queries, keys, diagonal = spec.seqlen_q, spec.seqlen_kv, spec.mask.flagged
    if dims.same(queries, keys) or diagonal is None:
        return False
    is_known = isinstance(queries, int) and isinstance(keys, int)
    few, many = (queries, keys) if diagonal.alignment is Alignment.TOP_LEFT else (keys, queries)
    return not is_known or dims.at_least(few) < dims.at_least(many)
