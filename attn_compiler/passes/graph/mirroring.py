"""The mirror of a unit, and the nodes that it has to look into: those that attentions or masks may be made of."""

from __future__ import annotations

import torch
from torch import fx

from attn_compiler.passes.graph import axes, bodies, closed, mirror, relevance
from attn_compiler.passes.graph.calls import target_name
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.onward import Trial
from attn_compiler.passes.graph.unit import Unit, is_anchor_like
from attn_compiler.torch_private import tracing as torch_tracing


def trace_mirror(unit: Unit, trial: Trial | None = None) -> Mirror:
    """Trace the mirror of a unit.

    It holds every node for options that go by the rule of every op, before they rewrite the graph. Else a part suffices.
    """
    is_whole = trial is None and unit.options.follows_positions
    masks = [*_masks_passed_on(unit), *(handed_on(unit.graph) if not unit.is_body else ())]
    blocks = [one.blocks for one in unit.spelling.calls if one.blocks is not None]
    masks += [one.dense for one in blocks if one.dense is not None]
    skipped = frozenset() if is_whole else relevance.skippable(unit.graph, is_anchor_like, masks)
    with torch_tracing.tracing_in(unit.mode):
        return mirror.build(unit.graph_module, skipped)


def _masks_passed_on(unit: Unit) -> list[fx.Node]:
    found = []
    for call, body in unit.place.callees:
        wanted = relevance.mask_inputs(body.graph, is_anchor_like, _masks_passed_on(body))
        inputs = bodies.placeholders(body.graph_module)
        found += [call.node.args[call.first + i] for i, node in enumerate(inputs) if node in wanted]
    return [x for x in found if isinstance(x, fx.Node)]


def handed_on(graph: fx.Graph) -> list[fx.Node]:
    """Return the outputs of a graph that may be a mask of another graph, or input of such a mask."""
    given = graph.output_node().all_input_nodes
    found = [node for node in given if may_be_of_mask(node.meta.get("example_value"))]
    if not found:
        return found
    learned = _of_parameters(graph)
    return [node for node in found if node not in learned]


def _of_parameters(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes whose numbers depend on a parameter: tokens that a model chose, losses. No mask can be proved from such numbers.

    Sizes of such a tensor, and tensors that are only made like it, have none of its numbers.
    """
    found: set[fx.Node] = set()
    for node in graph.nodes:
        value, name = node.meta.get("example_value"), target_name(node)
        has_numbers = isinstance(value, torch.Tensor) and not name.endswith("_like") and not name.startswith("new_")
        if isinstance(value, torch.nn.Parameter) or (has_numbers and any(x in found for x in node.all_input_nodes)):
            found.add(node)
    return found


def may_be_of_mask(value: object) -> bool:
    """Return whether a value may belong to a mask: positions, truth values, or numbers for each query and key, equal for all heads.

    A value with a gradient may not.
    """
    if not isinstance(value, torch.Tensor) or value.requires_grad or closed.holds_closed(value):
        return False
    if not value.is_floating_point():
        return value.dim() > 0 and not value.is_complex()
    if value.dim() < 2:
        return False
    is_square = axes.size_expr(value.shape[-1]) == axes.size_expr(value.shape[-2])
    is_one = value.dim() > 2 and axes.size_expr(value.shape[-3]) == axes.ONE
    return is_one if value.dim() > 2 else is_square
