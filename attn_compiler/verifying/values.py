"""Real values for the nodes of a mirror and of a rewritten graph, from what a run of the model's own graph recorded.

A node that the model's own graph has too is a leaf: its value was recorded. Any other is computed from its inputs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx
from torch._subclasses import FakeTensor

from attn_compiler.passes import axes, mutation, views
from attn_compiler.passes.mirror import Mirror

#: (index of the body, name of a node of the model's own graph)
Key = tuple[int, str]


class NoValueError(Exception):
    """A value that can't be had outside of the compiled graph; the text says why. Internal: the check is skipped."""


@dataclass(kw_only=True, eq=False)
class Body:
    """One unit, made ready: what is left of it once the graph is given away to the compiler.

    index: its place among the bodies. original: the names of the nodes that mean in the model's own graph what they mean to the
    mirror and to the rewritten graph. rewritten: a copy of the rewritten graph. outs: name of a site's new output -> name of the
    old one. names: mirror node -> the name that its value was recorded under. made: mirror node -> the node of the rewritten
    graph that has its value, where only that graph has one.
    """

    index: int
    original: frozenset[str]
    rewritten: fx.Graph
    mirror: Mirror
    outs: dict[str, str] = field(default_factory=dict)
    names: dict[fx.Node, str] = field(default_factory=dict)
    made: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rewritten = {node.name: node for node in self.rewritten.nodes}
        for node in self.mirror.graph.nodes:
            dynamo = self.mirror.dynamo_node(node)
            if dynamo is None or not _is_plain(dynamo.meta.get("example_value")):
                continue
            if dynamo.name in self.original:
                self.names[node] = dynamo.name
            elif dynamo.name in rewritten:
                self.made[node] = rewritten[dynamo.name]


def _is_plain(value: object) -> bool:
    """A tensor inside a transform of torch.func has no value once the transform is over."""
    return not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor)


@dataclass(kw_only=True, eq=False)
class Values:
    """bodies: by the graph of their mirrors. recorded: values of the model's own nodes. symbols: of the symbolic sizes."""

    bodies: Mapping[fx.Graph, Body]
    recorded: dict[Key, Any] = field(default_factory=dict)
    symbols: dict[str, int] = field(default_factory=dict)

    def size(self, expr: sympy.Expr) -> int:
        """A size as a number. Raises NoValueError."""
        missing = {str(s) for s in expr.free_symbols} - self.symbols.keys()
        if missing:
            raise NoValueError(f"the size {expr} is not known on the first call")
        return int(expr.subs({s: self.symbols[str(s)] for s in expr.free_symbols}))

    # ---- the mirror -----------------------------------------------------------------------------------------------

    def leaf(self, node: fx.Node) -> Key | None:
        """Where the value of a mirror node was recorded, if it was."""
        body = self._body(node)
        return (body.index, body.names[node]) if node in body.names else None

    def _body(self, node: fx.Node) -> Body:
        body = self.bodies.get(node.graph)
        if body is None:
            raise NoValueError(f"{node.name} is in a graph that was not recorded")
        return body

    def needs(self, node: fx.Node) -> set[Key]:
        """What has to be recorded for `mirror(node)`. Raises NoValueError."""
        return self._needs(node, set())

    def _needs(self, node: fx.Node, seen: set[fx.Node]) -> set[Key]:
        if node in seen or _is_size(node):
            return set()
        seen.add(node)
        leaf = self.leaf(node)
        if leaf is not None:
            return {leaf}
        body = self._body(node)
        if node in body.made:
            return self.rewritten_needs(body, body.made[node])
        require_computable(node)
        return set().union(*(self._needs(n, seen) for n in node.all_input_nodes))

    def mirror(self, node: fx.Node, known: dict[fx.Node, Any] | None = None) -> Any:
        """The real value of a mirror node, or the number that it stands for."""
        known = {} if known is None else known
        if node not in known:
            known[node] = self._mirror(node, known)
        return known[node]

    def _mirror(self, node: fx.Node, known: dict[fx.Node, Any]) -> Any:
        if _is_size(node):
            return self.number(node.meta["val"])
        leaf = self.leaf(node)
        if leaf is not None:
            return self.recorded[leaf]
        body = self._body(node)
        if node in body.made:
            return self.rewritten(body, body.made[node])
        if node.op == "get_attr":
            return node.meta["constant"]
        return self.call(node, lambda n: self.mirror(n, known))

    def call(self, node: fx.Node, value: Callable[[fx.Node], Any], *, dtype: torch.dtype | None = None) -> Any:
        """Run one mirror node on the values of its inputs. dtype: takes the place of every floating dtype it asks for."""

        def real(x: Any) -> Any:
            if isinstance(x, torch.dtype) and dtype is not None and x.is_floating_point:
                return dtype
            return self.number(x) if isinstance(x, torch.SymInt) else x

        args, kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), lambda x: real(_filled(x, value)))
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def number(self, x: Any) -> int:
        return self.size(axes.size_expr(x))

    # ---- the rewritten graph --------------------------------------------------------------------------------------

    def rewritten_needs(self, body: Body, node: fx.Node) -> set[Key]:
        """What has to be recorded for `rewritten(body, node)`. Raises NoValueError."""
        return self._rewritten_needs(body, node, node, set())

    def _rewritten_needs(self, body: Body, node: fx.Node, start: fx.Node, seen: set[fx.Node]) -> set[Key]:
        if node in seen:
            return set()
        seen.add(node)
        name = _recorded_as(body, node) if node is not start else None
        if name is not None:
            return {(body.index, name)}
        if node.op not in ("call_function", "call_method"):
            raise NoValueError(f"{node.name} of the rewritten graph is not in the model's own graph")
        return set().union(*(self._rewritten_needs(body, n, start, seen) for n in node.all_input_nodes))

    def rewritten(self, body: Body, node: fx.Node) -> Any:
        """What the rewritten graph computes at `node` from the model's own values."""
        return self._rewritten(body, node, node, {})

    def _rewritten(self, body: Body, node: fx.Node, start: fx.Node, known: dict[fx.Node, Any]) -> Any:
        if node in known:
            return known[node]
        name = _recorded_as(body, node) if node is not start else None
        if name is not None:
            return self.recorded[body.index, name]
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: self._rewritten(body, n, start, known))
        if node.op == "call_method":
            known[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return known[node]


def _recorded_as(body: Body, node: fx.Node) -> str | None:
    name = body.outs.get(node.name, node.name)
    return name if name in body.original else None


def _filled(x: Any, value: Callable[[fx.Node], Any]) -> Any:
    return value(x) if isinstance(x, fx.Node) else x


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)


def require_computable(node: fx.Node) -> None:
    """Raise NoValueError unless running the mirror node by itself gives its value and changes nothing else."""
    if node.op == "get_attr" and isinstance(node.meta.get("constant"), torch.Tensor):
        return
    if node.op != "call_function" or not (
        isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem
    ):
        raise NoValueError(f"{node.name} exists only inside one call of the graph")
    if mutation.writes(node):
        raise NoValueError(f"{node.name} is written in place inside one call of the graph")
    if _is_random(node):
        raise NoValueError(f"{node.name} draws random numbers inside one call of the graph")


def _is_random(node: fx.Node) -> bool:
    """Whether a result differs from call to call. SDPA and dropout say so of themselves even where they drop nothing."""
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    rate = views.argument(node, "dropout_p", views.argument(node, "p"))
    return rate != 0 and views.argument(node, "train") is not False
