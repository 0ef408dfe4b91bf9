"""The tensors that autograd saves for nodes of a graph, found by running the nodes on fake values."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from attn_compiler.lowerings.base import GIVEN
from attn_compiler.passes.graph import bodies, closed, mutation
from attn_compiler.passes.graph.aliasing import Storages, memory_of
from attn_compiler.passes.graph.calls import run, target_name
from attn_compiler.passes.graph.fragment_keys import NodeInputs, Unknown, key_of_all
from attn_compiler.passes.graph.mirror import is_opaque
from attn_compiler.torch_private import tracing as torch_tracing
from attn_compiler.torch_private.op_library import NAMESPACE


@dataclass(frozen=True, kw_only=True, eq=False)
class GradientRun:
    """The outcome of running some Dynamo nodes with gradients.

    own: whether autograd saved the memory of each. saved: other memory that it saved.
    """

    own: dict[fx.Node, bool]
    saved: Storages

    def saves(self, node: fx.Node) -> bool:
        """Return whether the memory of a node is saved: of its value in the run, or of its own value if it was not run."""
        return self.own[node] if node in self.own else bool(memory_of(node) & self.saved)


@dataclass(frozen=True, kw_only=True, slots=True)
class AlikeRun:
    """A run for all nodes that are alike. own: whether each is saved, in order. inputs: the indices of inputs whose memory is saved."""

    own: tuple[bool, ...]
    inputs: tuple[int, ...]


def run_on_fakes(
    nodes: Sequence[fx.Node], mode: FakeTensorMode, known: dict[Hashable, AlikeRun] | None = None
) -> GradientRun | None:
    """Run Dynamo nodes, in the order of their graph, on fake values; None if that can't be done.

    known: earlier runs, reused for nodes that are alike; filled in.
    """
    inputs = NodeInputs()
    try:
        key = None if known is None or any(map(bodies.writes, nodes)) else key_of_all(nodes, inputs)
    except Unknown:
        key = None
    if known is None or key is None:
        return _run(nodes, mode)
    if key in known:
        alike = known[key]
        saved = mutation.storages_of([inputs.holders[i] for i in alike.inputs])
        return GradientRun(own=dict(zip(nodes, alike.own, strict=True)), saved=saved)
    found = _run(nodes, mode)
    if found is not None:
        is_saved = (bool(mutation.storages_of(holder) & found.saved) for holder in inputs.holders)
        places = tuple(i for i, saves in enumerate(is_saved) if saves)
        known[key] = AlikeRun(own=tuple(found.own[node] for node in nodes), inputs=places)
    return found


def _run(nodes: Sequence[fx.Node], mode: FakeTensorMode) -> GradientRun | None:
    values: dict[fx.Node, Any] = {}

    def run_all() -> None:
        for node in nodes:
            values[node] = run(node, lambda n: values[n] if n in values else n.meta.get("example_value"))

    if any(n.op not in ("call_function", "call_method") or is_opaque(n) or closed.is_closed(n) for n in nodes):
        return None
    try:
        with torch_tracing.running_in(mode), torch.enable_grad():
            by_name = torch_tracing.saved_for_backward(run_all)
    except (RuntimeError, ValueError, TypeError, NotImplementedError):
        return None
    saved = mutation.storages_of(by_name)
    saved |= _handed_on(values, saved)
    return GradientRun(own={n: bool(mutation.storages_of(x) & saved) for n, x in values.items()}, saved=saved)


def _handed_on(values: dict[fx.Node, Any], saved: Storages) -> Storages:
    """Return the memory of outputs that are saved as inputs of an op that returns its inputs: compiled code has no such op
    (ops.without_autograd).
    """
    found: Storages = set()
    for node, results in values.items():
        given = _handed(node)
        for result, operand in zip(results if given else (), given, strict=False):
            if mutation.storages_of(values.get(operand, operand.meta.get("example_value"))) & saved:
                found |= mutation.storages_of(result)
    return found


def _handed(node: fx.Node) -> list[fx.Node]:
    """Return the inputs that an op returns as its outputs, in their order; none for other nodes."""
    if getattr(node.target, "namespace", None) != NAMESPACE or not target_name(node).endswith(GIVEN):
        return []
    handed: Any = node.args[3]
    return list(handed)
