"""The mirror of a unit, and which nodes it has to look into: those that attentions or masks may be made of."""

from __future__ import annotations

import torch
from torch import fx

from attn_compiler.passes.graph import axes, bodies, closed, mirror, relevance
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.unit import Unit, is_anchor_like
from attn_compiler.torch_private import tracing as torch_tracing


def of(unit: Unit, *, is_asked_for_all: bool) -> Mirror:
    """is_asked_for_all: the mirror holds every node. Packing and context parallelism ask each op what it means; else a part suffices."""
    masks = [*_masks_passed_on(unit), *(handed_on(unit.graph) if not unit.is_body else ())]
    blocks = [one.blocks for one in unit.spelling.calls if one.blocks is not None]
    masks += [one.dense for one in blocks if one.dense is not None]
    skipped = frozenset() if is_asked_for_all else relevance.skippable(unit.graph, is_anchor_like, masks)
    with torch_tracing.tracing_in(unit.mode):
        return mirror.build(unit.graph_module, skipped)


def asks_for_all(unit: Unit) -> bool:
    """Whether the user asked for what every op of a graph is asked about, before the graph is rewritten for it."""
    return unit.options.unpad or unit.options.is_context_parallel


def _masks_passed_on(unit: Unit) -> list[fx.Node]:
    """What a graph gives to bodies that may make a mask of it."""
    found = []
    for call, body in unit.place.callees:
        wanted = relevance.mask_inputs(body.graph, is_anchor_like, _masks_passed_on(body))
        inputs = bodies.placeholders(body.graph_module)
        found += [call.node.args[call.first + i] for i, node in enumerate(inputs) if node in wanted]
    return [x for x in found if isinstance(x, fx.Node)]


def handed_on(graph: fx.Graph) -> list[fx.Node]:
    """What a graph gives back that may be a mask of another one, or what such a mask is made of."""
    given = graph.output_node().all_input_nodes
    found = [node for node in given if may_be_of_mask(node.meta.get("example_value"))]
    if not found:
        return found
    learned = _of_parameters(graph)
    return [node for node in found if node not in learned]


def _of_parameters(graph: fx.Graph) -> set[fx.Node]:
    """What depends on a parameter: tokens that a model chose, losses. No mask is proved of such numbers."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if isinstance(node.meta.get("example_value"), torch.nn.Parameter) or any(
            x in found for x in node.all_input_nodes
        ):
            found.add(node)
    return found


def may_be_of_mask(value: object) -> bool:
    """Positions, truth values, or numbers for each query and key that are the same for all heads; without a gradient."""
    if not isinstance(value, torch.Tensor) or value.requires_grad or closed.holds_closed(value):
        return False
    if not value.is_floating_point():
        return value.dim() > 0 and not value.is_complex()
    if value.dim() < 2:
        return False
    is_square = axes.size_expr(value.shape[-1]) == axes.size_expr(value.shape[-2])
    is_one = value.dim() > 2 and axes.size_expr(value.shape[-3]) == axes.ONE
    return is_one if value.dim() > 2 else is_square
