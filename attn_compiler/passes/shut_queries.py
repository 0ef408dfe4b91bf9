"""Queries that a mask shuts out as a whole, with a finite number: what the model gives them, and nodes that give the same.

A softmax over scores that are all one number, however low, weighs all keys alike: the row is the mean of v. Kernels skip such a row
and give 0, which is as good where nobody reads it. But a model that masks padding along the queries, too, may have nothing else in
these rows: DeBERTa's embeddings are exact zeros there. A norm then divides 0 by the root of its epsilon, and the gradient grows by
1 / sqrt(eps) with every layer, until it is infinite. So these rows get the model's own value.

Rows that are left without keys by several masks together, such as padding on the left under a causal mask, are not looked for: they
give 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Expr, Index, on_nodes
from attn_compiler.index_expr.on_nodes import Names, size_of
from attn_compiler.lowerings.base import Emitter, Operands, SizeOf
from attn_compiler.passes import kinds

aten = torch.ops.aten

NOTE = "queries that the mask shuts out as a whole get the mean of v, as the model's softmax over one finite number gives it"

#: Whatever is added to a number at or below this leaves it as it is, in every dtype that holds it
_DROWNS_WHAT_IS_ADDED = -1e30


@dataclass(frozen=True, kw_only=True)
class MaskingCondition:
    """One condition that masks. fill: what a masked score becomes. keeps_fill: nothing changes that number afterwards."""

    allowed: Expr
    fill: float
    keeps_fill: bool


def condition(masks: Sequence[MaskingCondition]) -> Expr | None:
    """When a query has scores of its own, over (b, q). Where that is false, all of its scores are the same finite number.

    None: no query is shut out as a whole by one of the masks, or not with one finite number.
    """
    fills = {mask.fill for mask in masks}
    if len(fills) != 1 or not all(_stays(mask) for mask in masks):
        return None
    whole = [part for mask in masks for part in kinds.conjuncts(mask.allowed) if _is_of_a_query(part)]
    return ix.apply("and", *whole) if whole else None


def _stays(mask: MaskingCondition) -> bool:
    return math.isfinite(mask.fill) and (mask.keeps_fill or mask.fill <= _DROWNS_WHAT_IS_ADDED)


def _is_of_a_query(part: Expr) -> bool:
    """Whether a part of the condition says the same of all keys and heads, and asks a tensor about the query."""
    others = (Index("k"), Index("h"))
    return ix.mentions(part, Index("q")) and not any(ix.mentions(part, i) for i in others) and any(ix.loads(part))


def at_hand(has_scores: Expr, operands: Operands) -> bool:
    """Whether the site has all tensors and sizes that the condition reads."""
    tensors = {load.tensor for load in ix.loads(has_scores)}
    return tensors <= operands.loads.keys() and ix.sizes(has_scores) <= operands.sizes.keys()


def filled(emitter: Emitter, has_scores: Expr, operands: Operands, out: fx.Node) -> fx.Node:
    """The kernel's output (B, Hq, Sq, Dv), with the mean of v over all keys in the rows of queries without scores of their own."""
    key = ("queries with scores", has_scores, tuple(sorted((name, n.name) for name, n in operands.loads.items())))
    kept = emitter.once(key, lambda: _condition(emitter, has_scores, operands))
    dtype = emitter.value(out).dtype
    wide = dtype if dtype == torch.float64 else torch.float32
    mean = emitter.call(torch.mean, operands.v, 2, keepdim=True, dtype=wide)
    mean = emitter.call(torch.Tensor.to, mean, dtype)
    return emitter.call(torch.where, kept, out, _for_each_head(emitter, mean, out))


def _condition(emitter: Emitter, has_scores: Expr, operands: Operands) -> fx.Node:
    """(B or 1, 1, Sq, 1) truth values."""
    device = emitter.value(operands.q).device
    indices = {"q": _counted(emitter, operands.q, 2, (1, 1, -1, 1))}
    if ix.mentions(has_scores, Index("b")):
        indices["b"] = _counted(emitter, operands.q, 0, (-1, 1, 1, 1))
    sizes = {name: _size(emitter, operands.sizes[name]) for name in ix.sizes(has_scores)}
    names = Names(device=device, indices=indices, sizes=sizes, tensors=operands.loads)
    return on_nodes.emit(emitter, has_scores, names)


def _counted(emitter: Emitter, q: fx.Node, axis: int, shape: tuple[int, ...]) -> fx.Node:
    count = emitter.call(torch.arange, size_of(emitter, q, axis), device=emitter.value(q).device)
    return emitter.call(torch.Tensor.view, count, shape)


def _size(emitter: Emitter, size: SizeOf) -> fx.Node:
    return size.node if size.axis is None else emitter.call(aten.sym_size.int, size.node, size.axis)


def _for_each_head(emitter: Emitter, mean: fx.Node, out: fx.Node) -> fx.Node:
    """(B, Hkv, 1, Dv) -> (B, Hq, 1, Dv) where query heads share one of v's."""
    heads_kv, heads_q = emitter.value(mean).shape[1], emitter.value(out).shape[1]
    if heads_kv in (1, heads_q):
        return mean
    return emitter.call(torch.repeat_interleave, mean, heads_q // heads_kv, 1)
