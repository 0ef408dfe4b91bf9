"""A graph over given tensors of which some axes are symbolic: emit nodes into it, then run it on tensors of any size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from attn_compiler.torch_private import symbols as torch_symbols
from tests.lowerings.emitting import GraphEmitter


class Bench:
    """tensors: by name, each a placeholder. dynamic: their symbolic axes. SYMBOLS: DUCK, where equal sizes are one symbol, or DYNAMIC."""

    SYMBOLS = DimDynamic.DUCK

    def __init__(self, dynamic: dict[str, tuple[int, ...]] | None = None, **tensors: torch.Tensor) -> None:
        self.env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.env)
        self.graph = fx.Graph()
        self.emitter = GraphEmitter(self.graph)
        self.tensors = tensors
        self.nodes = {name: self._placeholder(name, t, (dynamic or {}).get(name, ())) for name, t in tensors.items()}

    def _placeholder(self, name: str, tensor: torch.Tensor, dynamic: tuple[int, ...]) -> fx.Node:
        sizes = [self.SYMBOLS if axis in dynamic else DimDynamic.STATIC for axis in range(tensor.dim())]
        context = StatelessSymbolicContext(dynamic_sizes=sizes)
        node = self.graph.placeholder(name)
        source = torch._dynamo.source.ConstantSource(name)
        node.meta["example_value"] = self.mode.from_tensor(tensor, source=source, symbolic_context=context)
        return node

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.mode:
            return function(self.emitter, *args, **kwargs)

    def dims(self, name: str) -> tuple[int | str, ...]:
        """A tensor's shape as a spec has it."""
        return tuple(map(torch_symbols.dim_of, self.nodes[name].meta["example_value"].shape))

    def run(self, outputs: Sequence[fx.Node], **tensors: torch.Tensor) -> list[torch.Tensor]:
        """What the nodes hold for other tensors than those that the graph was made with; they may be longer or shorter."""
        graph = fx.Graph()
        copied: dict[fx.Node, fx.Node] = {}
        graph.graph_copy(self.graph, copied)
        graph.output(tuple(copied[node] for node in outputs))
        module = fx.GraphModule(torch.nn.Module(), graph)
        found: tuple[torch.Tensor, ...] = module(*({**self.tensors, **tensors}[name] for name in self.nodes))
        return list(found)
