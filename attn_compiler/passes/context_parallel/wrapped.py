"""DTensors that hold the sequence. Tensor parallelism cuts heads and features, and an op on DTensors means the op on whole tensors.

So each op is traced on plain tensors of the DTensors' global sizes, and that graph is followed like any other. Only ops between local
tensors and DTensors are known by name.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

from attn_compiler.passes.context_parallel.places import Mixes, Place, Places, has
from attn_compiler.passes.graph import axes, closed, mutation
from attn_compiler.passes.graph.calls import target_name
from attn_compiler.passes.graph.mirror import Mirror, Origins, opaque
from attn_compiler.torch_private import dtensors as torch_dtensors, tracing as torch_tracing

#: calls that give the same numbers as another kind of tensor, or in other shares; Dynamo of torch 2.11 writes "prim" before some names
DOORS = frozenset({"from_local", "of_local", "to_local", "summed_to_local", "share_of", "redistribute", "full_tensor"})

_TRACED = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)


def owner(mirror: Mirror, node: fx.Node) -> fx.Node | None:
    """Return the call of DTensors that a mirror node stands for, if it is one."""
    found = mirror.owner(node) if node.target is opaque else None
    if found is None or not closed.is_closed(found):
        return None
    values = [found.meta.get("example_value"), *(x.meta.get("example_value") for x in found.all_input_nodes)]
    tensors = [x for x in pytree.tree_leaves(values) if isinstance(x, torch.Tensor)]
    return found if all(torch_dtensors.is_dtensor(x) or not closed.holds_closed(x) for x in tensors) else None


def name(mirror: Mirror, node: fx.Node) -> str:
    """Return the name of a mirror node's function, as users write it in `allow`."""
    made_by = mirror.owner(node) if node.target in (opaque, mutation.effect) else None
    return str(node.target) if made_by is None else target_name(made_by)


def place(context: Places, node: fx.Node, call: fx.Node) -> Place | Mixes:
    """Return the place of a result of a call of DTensors. node: the result in the mirror. call: of the Dynamo graph."""
    given = [x for x in call.all_input_nodes if isinstance(x.meta.get("example_value"), torch.Tensor)]
    if len(given) != len(node.args):
        return Mixes(at=node, why="nothing is known of what it is given")
    of_given: dict[fx.Node, Place] = {}
    for x, mine in zip(given, node.all_input_nodes, strict=True):
        known = context.places[mine]
        if isinstance(known, Mixes):
            return known
        of_given[x] = known
    results = [x for x in context.mirror.owned(call) if x.target is opaque]
    values = [x for x in pytree.tree_leaves(call.meta.get("example_value")) if isinstance(x, _TRACED)]
    if len(results) != len(values):
        return Mixes(at=node, why="nothing is known of what it gives")
    value = values[results.index(node)]
    if not isinstance(value, torch.Tensor):
        return Place(dims=())
    if target_name(call).removeprefix("prim").lstrip(" _") in DOORS and given:
        found = _resized(context, node, of_given[given[0]], given[0].meta["example_value"], value)
    else:
        found = _as_whole(context, node, call, of_given, results.index(node), value)
    return found if isinstance(found, Mixes) else on_other_ranks(context, node, found, value)


def on_other_ranks(context: Places, node: fx.Node, found: Place, value: Any) -> Place | Mixes:
    """Refuse a DTensor with the sequence on a mesh whose ranks have other parts of it."""
    if not torch_dtensors.is_dtensor(value) or not any(has(context, dim) for dim in found.dims):
        return found
    if context.ranks & torch_dtensors.other_ranks(value):
        return Mixes(
            at=node,
            why="its DTensor is on a mesh with ranks that have other parts of the sequence",
            remedy="make DTensors of hidden states on the mesh of tensor parallelism alone: mesh['tp']",
        )
    return found


def groups(graph: fx.Graph, given: Collection[fx.Node]) -> list[str]:
    """Return the process groups of DTensors that are made of these inputs: their ranks compile the same parts of the sequence."""
    reached = set(given)
    found: dict[str, None] = {}
    for node in graph.nodes:
        if node in reached or not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
            for x in pytree.tree_leaves(node.meta.get("example_value")):
                if torch_dtensors.is_dtensor(x):
                    found.update(dict.fromkeys(torch_dtensors.groups(x)))
    return list(found)


def _resized(context: Places, node: fx.Node, of_given: Place, given: Any, value: Any) -> Place | Mixes:
    """Return the place of the same numbers, whole or in shares: an axis of another size is one that is cut."""
    before, after = axes.shape_exprs(given), axes.shape_exprs(value)
    if len(before) != len(after) or len(of_given.dims) != len(before):
        return Mixes(at=node, why="it gives other axes than it takes")
    dims = []
    for dim, old, new in zip(of_given.dims, before, after, strict=True):
        if not axes.same_size(old, new) and has(context, dim):
            return Mixes(
                at=node,
                why="a DTensor cuts the rank's positions once more",
                remedy="redistribute it to Replicate() where local tensors are taken, or made a DTensor of",
            )
        dims.append(dim if axes.same_size(old, new) else (axes.Atom(new),))
    return Place(dims=tuple(dims), is_uniform=of_given.is_uniform, is_share=of_given.is_share)


def _as_whole(
    context: Places, node: fx.Node, call: fx.Node, of_given: dict[fx.Node, Place], at: int, value: Any
) -> Place | Mixes:
    """Return the place of the same call's result on whole tensors."""
    traced = _traced(call, list(of_given))
    if traced is None or traced.writers:
        return Mixes(at=node, why="nothing is known of what it does with positions")
    inputs = traced.graph.find_nodes(op="placeholder")
    inside = context.inside(traced, dict(zip(inputs, of_given.values(), strict=True)))
    results: list[Any] = [x for x in pytree.tree_leaves(traced.graph.output_node().args[0]) if isinstance(x, fx.Node)]
    if at >= len(results) or not isinstance(results[at].meta.get("val"), torch.Tensor):
        return Mixes(at=node, why="nothing is known of what it gives")
    if axes.shape_exprs(results[at].meta["val"]) != axes.shape_exprs(value):
        return Mixes(at=node, why="it gives another shape than on whole tensors")
    found = inside.places[results[at]]
    if isinstance(found, Mixes):
        return Mixes(at=node, why=found.why, remedy=found.remedy, op=found.op or str(found.at.target))
    return found


def _traced(call: fx.Node, given: Sequence[fx.Node]) -> Mirror | None:
    """Trace a call of DTensors as ATen ops on plain tensors; None where that can't be done."""
    mode = torch_tracing.fake_mode_of_values([x.meta["example_value"] for x in given])
    if mode is None:
        return None
    others = [x for x in call.all_input_nodes if x not in given]
    if any(closed.holds_closed(x.meta.get("example_value")) for x in others):
        return None

    def run(*tensors: torch.Tensor) -> Any:
        known = dict(zip(given, tensors, strict=True))
        args, kwargs = fx.map_arg((call.args, call.kwargs), lambda x: known.get(x, x.meta.get("example_value")))
        if call.op == "call_method":
            return getattr(args[0], str(call.target))(*args[1:], **kwargs)
        return call.target(*args, **kwargs)  # type: ignore[operator]

    wholes = [_whole(x.meta["example_value"], mode) for x in given]
    try:
        graph = torch_tracing.trace_pre_dispatch(run, wholes, mode).graph
    except Exception:  # noqa: BLE001 (a call that plain tensors can't take is one of which nothing is known, and is refused)
        return None
    return Mirror(graph, Origins(owners={}, values={}, arguments={}, vmap_axes={}))


def _whole(value: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    with mode:
        return torch.empty(value.shape, dtype=value.dtype, device=value.device)
