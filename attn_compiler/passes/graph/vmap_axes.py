"""The axes that vmap's own calls in a Dynamo graph add and remove, told apart by region, since levels are reused."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from attn_compiler.passes.graph import mutation
from attn_compiler.passes.graph.calls import target_name
from attn_compiler.torch_private import symbols as torch_symbols, tracing as torch_tracing

_ENTERS, _LEAVES = "_increment_nesting", "_decrement_nesting"


@dataclass(frozen=True, kw_only=True, slots=True)
class VmapAxis:
    """The axis that `_add_batch_dim` hides at `dim` of its input, or `_remove_batch_dim` restores at `dim` of its result.

    region: number of the vmap, in the order of entry. is_plain: only vmaps are around or inside it, and it allows no random numbers. Then
    the ops on one example have their usual meaning.
    """

    region: int
    dim: int
    added: bool
    is_plain: bool


class Tracker:
    """Finds the axes of functorch's calls: `see` is called for each node in order, then `axes` tells them."""

    def __init__(self) -> None:
        self._open: list[int] = []
        self._regions = 0
        self._spoiled: set[int] = set()
        self._found: dict[fx.Node, tuple[int, int, bool]] = {}

    @property
    def is_inside(self) -> bool:
        """Return whether a transform is entered and not left."""
        return bool(self._open)

    def see(self, node: fx.Node) -> None:
        name = target_name(node)
        if name.endswith(_ENTERS):
            self._enter(node, name)
        elif name.endswith(_LEAVES) and self._open:
            self._open.pop()
        elif name == "_add_batch_dim":
            self._axis(node, level=node.args[2:3], dim=node.args[1:2], added=True)
        elif name == "_remove_batch_dim":
            self._axis(node, level=node.args[1:2], dim=node.args[3:4], added=False)

    def axes(self) -> dict[fx.Node, VmapAxis]:
        """Return the axes by node. Complete once every node was seen."""
        return {
            node: VmapAxis(region=region, dim=dim, added=added, is_plain=region not in self._spoiled)
            for node, (region, dim, added) in self._found.items()
        }

    def _enter(self, node: fx.Node, name: str) -> None:
        self._regions += 1
        self._open.append(self._regions)
        if name != "_vmap_increment_nesting" or node.args[1:2] != ("error",):
            self._spoiled.update(self._open)
        elif self._spoiled & set(self._open):
            self._spoiled.add(self._regions)

    def _axis(self, node: fx.Node, *, level: tuple[object, ...], dim: tuple[object, ...], added: bool) -> None:
        if node.kwargs or len(level) != 1 or len(dim) != 1 or not isinstance(dim[0], int):
            return
        # vmap itself writes calls on the innermost level only.
        if self._open and level[0] == len(self._open):
            self._found[node] = (self._open[-1], dim[0], added)


class Memory:
    """Finds the memory of the results of functorch's calls. It is told of the calls in order, as `Tracker` is."""

    def __init__(self) -> None:
        self._mapped: set[StorageWeakRef] = set()

    def view(self, node: fx.Node, source: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return the result, for one example, as a view of the call's first input; None if it is none. hidden: Dynamo's value of it.

        Only a map that computes nothing returns memory that it was given.
        """
        name = target_name(node)
        if name == "_add_batch_dim" and hidden.dim() + 1 == source.dim():
            self._mapped |= mutation.storages_of(source)
            return torch_tracing.untraced(lambda: source.select(_dim(node, 1), 0))
        if name == "_remove_batch_dim" and self._mapped & mutation.storages_of(source):
            return torch_tracing.untraced(lambda: _given_back(source, hidden, _dim(node, 3)))
        if name in ("_wrap_for_grad", "_unwrap_for_grad") and hidden.dim() == source.dim():
            return torch_tracing.untraced(lambda: source.view_as(source))
        return None


def _given_back(source: torch.Tensor, hidden: torch.Tensor, dim: int) -> torch.Tensor:
    """Return a tensor like `hidden` in the memory of `source`. If it does not fit, one example is repeated, and can't be written to."""
    reach = hidden.storage_offset() + 1
    reach += sum((size - 1) * stride for size, stride in zip(hidden.shape, hidden.stride(), strict=True))
    if torch_symbols.statically_known(reach * source.element_size() <= source.untyped_storage().nbytes()):
        return torch_tracing.in_memory_of(source, hidden)
    return source.unsqueeze(dim).expand(hidden.shape)


def _dim(node: fx.Node, position: int) -> int:
    dim = node.args[position]
    if not isinstance(dim, int):
        raise TypeError(f"{node.name} has the dimension {dim!r}")
    return dim


def is_indexed_by_elements(node: fx.Node) -> bool:
    """Return whether a Dynamo node is x[i, j] with a 0-d tensor i or j: outside of a vmap that would be a number."""
    if node.target is not operator.getitem:
        return False
    indices = [i.meta.get("example_value") for i in pytree.tree_leaves(node.args[1]) if isinstance(i, fx.Node)]
    return any(isinstance(i, torch.Tensor) and i.dim() == 0 for i in indices)


def indexed(x: torch.Tensor, index: Any) -> torch.Tensor | None:
    """Return x[index] as vmap takes it, if the index holds only numbers and tensors; else None."""
    indices = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(i, (int, torch.Tensor)) and not isinstance(i, bool) for i in indices):
        return None
    for dim in reversed(range(len(indices))):
        if isinstance(indices[dim], int):
            x = x.select(dim, indices[dim])
    return torch.ops.aten.index.Tensor(x, [i for i in indices if isinstance(i, torch.Tensor)])  # type: ignore[no-any-return]
