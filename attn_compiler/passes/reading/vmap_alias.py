"""What is only one example's of a vmap, and what memory the result of a vmap may share with what was mapped over."""

from __future__ import annotations

from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from attn_compiler.passes import mutation
from attn_compiler.passes.mirror import Mirror

Memory = frozenset[StorageWeakRef]


def regions_of(mirror: Mirror) -> dict[fx.Node, frozenset[int]]:
    """The vmaps that a node's value is one example of, for nodes that are."""
    found: dict[fx.Node, frozenset[int]] = {}
    if not mirror.vmap_axes:
        return found
    for node in mirror.graph.nodes:
        regions = frozenset().union(*(found.get(source, frozenset()) for source in node.all_input_nodes))
        axis = mirror.vmap_axes.get(node)
        if axis is not None:
            regions = regions | {axis.region} if axis.added else regions - {axis.region}
        if regions:
            found[node] = regions
    return found


def shared(mirror: Mirror) -> dict[StorageWeakRef, Memory]:
    """For memory that a vmap gives back: all that may be the same. The mirror has it apart, though the result can be a view."""
    groups: dict[StorageWeakRef, Memory] = {}
    for node, axis in mirror.vmap_axes.items():
        if not axis.added:
            memory = frozenset(mutation.storages(node) | mutation.storages(node.all_input_nodes[0]))
            joined = memory.union(*(groups.get(one, frozenset()) for one in memory))
            groups.update(dict.fromkeys(joined, joined))
    return groups
