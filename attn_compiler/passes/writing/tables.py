"""Biases that a model gathers from a learned table: the table's gradient is summed in one order, and never in half precision.

The model's own gather becomes `attn_compiler::gathered` (lowerings/shared/calls/tables.py), for all that reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from attn_compiler.lowerings.base import UNTOUCHED
from attn_compiler.passes.graph import faults, strides
from attn_compiler.passes.graph.axes import AxisError
from attn_compiler.passes.graph.calls import reached
from attn_compiler.passes.graph.emit import GraphBuilder, example
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.site import Site
from attn_compiler.passes.graph.unit import Unit
from attn_compiler.passes.graph.views import VIEWS
from attn_compiler.torch_private.symbols import statically_known

aten = torch.ops.aten

#: ops between a gather and the bias, besides those that PyTorch calls pointwise
_PASSED = frozenset((*VIEWS, aten.where.ScalarOther, aten.where.ScalarSelf))


def sum_in_one_order(unit: Unit, mirror: Mirror, builder: GraphBuilder, sites: Iterable[Site]) -> None:
    """Replace each gather that a lowered site's bias is made by, where a gradient goes through it."""
    lowered = (site for site in sites if site.decision is not None and site.decision.lowering != UNTOUCHED)
    gathers = {gather: site for site in lowered for gather in _gathers(site)}
    for gather, site in gathers.items():
        with faults.confined(unit.log, "lower", site.module):
            _replace(mirror, builder, gather)


def _gathers(site: Site) -> Iterator[fx.Node]:
    """Return the gathers that the site's bias is made of, through views and pointwise ops."""
    terms = (*site.added, *site.match.scores.additive)
    roots = [term.operand.root for term in terms] if site.spec is not None and site.spec.needs_grad else []

    def further(node: fx.Node) -> list[fx.Node]:
        passes = node.target in _PASSED or torch.Tag.pointwise in getattr(node.target, "tags", ())
        return node.all_input_nodes if passes and node.target not in _GATHERS else []

    return (node for node in reached(roots, further) if node.target in _GATHERS)


def _replace(mirror: Mirror, builder: GraphBuilder, gather: fx.Node) -> None:
    """Replace a gather, unless it exists only inside one call, does more than gather, or reads few of many elements."""
    read = _GATHERS[gather.target](*gather.args)
    if read is None:
        return
    table, axis, indices = read
    try:
        wanted = example(mirror, gather)
        nodes = [builder.leaf(node) for node in (table, *indices)]
    except AxisError:
        return
    if not wanted.requires_grad or statically_known(wanted.numel() <= builder.value(nodes[0]).numel()):
        return
    with builder.at(gather, with_grad=True) as old:
        new = _gathered(builder, nodes[0], axis, nodes[1:])
        new = new if builder.value(new).stride() == wanted.stride() else strides.restride(builder, new, wanted)
    builder.replace(old, new)
    old.graph.erase_node(old)


def _gathered(builder: GraphBuilder, table: fx.Node, axis: int, at: list[fx.Node]) -> fx.Node:
    """Emit the gather. The op indexes the table's first axes."""
    if axis:
        table = builder.call(torch.movedim, table, [*range(axis, axis + len(at))], [*range(len(at))])
    new = builder.call(torch.ops.attn_compiler.gathered.default, table, at)
    count = max(builder.value(index).dim() for index in at)
    return builder.call(torch.movedim, new, [*range(count)], [*range(axis, axis + count)]) if axis else new


# ---- models' gathers as (table, first indexed axis, indices of that axis and of the following ones) -------------------


def _index(table: fx.Node, indices: list[fx.Node | None]) -> tuple[fx.Node, int, list[fx.Node]] | None:
    given = [i for i, index in enumerate(indices) if index is not None]
    at = [index for index in indices if index is not None]
    are_whole = all(index.meta["val"].dtype in (torch.int32, torch.int64) for index in at)
    if not are_whole or given != [*range(given[0], given[0] + len(at))]:
        return None
    return table, given[0], at


def _embedding(
    table: fx.Node, index: fx.Node, padding: int = -1, *how: bool
) -> tuple[fx.Node, int, list[fx.Node]] | None:
    """Read an embedding without padding, which has no gradient. how: its gradient is divided by counts, or sparse."""
    return (table, 0, [index]) if padding < 0 and not any(how) else None


_GATHERS: dict[Any, Any] = {
    aten.index.Tensor: _index,
    aten.embedding.default: _embedding,
    aten.index_select.default: lambda table, axis, index: (table, axis % table.meta["val"].dim(), [index]),
}
