"""Whole tensors for masks and biases: inputs are gathered, and the model's computation from them is repeated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from attn_compiler.passes.context_parallel.exchanging import GraphLayout
from attn_compiler.passes.context_parallel.following import Input
from attn_compiler.passes.context_parallel.numbers import IF_CHANCE, is_half, is_near
from attn_compiler.passes.context_parallel.places import CannotShard
from attn_compiler.passes.graph import closed
from attn_compiler.passes.graph.emit import GraphBuilder
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.mutation import Version

_RULE = "a mask or bias reads what ranks have parts of, or all of"


class Wholes:
    """Nodes of whole tensors, by the nodes that hold the rank's part; one for all sites.

    are_chance: numbers that look like the length of a part are not taken for it.
    """

    def __init__(
        self,
        builder: GraphBuilder,
        mirror: Mirror,
        layout: GraphLayout,
        given: Mapping[fx.Node, Input],
        *,
        are_chance: bool = False,
    ) -> None:
        self._builder = builder
        self._mirror = mirror
        self._layout = layout
        self._given = given
        self.are_chance = are_chance
        self._made_of: dict[fx.Node, frozenset[fx.Node]] = {}

    def whole_of(self, version: Version, name: str, length: int) -> fx.Node:
        """Return the whole of a tensor that an expression loads from. length: of the rank's part of the sequence. Raises CannotShard."""
        if version.node.graph is not self._mirror.graph:
            raise CannotShard(_RULE, f"{name} is a tensor of another graph", at=None)
        if version.since is not None or version.until is not None:
            raise CannotShard(_RULE, f"{name} is written in place", at=version.node)
        dynamo = self._mirror.dynamo_node(version.node)
        if dynamo is None:
            raise CannotShard(_RULE, f"{name} exists only inside of one call", at=version.node)
        for one in (self._given[x] for x in self._inputs(dynamo)):
            if one.length != length:
                raise CannotShard(
                    _RULE,
                    f"{one.node.name} has {one.length} elements along axis {one.axis}, and a rank has {length} positions",
                    at=version.node,
                    remedy="what every rank has as a whole is named in ContextParallel(replicated=...)",
                )
        return self._whole(dynamo)

    def is_shared(self, version: Version) -> bool:
        """Return whether a tensor that an expression loads from is made of inputs with a part of the sequence."""
        is_here = version.node.graph is self._mirror.graph
        dynamo = self._mirror.dynamo_node(version.node) if is_here else None
        return dynamo is not None and bool(self._inputs(dynamo))

    def _whole(self, node: fx.Node) -> fx.Node:
        if not self._inputs(node):
            return node
        return self._builder.once(("whole", node), lambda: self._made(node))

    def _inputs(self, node: fx.Node) -> frozenset[fx.Node]:
        """Return the inputs with a part of the sequence that a node is made of."""
        if node not in self._made_of:
            own = frozenset((node,)) if node in self._given else frozenset()
            self._made_of[node] = own.union(*(self._inputs(x) for x in node.all_input_nodes))
        return self._made_of[node]

    def _made(self, node: fx.Node) -> fx.Node:
        one = self._given.get(node)
        if one is not None and closed.holds_closed(node.meta["example_value"]):
            remedy = "give the model what masks as a plain tensor"
            raise CannotShard(_RULE, f"{node.name} is a DTensor", at=self._at(node), remedy=remedy)
        if one is not None:
            return self._layout.gathered(self._builder, node, one.axis)
        if node.op not in ("call_function", "call_method") or not self._mirror.computes_only(node):
            raise CannotShard(_RULE, f"{node.name} does more than compute a tensor", at=self._at(node))
        lengths = {self._given[x].length for x in self._inputs(node)}
        if not self.are_chance and any(is_near(x, lengths) or is_half(x, lengths) for x in _numbers(node)):
            rule = "what makes a mask names no number of the rank's own positions"
            raise CannotShard(rule, f"{node.name} is {node.format_node()}", at=self._at(node), remedy=IF_CHANCE)
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._whole)
        try:
            function: Any = getattr(torch.Tensor, str(node.target)) if node.op == "call_method" else node.target
            made = self._builder.call(function, *args, **kwargs)
        except Exception as error:
            raise CannotShard(
                "what makes a mask can be made for the whole sequence", f"{node.name}: {error}", at=self._at(node)
            ) from error
        self._check(node, made, lengths)
        return made

    def _check(self, node: fx.Node, made: fx.Node, lengths: set[int]) -> None:
        """Raise CannotShard unless the shape is the same but for the sequence."""
        own, whole = node.meta["example_value"], self._builder.value(made)
        if not isinstance(own, torch.Tensor) or not isinstance(whole, torch.Tensor):
            raise CannotShard(_RULE, f"{node.name} is no tensor", at=self._at(node))
        pairs = list(zip(own.shape, whole.shape, strict=True)) if own.dim() == whole.dim() else [(0, 1)]
        if not all(a == b or (a in lengths and b == self._layout.size * a) for a, b in pairs):
            raise CannotShard(
                "what makes a mask can be made for the whole sequence",
                f"{node.name} would be {tuple(whole.shape)} for {tuple(own.shape)}",
                at=self._at(node),
            )

    def _at(self, node: fx.Node) -> fx.Node | None:
        return next(iter(self._mirror.owned(node)), None)


def _numbers(node: fx.Node) -> list[int]:
    found: list[int] = []
    fx.node.map_aggregate(
        (node.args, node.kwargs),
        lambda x: found.append(x) if isinstance(x, int) and not isinstance(x, bool) else None,
    )
    return found
