"""Zeros at padding in the padded graph, as in the packed one: which of the two runs may depend on earlier batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from attn_compiler.passes.graph.padding_outcome import Packed


def zero_padding(graph: fx.Graph, packed: Packed) -> None:
    """Set a graph's outputs to 0 where the packed graph's are. The graph has the model's inputs and outputs."""
    if not packed.places:
        return
    tokens = _tokens(graph, packed.before.graph)
    given, output = _given(packed.original.graph), graph.output_node()
    new = list(_given(graph))
    with graph.inserting_before(output):
        for place, (rows, positions) in packed.places.items():
            rank = given[place].meta["example_value"].dim()
            new[place] = _zeroed(graph, new[place], tokens, rows, positions, rank)
    whole: Any = output.args[0]
    output.args = (tuple(new) if isinstance(whole, (tuple, list)) else new[0],)


def _given(graph: fx.Graph) -> tuple[Any, ...]:
    given: Any = graph.output_node().args[0]
    return tuple(given) if isinstance(given, (tuple, list)) else (given,)


def _tokens(graph: fx.Graph, told: fx.Graph) -> fx.Node:
    """Return bool (B, S): which tokens are packed. It is computed before anything that may write to the inputs."""
    inputs = list(graph.find_nodes(op="placeholder"))
    copies: dict[fx.Node, fx.Node] = dict(zip(told.find_nodes(op="placeholder"), inputs, strict=True))
    asked: fx.Node = _given(told)[0]
    above, waiting = {asked}, [asked]
    while waiting:
        found = set(waiting.pop().all_input_nodes) - above
        above |= found
        waiting.extend(found)
    with graph.inserting_after(inputs[-1]):
        last = graph.call_function(torch.tensor, (0,))
    with graph.inserting_before(last):
        for node in told.nodes:
            if node in above and node not in copies:
                copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.erase_node(last)
    return copies[asked]


def _zeroed(graph: fx.Graph, x: fx.Node, tokens: fx.Node, rows: int, positions: int, rank: int) -> fx.Node:
    mask = tokens
    if rows == positions:
        mask = graph.call_method("reshape", (mask, -1))
    elif rows > positions:
        mask = graph.call_method("transpose", (mask, 0, 1))
    for axis in range(rank):
        if axis not in (rows, positions):
            mask = graph.call_method("unsqueeze", (mask, axis))
    return graph.call_method("masked_fill", (x, graph.call_function(torch.logical_not, (mask,)), 0))
