"""What every node of a mirror is worth on real inputs: what a reading of it is held against."""

from __future__ import annotations

from typing import Any

from torch import fx

from attn_compiler.passes.mirror import Mirror


class MirrorValues(fx.Interpreter):
    """Runs a mirror on real tensors and keeps every node's value."""

    def __init__(self, mirror: Mirror) -> None:
        constants = {str(n.target): n.meta["constant"] for n in mirror.graph.nodes if n.op == "get_attr"}
        # The module has a copy of the graph, node for node.
        super().__init__(fx.GraphModule(constants, mirror.graph), garbage_collect_values=False)
        self._originals = dict(zip(self.module.graph.nodes, mirror.graph.nodes, strict=True))
        self.of_node: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        original = self._originals[n]
        self.of_node[original] = super().run_node(n)
        return self.of_node[original]
