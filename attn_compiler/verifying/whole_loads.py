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

    def value(self, version: Version, values: Values, ranks: Ranks) -> torch.Tensor:
        """The whole tensor. Every rank has to call it. Raises NoValueError."""
        node = self._node(version)
        if not self._is_shared(node):
            return values.at(version)
        known: dict[fx.Node, Any] = {}

        def made(one: fx.Node) -> Any:
            if one not in known:
                known[one] = found(one)
            return known[one]

        def found(one: fx.Node) -> Any:
            if self._is_shared(one) and one.name not in self.axes:
                return values.call(one, made)
            x = values.read(Key(self.body.index, one.name))
            is_part = one.name in self.axes and not values.is_rehearsal
            return ranks.whole(x, self.axes[one.name]) if is_part else x

        x = made(node)
        if not isinstance(x, torch.Tensor):
            raise NoValueError(f"{node.name} is no tensor")
        return x

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
