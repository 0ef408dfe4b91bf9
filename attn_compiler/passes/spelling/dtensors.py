"""Attention of DTensors as attention of their local tensors, so it is found, proved and lowered like any other.

Tensor parallelism shards heads, data parallelism the batch. No attention looks across either, so each process's share is an attention of
its own: `to_local`, the same calls, `from_local`. Only the smallest part of the graph with the attention is rewritten: one call of SDPA, or
the nodes from the product with k to the product with v. If an op on DTensors differs from the op on local tensors (dtensor_rules.py), the
graph stays as it is, and the reason is reported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from attn_compiler.passes.graph import closed, regions, strides
from attn_compiler.passes.graph.calls import Trying, target_name, untried
from attn_compiler.passes.spelling import dtensor_rules
from attn_compiler.reasons.decisions import Reason
from attn_compiler.torch_private import (
    dtensors as torch_dtensors,
    snapshots as torch_snapshots,
    tracing as torch_tracing,
)
from attn_compiler.torch_private.dtensors import Shards


@dataclass(frozen=True, kw_only=True, eq=False)
class FoundLocal:
    """local: each call of SDPA or softmax on local tensors that replaced an anchor, with a note about it.
    left: the anchors that stay calls on DTensors, each with the reason."""

    local: dict[fx.Node, str] = field(default_factory=dict)
    left: dict[fx.Node, Reason] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Part:
    """A part to compute on local tensors. nodes: in graph order. out: placement of the anchor's result. rank: its number of axes."""

    anchor: fx.Node
    nodes: tuple[fx.Node, ...]
    out: Shards

    @property
    def rank(self) -> int:
        return int(self.anchor.meta["example_value"].dim())


def spell_dtensors(graph_module: fx.GraphModule, mode: FakeTensorMode, trying: Trying = untried) -> FoundLocal:
    """Rewrite in place every attention of DTensors of one graph module that can be rewritten."""
    graph, found = graph_module.graph, FoundLocal()
    anchors = [node for node in graph.nodes if _is_anchor(node)]
    if not anchors:
        return found
    where = regions.by_node(graph)
    for anchor in anchors:
        # Inside vmap a value has fewer axes than its tensor. No attention is rewritten there.
        if where[anchor].transforms or torch_snapshots.is_erased(anchor):
            continue
        part = _part(anchor)
        if isinstance(part, Reason):
            found.left[anchor] = part
            continue
        with trying(anchor), where[anchor].active(), _refusing(found, anchor):
            found.local[_rewrite(graph_module, part, mode)] = (
                f"computed on this process's share of DTensors, {part.out.words}"
            )
    graph_module.recompile()
    return found


class _Refused(Exception):
    """A reason found only when a part is computed on local tensors."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


@contextlib.contextmanager
def _refusing(found: FoundLocal, anchor: fx.Node) -> Iterator[None]:
    try:
        yield
    except _Refused as refused:
        found.left[anchor] = refused.reason


def _is_anchor(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    return target_name(node) in (dtensor_rules.SDPA, *dtensor_rules.SOFTMAXES) and _is_dtensor(node)


def _is_dtensor(node: fx.Node) -> bool:
    return torch_dtensors.is_dtensor(node.meta.get("example_value"))


# ---- which nodes --------------------------------------------------------------------------------------------------


def _part(anchor: fx.Node) -> _Part | Reason:
    out = dtensor_rules.read(anchor, "the attention")
    if isinstance(out, Reason):
        # The reasons of the inputs say more.
        return next(_unknown(anchor), out)
    refused = dtensor_rules.refused(anchor, out)
    if refused is not None:
        return refused
    if target_name(anchor) == dtensor_rules.SDPA:
        return _Part(anchor=anchor, nodes=(anchor,), out=out)
    return _written_out(anchor, out)


def _unknown(anchor: fx.Node) -> Iterator[Reason]:
    for x in anchor.all_input_nodes:
        found = dtensor_rules.read(x, closed.parameter(anchor, x)) if _is_dtensor(x) else None
        if isinstance(found, Reason):
            yield found


def _written_out(softmax: fx.Node, out: Shards) -> _Part | Reason:
    """Return the nodes from the product with k to the product with v, and no others."""
    rank = int(softmax.meta["example_value"].dim())
    above = _reached(softmax, out, rank, is_above=True)
    below = _reached(softmax, out, rank, is_above=False)
    for reached in (above, below):
        if not any(target_name(node) in dtensor_rules.PRODUCTS for node in reached.nodes):
            return reached.refusals[0] if reached.refusals else dtensor_rules.no_product(softmax)
    members = {softmax, *above.nodes, *below.nodes}
    return _Part(anchor=softmax, nodes=tuple(node for node in softmax.graph.nodes if node in members), out=out)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Reached:
    nodes: list[fx.Node] = field(default_factory=list)
    refusals: list[Reason] = field(default_factory=list)


def _reached(softmax: fx.Node, out: Shards, rank: int, *, is_above: bool) -> _Reached:
    """Return the pointwise ops next to a softmax with its placement, and the products beyond them."""
    found, queue, seen = _Reached(), [softmax], {softmax}
    while queue:
        node = queue.pop()
        for x in node.all_input_nodes if is_above else node.users:
            name = target_name(x)
            if x in seen or not _is_dtensor(x) or name not in dtensor_rules.POINTWISE | dtensor_rules.PRODUCTS:
                continue
            seen.add(x)
            refused = _refused_inside(x, out, rank)
            if refused is not None:
                found.refusals.append(refused)
                continue
            found.nodes.append(x)
            if name in dtensor_rules.POINTWISE:
                queue.append(x)
    return found


def _refused_inside(node: fx.Node, out: Shards, rank: int) -> Reason | None:
    own = dtensor_rules.read(node, node.name)
    if isinstance(own, Reason):
        return own
    missing = rank - node.meta["example_value"].dim()
    if own.dims != tuple(None if dim is None else dim - missing for dim in out.dims) or own.mesh != out.mesh:
        return dtensor_rules.moved(node, own, out)
    return dtensor_rules.refused(node, own)


# ---- rewriting ----------------------------------------------------------------------------------------------------


def _rewrite(graph_module: fx.GraphModule, part: _Part, mode: FakeTensorMode) -> fx.Node:
    """Rewrite a part, and return the anchor on local tensors."""
    graph = graph_module.graph
    local: dict[fx.Node, fx.Node] = {}
    whole: dict[fx.Node, fx.Node] = {}
    # Everything that may fail only makes new nodes.
    with torch_snapshots.taken_back_on_error(graph_module):
        for node in part.nodes:
            maker = _Maker(graph=graph, before=node, mode=mode)
            for x in node.all_input_nodes:
                if _is_dtensor(x) and (x not in local or _is_copied(x, part)):
                    local[x] = maker.to_local(x, part)
            local[node] = maker.on_local(node, local)
            if _outside(node, part):
                whole[node] = maker.from_local(node, local[node], _placed_alike(node, part))
    for node, made in whole.items():
        for user in _outside(node, part):
            user.replace_input_with(node, made)
    for node in reversed(part.nodes):
        graph.erase_node(node)
    return local[part.anchor]


def _is_copied(x: fx.Node, part: _Part) -> bool:
    """Return whether the local tensor is a copy, cut out of a whole one. A copy does not see later writes to the whole."""
    given = x.meta["example_value"]
    return x not in part.nodes and dtensor_rules.taken(given, part.out, part.rank).dims is not None


def _outside(node: fx.Node, part: _Part) -> list[fx.Node]:
    return [user for user in node.users if user not in part.nodes]


def _placed_alike(node: fx.Node, part: _Part) -> fx.Node:
    """Return a DTensor among the part's inputs with the mesh and the placements of the given result."""
    wanted = node.meta["example_value"]
    for x in (x for of_part in part.nodes for x in of_part.all_input_nodes if x not in part.nodes and _is_dtensor(x)):
        value = x.meta["example_value"]
        if value.placements == wanted.placements and value.device_mesh == wanted.device_mesh:
            return x
    raise _Refused(dtensor_rules.no_match(node))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Maker:
    """Maker of nodes with their values before one node of the graph, with that node's meta."""

    graph: fx.Graph
    before: fx.Node
    mode: FakeTensorMode

    def to_local(self, x: fx.Node, part: _Part) -> fx.Node:
        value = x.meta["example_value"]
        given = dtensor_rules.taken(value, part.out, part.rank)
        if given.dims is not None:
            return self._node("call_function", torch_dtensors.share_of, (x, given.dims))
        if value.requires_grad and given.sums:
            return self._node("call_function", torch_dtensors.summed_to_local, (x, given.sums))
        # A DTensor made of a local mask is read as that mask.
        inside = torch_dtensors.made_of(x)
        return inside if inside is not None else self._node("call_method", "to_local", (x,))

    def on_local(self, node: fx.Node, local: dict[fx.Node, fx.Node]) -> fx.Node:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: local.get(n, n))
        made = self._node(node.op, node.target, args, kwargs)
        self._require_same(node, made.meta["example_value"], torch_dtensors.local_of(node.meta["example_value"]))
        return made

    def from_local(self, node: fx.Node, local: fx.Node, alike: fx.Node) -> fx.Node:
        """Make a DTensor of a local one. Its readers rely on the memory order of its axes."""
        whole = node.meta["example_value"]
        own = torch_dtensors.local_of(whole)
        order = strides.order(own)
        if strides.order(local.meta["example_value"]) != order:
            back = tuple(order.index(i) for i in range(len(order)))
            local = self._node("call_function", torch.permute, (local, order))
            local = self._node("call_method", "contiguous", (local,))
            local = self._node("call_function", torch.permute, (local, back))
        own_function = torch_dtensors.from_local()
        if own_function is not None and all(isinstance(size, int) for size in (*whole.shape, *own.shape)):
            names = ("device_mesh", "placements")
            of_mesh = [self._node("call_function", torch_dtensors.get_attribute, (alike, name)) for name in names]
            made = self._node("call_function", own_function, (local, *of_mesh), {"run_check": False})
        else:
            # Local sizes have symbols of their own, so they must be declared equal to the DTensor's.
            made = self._node("call_function", torch_dtensors.of_local, (local, alike, order))
        self._require_same(node, made.meta["example_value"], whole)
        return made

    def _require_same(self, node: fx.Node, value: Any, wanted: Any) -> None:
        reason = dtensor_rules.differs(node, value, wanted)
        if reason is not None:
            raise _Refused(reason)

    def _node(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
        given, named = fx.map_arg((args, kwargs or {}), lambda n: n.meta["example_value"])
        function = getattr(given[0], target) if op == "call_method" else target
        values = given[1:] if op == "call_method" else given
        wants_grad = self.before.meta["example_value"].requires_grad
        with torch_tracing.running_in(self.mode), torch.set_grad_enabled(wants_grad):
            value = function(*values, **named)
        with self.graph.inserting_before(self.before):
            node = self.graph.create_node(op, target, args, kwargs or {})
        node.meta = {**self.before.meta, "example_value": value}
        return node
