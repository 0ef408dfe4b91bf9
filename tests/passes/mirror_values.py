"""What every node of a mirror is worth on real inputs: what a reading of it is held against."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from attn_compiler.passes.graph import mutation
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.mutation import Version


class MirrorValues(fx.Interpreter):
    """Runs a mirror on real tensors and keeps every node's value, and what each tensor held between two writes."""

    def __init__(self, mirror: Mirror) -> None:
        constants = {str(n.target): n.meta["constant"] for n in mirror.graph.nodes if n.op == "get_attr"}
        # The module has a copy of the graph, node for node.
        super().__init__(fx.GraphModule(constants, mirror.graph), garbage_collect_values=False)
        self._originals = dict(zip(self.module.graph.nodes, mirror.graph.nodes, strict=True))
        self._mirror = mirror
        self.of_node: dict[fx.Node, Any] = {}
        self._held: dict[tuple[fx.Node, fx.Node | None], torch.Tensor] = {}

    def held(self, version: Version) -> torch.Tensor:
        return self._held[version.node, version.since]

    def run_node(self, n: fx.Node) -> Any:
        original = self._originals[n]
        self.of_node[original] = super().run_node(n)
        self.keep(original)
        return self.of_node[original]

    def keep(self, ran: fx.Node) -> None:
        """Copies of the new tensor, and of those that were written to."""
        written = next((memory for writer, memory in self._mirror.writers if writer is ran), set())
        when = self._mirror.order(ran) + 1
        for node, value in self.of_node.items():
            if isinstance(value, torch.Tensor) and (node is ran or mutation.storages(node) & written):
                self._held[node, mutation.version(self._mirror, node, when).since] = value.clone()
