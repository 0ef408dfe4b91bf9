"""Fake values of calls that are written into a graph, or only tried: computed once for calls that are alike.

A site emits the same calls for each layer, on tensors that agree in all that a call can see (fragment_keys.py). PyTorch computes a call's
value in tenths of a millisecond, with symbolic sizes in milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from attn_compiler.passes.graph import bodies
from attn_compiler.passes.graph.fake_records import FakeLike, FakeRecorder, Remaker
from attn_compiler.passes.graph.fragment_keys import NodeInputs, Unknown, key_of
from attn_compiler.torch_private import tracing as torch_tracing


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """The tensors that a call gave, each with whether it wants a gradient."""

    tensors: tuple[tuple[FakeLike, bool], ...]
    spec: pytree.TreeSpec


class EmittedValues:
    """The values of the calls of one graph."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known: dict[Hashable, _Found | None] = {}

    def value_of(self, call: fx.Node, env: Mapping[fx.Node, Any], run: Callable[[], Any], *, with_grad: bool) -> Any:
        """Return the value of a call, from an equal call or by run(), with or without gradients. env: the values of its arguments."""
        if bodies.writes(call):
            return run()
        inputs = NodeInputs()
        try:
            key = key_of(call, env, inputs, lambda node, value: node), with_grad
        except Unknown:
            return run()
        if key not in self._known:
            value = run()
            self._known[key] = self._recorded(inputs, value)
            return value
        found = self._known[key]
        return run() if found is None else self._again(inputs, found)

    def of_values(self, function: Callable[..., Any], args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """Return the value of a call, without gradients, on values that are in no graph."""
        graph, env = fx.Graph(), dict[fx.Node, Any]()

        def node(x: Any) -> Any:
            if not isinstance(x, (torch.Tensor, torch.SymInt, torch.SymFloat)):
                return x
            made = next((known for known, value in env.items() if value is x), None) or graph.placeholder("given")
            env[made] = x
            return made

        given = pytree.tree_map(node, (args, kwargs))
        return self.value_of(graph.call_function(function, *given), env, run, with_grad=False)

    def _recorded(self, inputs: NodeInputs, value: Any) -> _Found | None:
        leaves, spec = pytree.tree_flatten(value)
        given = {id(x) for x in inputs.values}
        if any(not isinstance(leaf, FakeTensor) or leaf.constant is not None or id(leaf) in given for leaf in leaves):
            return None
        recorder = FakeRecorder(inputs.holders)
        try:
            with torch_tracing.beside_modes(self._mode), torch.no_grad():
                return _Found(tensors=tuple((recorder.made(x), x.requires_grad) for x in leaves), spec=spec)
        except Unknown:
            return None

    def _again(self, inputs: NodeInputs, found: _Found) -> Any:
        with torch_tracing.beside_modes(self._mode), torch.no_grad():
            maker = Remaker(self._mode, inputs.holders)
            leaves = [maker.fake(made).requires_grad_(wants) for made, wants in found.tensors]
        return pytree.tree_unflatten(leaves, found.spec)
