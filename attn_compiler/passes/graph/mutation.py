"""In-place writes in a mirror, and whether a tensor may be read later than the model reads it."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from attn_compiler.torch_private import compat as torch_compat, tracing as torch_tracing

Writers = list[tuple[fx.Node, set[StorageWeakRef]]]


class WritersInto(Protocol):
    """The nodes that write into one tensor's memory, in order, and their places in the order of the mirror."""

    @property
    def nodes(self) -> Sequence[fx.Node]: ...

    @property
    def places(self) -> Sequence[int]: ...


class Ordered(Protocol):
    """The part of a mirror that this module asks: who writes where, and when."""

    @property
    def writers(self) -> Writers: ...

    @property
    def reshapers(self) -> Writers: ...

    def order(self, node: fx.Node) -> int: ...

    def writers_into(self, tensor: fx.Node) -> WritersInto: ...


@dataclass(frozen=True, kw_only=True)
class Version:
    """The value of a tensor from one write into its memory to the next.

    node: the tensor, in a mirror. since: the last mirror node that wrote before; None: the tensor is as it was made or came in.
    until: the first node that writes after, or None. A node that writes and returns its tensor (`add_`) is `since` itself.
    """

    node: fx.Node
    since: fx.Node | None = None
    until: fx.Node | None = None


def effect(*inputs: torch.Tensor) -> None:
    """Stand in the mirror for a call that is not looked into and has no result, such as a model's own Triton kernel.

    It stands for the call's writes to `inputs`.
    """
    raise NotImplementedError("a mirror is analysed, never run")


def writes(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose storage this mirror node writes to; a higher-order call is taken to write only to its arguments.

    PyTorch detaches a tensor that it makes from a Python number in place: that writes no element. Nor does a dropout that drops none.
    """
    target = node.target
    if target is effect:
        return node.all_input_nodes
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return []
    if target is torch.ops.aten.dropout_.default and not (node.args[1] and node.args[2]):
        return []
    return [] if target is torch.ops.aten.detach_.default else declared(node, target)


def declared(node: fx.Node, overload: torch._ops.OpOverload) -> list[fx.Node]:
    """Return the arguments of a call that the op's schema says it writes to."""
    written = []
    for position, parameter in enumerate(overload._schema.arguments):
        if parameter.alias_info is not None and parameter.alias_info.is_write:
            given: Any = node.args[position] if position < len(node.args) else node.kwargs.get(parameter.name)
            written += [x for x in pytree.tree_leaves(given) if isinstance(x, fx.Node)]
    return written


def returned(node: fx.Node) -> fx.Node | None:
    """Return the node that this one writes to and returns (`x.index_put_(...)` is x); None if it is no such op."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or len(target._schema.returns) != 1 or not node.args:
        return None
    alias = target._schema.returns[0].alias_info
    given = target._schema.arguments[0].alias_info
    same = alias is not None and alias.is_write and given is not None and given.is_write
    return node.args[0] if same and isinstance(node.args[0], fx.Node) else None


def storages(node: fx.Node) -> set[StorageWeakRef]:
    """Return the storages behind a mirror node's value."""
    return storages_of(node.meta.get("val"))


def storages_of(values: Any) -> set[StorageWeakRef]:
    """Return the storages behind the tensors in a nest of values, and behind the tensors that those wrap."""
    leaves = [v for v in pytree.tree_leaves(values) if isinstance(v, torch.Tensor)]
    tensors = [torch_compat.without_transforms(part) for v in leaves for part in torch_tracing.plain_tensors(v)]
    return {StorageWeakRef(v.untyped_storage()) for v in tensors}  # type: ignore[no-untyped-call]


def writers(graph: fx.Graph) -> Writers:
    """Return every node of a mirror graph that writes in place, with the storages that it writes to."""
    found: Writers = []
    for node in graph.nodes:
        written = writes(node)
        if written:
            found.append((node, set().union(*map(storages, written))))
    return found


def reshapers(writers: Writers) -> Writers:
    """Return the writers that change shape or strides of their tensor in place."""
    return [(writer, written) for writer, written in writers if _is_view_in_place(writer.target)]


def reshaped(mirror: Ordered, tensors: set[StorageWeakRef]) -> fx.Node | None:
    """Return the first node that changes shape or strides of one of these tensors in place (`transpose_`).

    A mirror knows only the last shape and strides of such a tensor, wherever it is read.
    """
    return next((w for w, written in mirror.reshapers if tensors & written), None)


def _is_view_in_place(target: object) -> bool:
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.inplace_view in target.tags


def views_in_place(method: str) -> bool:
    """Return whether a method of that name changes shape or strides of its tensor in place."""
    # The namespace object has methods of its own, such as __eq__, which are no ops.
    packet = getattr(torch.ops.aten, method, None) if method.endswith("_") else None
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    overloads: list[str] = packet.overloads()  # type: ignore[no-untyped-call]
    return any(_is_view_in_place(getattr(packet, name)) for name in overloads)


def version(mirror: Ordered, tensor: fx.Node, when: int) -> Version:
    """Return the value of a tensor right before the place `when` in the order of the mirror (mirror.order)."""
    writers = mirror.writers_into(tensor)
    at = bisect.bisect_left(writers.places, when)
    since = writers.nodes[at - 1] if at else None
    return Version(node=tensor, since=since, until=writers.nodes[at] if at < len(writers.nodes) else None)


def written_after(mirror: Ordered, tensors: set[StorageWeakRef], start: fx.Node) -> fx.Node | None:
    """Return the first node after `start` that writes into one of these storages, or None."""
    after = (w for w, written in mirror.writers if mirror.order(w) > mirror.order(start) and tensors & written)
    return next(after, None)


def is_written_later(mirror: Ordered, node: fx.Node) -> bool:
    """Return whether anything writes into a node's memory after the node was made."""
    return written_after(mirror, storages(node), node) is not None


def written_between(mirror: Ordered, tensor: fx.Node, start: fx.Node, end: fx.Node) -> fx.Node | None:
    """Return the first node after `start` and before `end` that writes into `tensor`'s storage, or None."""
    mine = storages(tensor)
    first, last = mirror.order(start), mirror.order(end)
    for writer, written in mirror.writers:
        if first < mirror.order(writer) < last and mine & written:
            return writer
    return None
