"""Linear layers with quantised weights, such as torchao's, spelled as the ops that they compute, in inference.

Dynamo has one call, `linear(x, weight)`, whose weight wraps int8 numbers and their scales. Which rows of x share a scale is known from the
ops alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from attn_compiler.passes.graph import calls, closed, regions
from attn_compiler.passes.graph.calls import Trying, untried
from attn_compiler.passes.spelling import expand
from attn_compiler.torch_private import compat as torch_compat, snapshots as torch_snapshots, tracing as torch_tracing


def spell_quantised(graph_module: fx.GraphModule, trying: Trying = untried) -> list[str]:
    """Spell out all such layers of one graph module in place. Return the names of their calls."""
    graph = graph_module.graph
    found = {node: weight for node in graph.nodes if (weight := _quantised_weight(node)) is not None}
    where: Mapping[fx.Node, regions.Region] = regions.by_node(graph) if found else {}
    spelled = []
    for call, weight in found.items():
        if where[call].transforms:
            continue
        with trying(call), where[call].active(), torch.no_grad():
            _spell(graph_module, call, weight)
            spelled.append(call.name)
    if spelled:
        graph_module.recompile()
    return spelled


def _quantised_weight(call: fx.Node) -> fx.Node | None:
    """Return the weight of a linear layer without gradients that alone wraps plain tensors; None for any other node."""
    result = call.meta.get("example_value")
    if calls.target_name(call) != "linear" or not calls.is_pytorchs(call) or not isinstance(result, torch.Tensor):
        return None
    wrapped = [x for x in call.all_input_nodes if closed.holds_closed(x.meta.get("example_value"))]
    if wrapped != [calls.argument(call, 1, "weight")] or result.requires_grad or closed.holds_closed(result):
        return None
    return wrapped[0] if torch_compat.wraps_plain(wrapped[0].meta["example_value"]) else None


def _spell(graph_module: fx.GraphModule, call: fx.Node, weight: fx.Node) -> None:
    graph, like = graph_module.graph, weight.meta["example_value"]
    others = [x for x in call.all_input_nodes if x is not weight]

    def linear(*values: Any) -> Any:
        given = dict(zip(others, values, strict=False))
        given[weight] = torch_compat.wrapped(like, values[len(others) :])
        return calls.run(call, given.__getitem__)

    with torch_snapshots.taken_back_on_error(graph_module):
        parts = []
        for name in torch_compat.names_inside(like):
            with graph.inserting_before(call):
                parts.append(graph.call_function(getattr, (weight, name)))
            parts[-1].meta = {**call.meta, "example_value": getattr(like, name)}
        result, _ = expand.beside(graph_module, call, torch_tracing.functional(linear), [*others, *parts])
    call.replace_all_uses_with(result)
    graph.erase_node(call)
