"""Added tensors that never mask, whatever they hold: results of bounded functions; products of the queries and learned biases, which are
only as large as scores."""

from __future__ import annotations

import torch
from torch import fx

from attn_compiler.passes.graph import constants, views
from attn_compiler.passes.graph.calls import target_name
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
#: ops that leave elements out, or add zeros around a tensor
_MOVES: frozenset[object] = frozenset(
    {aten.slice.Tensor, aten.narrow.default, aten.select.int, aten.constant_pad_nd.default, aten.pad.default}
)
#: what a model calls to see elements in another shape: of symbolic sizes it may be no view in the mirror
_RESHAPES = frozenset("view view_as reshape reshape_as".split())
#: calls that give the elements of their first input at other places
_ONE_INPUT = frozenset("view reshape unsqueeze to transpose permute getitem".split())


def is_none(mirror: Mirror, match: Match, version: Version, weight: float, *, is_learned: bool) -> bool:
    """True if weight times the tensor is closer to zero than numbers that mask. is_learned: it gets a gradient."""
    most = _most(mirror, match, version)
    if most is None and is_learned and _is_learned(mirror, version):
        most = PRODUCT
    return most is not None and abs(weight) * most < -MASKED_BELOW


def _most(mirror: Mirror, match: Match, version: Version) -> float | None:
    """Return a bound on the absolute values of the elements; None if unknown."""
    node = None if version.since is not None else _unmoved(mirror, version.node)
    if node is not None and node.target in _BOUNDED:
        return 1.0
    return PRODUCT if node is not None and _is_of_queries(mirror, match, node) else None


def _unmoved(mirror: Mirror, node: fx.Node) -> fx.Node | None:
    """Return the tensor whose elements, and perhaps zeros, a node holds at other places (Transformer-XL's shift); None after a write."""
    while (source := _moved(mirror, node)) is not None:
        node = source
        if mirror.writers_into(node).nodes:
            return None
    return node


def _moved(mirror: Mirror, node: fx.Node) -> fx.Node | None:
    """Return what an op moves; None for an op that computes."""
    if views.is_view(node) or (node.target in _MOVES and views.argument(node, "value", 0) in (0, None)):
        return views.source(node)
    if node.target is opaque and routers.called(mirror, node) in _RESHAPES:
        return node.all_input_nodes[0]
    joined = node.args[0] if node.target is aten.cat.default else ()
    others = [x for x in joined if constants.everywhere(mirror, x) != 0.0]  # type: ignore[union-attr]
    return others[0] if len(others) == 1 else None  # type: ignore[return-value]


def _is_of_queries(mirror: Mirror, match: Match, node: fx.Node) -> bool:
    """True if a node is a product of the site's own queries. Other products may be masks: their numbers are unknown."""
    product = contraction.parse(node)
    if product is None or product.addend is not None or product.alpha != 1.0:
        return False
    queries = {match.q.node, *_sources(mirror, match.q.root)}
    return any(not queries.isdisjoint(_sources(mirror, operand)) for operand in (product.lhs, product.rhs))


def _sources(mirror: Mirror, node: fx.Node) -> tuple[fx.Node, ...]:
    """Return a node with those of the same elements above it, and what a parameter was added to."""
    chain = views.chain(node)
    return (*chain, *_without_parameter(mirror, chain[-1]))


def _without_parameter(mirror: Mirror, node: fx.Node) -> tuple[fx.Node, ...]:
    """Return what a parameter was added to: Transformer-XL adds one to the queries of keys, and another to those of positions."""
    owner = mirror.owner(node)
    if owner is None or target_name(owner) not in ("add", "iadd") or len(owner.all_input_nodes) != 2:
        return ()
    others = [x for x in owner.all_input_nodes if not _is_view_of_parameter(x)]
    return tuple(x for x in node.all_input_nodes if mirror.dynamo_node(x) in others) if len(others) == 1 else ()


def _is_view_of_parameter(node: fx.Node) -> bool:
    """True for one of Dynamo's nodes that only moves the elements of a parameter."""
    while node.op.startswith("call") and target_name(node) in _ONE_INPUT:
        node = node.all_input_nodes[0]
    return _is_parameter(node)


def _is_learned(mirror: Mirror, version: Version) -> bool:
    """True if a tensor that gets a gradient is a parameter, or a product with one. Any other input may still be a mask."""
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
    """True if Dynamo's own value is a parameter."""
    return node is not None and isinstance(node.meta.get("example_value"), torch.nn.Parameter)
