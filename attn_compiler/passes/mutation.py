"""Where a mirror writes in place, and whether a tensor may be read later than the model reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from attn_compiler.passes.mirror import Mirror

Writers = list[tuple[fx.Node, set[StorageWeakRef]]]


def writes(node: fx.Node) -> list[fx.Node]:
    """The nodes whose storage this mirror node writes to; a higher-order call is taken to write nothing it was not given."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return []
    written = []
    for position, parameter in enumerate(target._schema.arguments):
        if parameter.alias_info is not None and parameter.alias_info.is_write:
            given: Any = node.args[position] if position < len(node.args) else node.kwargs.get(parameter.name)
            written += [x for x in pytree.tree_leaves(given) if isinstance(x, fx.Node)]
    return written


def storages(node: fx.Node) -> set[StorageWeakRef]:
    values = pytree.tree_leaves(node.meta.get("val"))
    return {StorageWeakRef(v.untyped_storage()) for v in values if isinstance(v, torch.Tensor)}


def writers(graph: fx.Graph) -> Writers:
    """Every node of a mirror graph that writes in place, with the storages that it writes to."""
    found: Writers = []
    for node in graph.nodes:
        written = writes(node)
        if written:
            found.append((node, set().union(*map(storages, written))))
    return found


def written_between(mirror: Mirror, tensor: fx.Node, start: fx.Node, end: fx.Node) -> fx.Node | None:
    """The first node after `start` and before `end` that writes into `tensor`'s storage, if there is one."""
    mine = storages(tensor)
    first, last = mirror.order(start), mirror.order(end)
    for writer, written in mirror.writers:
        if first < mirror.order(writer) < last and mine & written:
            return writer
    return None
