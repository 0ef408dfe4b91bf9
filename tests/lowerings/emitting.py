"""A stand-in for the compiler's emitter, over a graph of its own: a lowering's nodes, run on real or on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from attn_compiler.lowerings.base import Lowering, Operands
from attn_compiler.spec.target import Target
from tests.cases import Inputs

SLOTS = ("q", "k", "v", "mask", "sinks")


class GraphEmitter:
    """`Emitter` over an fx.Graph whose placeholders hold fake values; a site on an H200 unless told otherwise."""

    def __init__(self, graph: fx.Graph, target: Target | None = None) -> None:
        self.graph = graph
        self.target = target or Target.fake()
        self.notes: list[str] = []
        self._shared: dict[Any, fx.Node] = {}

    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(function, args, kwargs)
        node.meta["example_value"] = function(*_values(args), **_values(kwargs))
        return node

    def note(self, text: str) -> None:
        self.notes.append(text)

    def value(self, node: fx.Node) -> torch.Tensor:
        return node.meta["example_value"]

    def buffer(self, name: str, shape: tuple[int, ...]) -> tuple[fx.Node, fx.Node]:
        raise AssertionError(f"no lowering under test keeps anything; asked for {name}")

    def once(self, key: Any, make: Callable[[], fx.Node]) -> fx.Node:
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def shared_mask(self, mask: fx.Node, dtype: torch.dtype) -> fx.Node:
        return self.once(("additive", mask, dtype), lambda: self._additive(mask, dtype))

    def _additive(self, mask: fx.Node, dtype: torch.dtype) -> fx.Node:
        if self.value(mask).dtype != torch.bool:
            return self.call(torch.Tensor.to, mask, dtype)
        zero = self.call(torch.zeros, (), dtype=dtype, device=self.value(mask).device)
        return self.call(torch.where, mask, zero, -torch.inf)


def _values(arguments: Any) -> Any:
    return fx.map_arg(arguments, lambda node: node.meta["example_value"])


def emit(lowering: Lowering, inputs: Inputs, *, mode: FakeTensorMode | None = None) -> fx.GraphModule:
    """A module of `arguments(inputs)` that returns what the lowering emitted for them."""
    values = {name: value for name, value in operands_of(inputs).items() if value is not None}
    graph = fx.Graph()
    mode = mode or _mode_of(values) or FakeTensorMode()
    nodes = {name: _placeholder(graph, name, value, mode) for name, value in values.items()}
    with mode:
        emitter = GraphEmitter(graph)
        out = lowering.emit(emitter, lowering.plan(inputs.spec, emitter.target), Operands(**nodes))
    graph.output(out)
    graph.lint()
    return fx.GraphModule(torch.nn.Module(), graph)


def arguments(inputs: Inputs) -> list[torch.Tensor]:
    return [value for value in operands_of(inputs).values() if value is not None]


def operands_of(inputs: Inputs) -> Mapping[str, torch.Tensor | None]:
    """By field of `Operands`; the bias takes the mask's place."""
    tensor = inputs.mask if inputs.mask is not None else inputs.bias
    return dict(zip(SLOTS, (inputs.q, inputs.k, inputs.v, tensor, inputs.sinks), strict=True))


def calls(gm: fx.GraphModule) -> list[Any]:
    """Targets of the calls, in order."""
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def output_value(gm: fx.GraphModule) -> torch.Tensor:
    """The fake value of what the module returns."""
    (output,) = gm.graph.find_nodes(op="output")
    return output.args[0].meta["example_value"]


def _mode_of(values: Mapping[str, torch.Tensor]) -> FakeTensorMode | None:
    return next((value.fake_mode for value in values.values() if isinstance(value, FakeTensor)), None)


def _placeholder(graph: fx.Graph, name: str, value: torch.Tensor, mode: FakeTensorMode) -> fx.Node:
    node = graph.placeholder(name)
    node.meta["example_value"] = value if isinstance(value, FakeTensor) else mode.from_tensor(value, static_shapes=True)
    return node
