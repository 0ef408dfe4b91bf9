"""What masks and biases load, for the whole sequence: inputs of all ranks, and what the model's own nodes make of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from attn_compiler.passes.graph.mutation import Version
from attn_compiler.verifying.ranks import Ranks
from attn_compiler.verifying.values import Body, Key, NoValueError, Values


@dataclass(kw_only=True, eq=False)
class WholeLoads:
    """nodes: of the model's own graph, by name. axes: of each input with a part of the sequence, that of positions."""

    body: Body
    nodes: Mapping[str, fx.Node]
    axes: Mapping[str, int]
    _shared: dict[fx.Node, bool] = field(default_factory=dict)

    def needs(self, version: Version, values: Values) -> set[Key]:
        """What has to be recorded for `value`. Raises NoValueError."""
        node = self._node(version)
        if not self._is_shared(node):
            return values.needs(version.node, values.when(version))
        found: set[Key] = set()
        left = [node]
        while left:
            one = left.pop()
            if one.name in self.axes or not self._is_shared(one):
                found.add(Key(self.body.index, one.name))
            else:
                left += one.all_input_nodes
        return found

    def value(self, version: Version, values: Values, ranks: Ranks) -> torch.Tensor:
        """The whole tensor. Every rank has to call it."""
        node = self._node(version)
        found = (
            self._made(node, values, ranks, {})
            if self._is_shared(node)
            else values.mirror(version.node, values.when(version))
        )
        if not isinstance(found, torch.Tensor):
            raise NoValueError(f"{node.name} is no tensor")
        return found

    def _node(self, version: Version) -> fx.Node:
        dynamo = self.body.mirror.dynamo_node(version.node) if version.node.graph is self.body.mirror.graph else None
        if dynamo is None or dynamo.name not in self.nodes:
            raise NoValueError(f"{version.node.name} is not in the model's own graph")
        return self.nodes[dynamo.name]

    def _is_shared(self, node: fx.Node) -> bool:
        """Whether a node is made of what ranks have parts of."""
        if node not in self._shared:
            self._shared[node] = node.name in self.axes or any(map(self._is_shared, node.all_input_nodes))
        return self._shared[node]

    def _made(self, node: fx.Node, values: Values, ranks: Ranks, known: dict[fx.Node, Any]) -> Any:
        if node in known:
            return known[node]
        if node.name in self.axes:
            known[node] = ranks.whole(values.recorded[Key(self.body.index, node.name)], self.axes[node.name])
        elif not self._is_shared(node):
            known[node] = values.recorded[Key(self.body.index, node.name)]
        else:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda one: self._made(one, values, ranks, known))
            if node.op == "call_method":
                known[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return known[node]
