"""The order of a ring's gathers (passes/context_parallel/ring.py): each begins before the previous step's attention, and is awaited late.

So a rank has the keys and values of two others at a time, and no more: in the backward, too, which gathers them again.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable

import torch
from torch import fx

from attn_compiler.context_parallel.collectives import MOVES

_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_ATEN = torch.ops.aten
#: ops that make a slice of a rank's keys and values from the tensors that are kept
_OF_SLICES = frozenset({_ATEN.unbind.int, _ATEN.select.int, _ATEN.alias.default, _ATEN.clone.default, operator.getitem})


def passes(group: str) -> Callable[[fx.Graph], None]:
    """Return `move_exchanges` for the ranks of a group, on one graph."""

    def run_on(graph: fx.Graph) -> None:
        move_exchanges(graph, group)

    return run_on


def move_exchanges(graph: fx.Graph, group: str) -> None:
    """Move nodes of a graph that is to be compiled in its own order: a forward, or a backward."""
    gathers = [node for node in graph.nodes if is_piece(node, group)]
    if not gathers:
        return
    _wait_late(graph, set(gathers))
    for before, gather in itertools.pairwise(gathers):
        wait = next((user for user in before.users if user.target is _WAIT), None)
        if wait is not None:
            _begin_before(gather, wait)


def is_piece(node: fx.Node, group: str) -> bool:
    """Return whether a node begins a step of a ring: others gather tensors of several axes."""
    if node.target is not _GATHER or group not in node.args:
        return False
    sent = node.args[0]
    return isinstance(sent, fx.Node) and sent.meta["val"].dim() == 1 and sent.meta["val"].is_floating_point()


def _wait_late(graph: fx.Graph, gathers: set[fx.Node]) -> None:
    """Move each wait, and the views after it, to its first reader."""
    come: dict[fx.Node, None] = {}
    for node in graph.nodes:
        of_ring = any(x in gathers or x in come for x in node.all_input_nodes)
        if of_ring and node.target in MOVES:
            come[node] = None
    for node in reversed(come):
        readers = sorted(node.users)
        if readers and readers[0].op != "output":
            readers[0].prepend(node)


def _begin_before(gather: fx.Node, place: fx.Node) -> None:
    """Move a gather, and the ops that make its slice, before a node, if all that they read is there."""
    moved: list[fx.Node] = []
    left = [gather]
    while left:
        node = left.pop()
        if node < place or node in moved:
            continue
        if node is not gather and node.target not in _OF_SLICES:
            return
        moved.append(node)
        left += node.all_input_nodes
    for node in sorted(moved):
        place.prepend(node)
