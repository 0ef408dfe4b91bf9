"""Values of a mirror that belong to one example of a vmap."""

from __future__ import annotations

from torch import fx

from attn_compiler.passes.graph.mirror import Mirror


def regions_of(mirror: Mirror) -> dict[fx.Node, frozenset[int]]:
    """Map each node whose value is one example of vmaps to those vmaps."""
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
