"""An emitter that computes every node at once on real tensors: the nodes that a lowering would insert into a model's graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from attn_compiler.spec.target import Target


class EagerEmitter:
    """A lowering's emitter (lowerings/base.py) without a model. `given` makes the nodes of operands, `value` returns a node's result."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.graph = fx.Graph()
        self._shared: dict[Any, fx.Node] = {}

    def given(self, name: str, tensor: Tensor) -> fx.Node:
        """Make a node that holds the tensor."""
        node = self.graph.placeholder(name)
        node.meta["example_value"] = tensor
        return node

    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> fx.Node:
        """Run function(*args, **kwargs) now, and return its node."""
        node = self.graph.call_function(function, args, kwargs)
        real_args, real_kwargs = fx.map_arg((args, kwargs), self.value)
        node.meta["example_value"] = function(*real_args, **real_kwargs)
        return node

    def note(self, text: str) -> None:
        """Ignore the remark: there is no report."""

    def buffer(self, name: str, shape: tuple[int, ...]) -> tuple[fx.Node, fx.Node]:
        """Raise TypeError: only a model has buffers that live from call to call."""
        raise TypeError(f"no model has the buffer {name}")

    def shared_mask(self, mask: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Convert a bool mask to an additive one."""
        given = self.value(mask)
        if given.dtype != torch.bool:
            return mask if given.dtype == dtype else self.call(torch.Tensor.to, mask, dtype)
        zero = torch.zeros((), dtype=dtype, device=given.device)
        return self.once(("additive", mask, dtype), lambda: self.call(torch.where, mask, zero, -torch.inf))

    def value(self, node: fx.Node) -> Any:
        """Return the result that a node holds."""
        return node.meta["example_value"]

    def once(self, key: Any, make: Callable[[], fx.Node]) -> fx.Node:
        """Return make(), or the node that make() gave for an equal key before."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def let_go(self) -> None:
        """Release all tensors. Graph and nodes refer to each other, so tensors would otherwise stay until Python's garbage collection."""
        self._shared.clear()
        for node in self.graph.nodes:
            node.meta.clear()

    def forget(self) -> None:
        """Erase all computed nodes but operands and nodes that sites share."""
        kept = set(self._shared.values())
        for node in reversed(self.graph.nodes):
            if node.op == "call_function" and node not in kept and not node.users:
                # Without this, the erased node would hold its tensor until Python's next garbage collection.
                node.meta.clear()
                self.graph.erase_node(node)
