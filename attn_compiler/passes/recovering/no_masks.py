"""Tensors that are added and mask nothing, whatever they hold: a function's values that have bounds; products of the queries, and what is
learned, which are as large as scores are."""

from __future__ import annotations

import torch
from torch import fx

from attn_compiler.passes.graph import views
from attn_compiler.passes.graph.mirror import Mirror, opaque
from attn_compiler.passes.graph.mutation import Version
from attn_compiler.passes.graph.site import Match
from attn_compiler.passes.matching import contraction, routers
from attn_compiler.passes.matching.patterns.score_steps import MASKED_BELOW
from attn_compiler.passes.spelling.fills import PRODUCT

aten = torch.ops.aten

#: functions with no value below -1 or above 1
_BOUNDED: frozenset[object] = frozenset(
    {aten.sigmoid.default, aten.tanh.default, aten.sin.default, aten.cos.default, aten.softmax.int}
)


def is_none(mirror: Mirror, match: Match, version: Version, weight: float, *, is_learned: bool) -> bool:
    """Whether weight times the tensor is nearer to zero than numbers that mask. is_learned: it gets a gradient."""
    most = _most(match, version)
    if most is None and is_learned and _is_learned(mirror, version):
        most = PRODUCT
    return most is not None and abs(weight) * most < -MASKED_BELOW


def _most(match: Match, version: Version) -> float | None:
    """What no element is further from zero than; None where nothing is known."""
    if version.since is not None:
        return None
    if version.node.target in _BOUNDED:
        return 1.0
    return PRODUCT if _is_of_queries(match, version.node) else None


def _is_of_queries(match: Match, node: fx.Node) -> bool:
    """Whether it is a product of the site's own queries. Other tensors may be masks: nothing is known of their numbers."""
    product = contraction.parse(node)
    if product is None or product.addend is not None or product.alpha != 1.0:
        return False
    queries = {match.q.node, match.q.root}
    return any(not queries.isdisjoint(views.chain(operand)) for operand in (product.lhs, product.rhs))


def _is_learned(mirror: Mirror, version: Version) -> bool:
    """Whether a tensor that gets a gradient is a parameter, or a product with one. Another input may be a mask all the same."""
    if version.since is not None:
        return False
    node = version.node
    if routers.called(mirror, node) not in routers.PRODUCTS:
        return _is_parameter(mirror.dynamo_node(node))
    owner = mirror.owner(node) if node.target is opaque else None
    return any(
        map(_is_parameter, map(mirror.dynamo_node, node.all_input_nodes) if owner is None else owner.all_input_nodes)
    )


def _is_parameter(node: fx.Node | None) -> bool:
    """By Dynamo's own value."""
    return node is not None and isinstance(node.meta.get("example_value"), torch.nn.Parameter)
