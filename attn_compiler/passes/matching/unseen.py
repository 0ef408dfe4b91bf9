"""Attention that no pattern starts from, as misses: a written-out softmax, linear attention, or a graph that ends at it.

The search runs before the graph is rewritten, on Dynamo's own nodes. For most graphs it only reads the name of each node.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from torch import fx

from attn_compiler.passes.graph.calls import target_name
from attn_compiler.passes.graph.unit import module_path, source_line
from attn_compiler.passes.matching import linear_calls, nested_calls, written_out
from attn_compiler.passes.matching.written_out import WrittenOut
from attn_compiler.reasons.decisions import Reason
from attn_compiler.reporting.facts import MissReport
from attn_compiler.torch_private import compat as torch_compat


@dataclass(frozen=True, kw_only=True, eq=False)
class Unseen:
    """written: written-out softmaxes, which a pattern may match nevertheless. others: rows of everything else."""

    written: tuple[WrittenOut, ...] = ()
    others: tuple[MissReport, ...] = ()

    def rows(self, found: Collection[fx.Node] = ()) -> list[MissReport]:
        """Return one row for each kind of such attention in the graph, or in a body nested in it. found: Dynamo's nodes in sites."""
        return [*_written_out(one for one in self.written if one.exp not in found), *self.others]


def find(gm: fx.GraphModule) -> Unseen:
    """Search a graph before it is rewritten."""
    graphs = [module.graph for module in torch_compat.graph_modules(gm)]
    refused = linear_calls.refused()
    layers = [one for graph in graphs for one in linear_calls.find(graph, refused)]
    others = [_row(one.firsts, one.called, "none tried", one.reason, source_line(one.firsts[0])) for one in layers]
    broken_off = nested_calls.find(gm)
    if broken_off is not None:
        given = broken_off.given
        others.append(_row([given], nested_calls.ANCHOR, "none tried", broken_off.reason, broken_off.source))
    return Unseen(written=tuple(one for graph in graphs for one in written_out.find(graph)), others=tuple(others))


def _written_out(found: Iterable[WrittenOut]) -> list[MissReport]:
    groups: dict[Reason, list[fx.Node]] = {}
    for one in found:
        groups.setdefault(one.reason, []).append(one.exp)
    return [
        _row(nodes, target_name(nodes[0]), "softmax chain", reason, source_line(nodes[0]))
        for reason, nodes in groups.items()
    ]


def _row(nodes: Iterable[fx.Node], anchor: str, nearest: str, reason: Reason, source: str | None) -> MissReport:
    modules = tuple(map(module_path, nodes))
    first = next(iter(nodes))
    return MissReport(
        modules=modules, anchor=anchor, nearest=nearest, stopped_at=first.name, reason=reason, source=source
    )
