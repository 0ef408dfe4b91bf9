"""An emitter that computes every node at once: what a lowering would put into a model's graph, on real tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from attn_compiler.spec.target import Target


class EagerEmitter:
    """A lowering's emitter (lowerings/base.py) without a model. `given` makes the nodes of operands, `value` says what a node holds."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.graph = fx.Graph()
        self._shared: dict[Any, fx.Node] = {}

    def given(self, name: str, tensor: Tensor) -> fx.Node:
        """A node that holds the tensor."""
        node = self.graph.placeholder(name)
        node.meta["example_value"] = tensor
        return node

    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> fx.Node:
        """The node of function(*args, **kwargs), which runs here and now."""
        node = self.graph.call_function(function, args, kwargs)
        real_args, real_kwargs = fx.map_arg((args, kwargs), self.value)
        node.meta["example_value"] = function(*real_args, **real_kwargs)
        return node

    def note(self, text: str) -> None:
        """Nobody reads it."""

    def buffer(self, name: str, shape: tuple[int, ...]) -> tuple[fx.Node, fx.Node]:
        """Raises TypeError: what lives from call to call belongs to a model."""
        raise TypeError(f"no model has the buffer {name}")

    def shared_mask(self, mask: fx.Node, dtype: torch.dtype) -> fx.Node:
        """A bool mask as what is added to the scores."""
        given = self.value(mask)
        if given.dtype != torch.bool:
            return mask if given.dtype == dtype else self.call(torch.Tensor.to, mask, dtype)
        zero = torch.zeros((), dtype=dtype, device=given.device)
        return self.once(("additive", mask, dtype), lambda: self.call(torch.where, mask, zero, -torch.inf))

    def value(self, node: fx.Node) -> Any:
        """What a node holds."""
        return node.meta["example_value"]

    def once(self, key: Any, make: Callable[[], fx.Node]) -> fx.Node:
        """make(), or the node that it gave for an equal key before."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def let_go(self) -> None:
        """Hold no tensor any more. A graph and its nodes hold each other, so what they hold would stay until Python looks for such."""
        self._shared.clear()
        for node in self.graph.nodes:
            node.meta.clear()

    def forget(self) -> None:
        """Erase all that was computed, but for operands and what sites share."""
        kept = set(self._shared.values())
        for node in reversed(self.graph.nodes):
            if node.op == "call_function" and node not in kept and not node.users:
                # An erased node lives on until Python looks for what holds itself.
                node.meta.clear()
                self.graph.erase_node(node)
