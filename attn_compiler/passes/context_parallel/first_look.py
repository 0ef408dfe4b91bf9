"""The attentions of a graph before they were rewritten for the whole sequence. `verify` compares them with the rewritten ones."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from attn_compiler.context_parallel import ContextParallel
from attn_compiler.context_parallel.rank_sync import Meeting, in_step
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.onward import Outcome
from attn_compiler.passes.graph.site import Site
from attn_compiler.torch_private import compat as torch_compat


@dataclass(frozen=True, kw_only=True, eq=False)
class FirstLook:
    """A record of a graph before its first rewrite, while bodies of checkpoints stand in the graph.

    cp: the user's description. beside: names of the groups that share heads with this rank. mirror, original: of the graph.
    sites: of the graph, in the order of their outputs. axes: name of each input with a part of the sequence -> its axis of positions.
    has_whole: each rank can run the model's own graph, which gathers keys out of a cache that ranks share (decoding.py).
    rewritten: name of a site's output -> the node that replaced it in the rewrite; none for a site of which every rank has all keys.
    parts: name of a site's output -> the number of attentions that replaced it, where that is not one.
    outs: name of a site's output -> the name of its replacement in `final`. final: the graph after all passes.
    """

    cp: ContextParallel
    beside: tuple[str, ...]
    mirror: Mirror
    original: fx.Graph
    sites: tuple[Site, ...]
    axes: Mapping[str, int]
    has_whole: bool = False
    rewritten: Mapping[str, fx.Node] = field(default_factory=dict)
    parts: Mapping[str, int] = field(default_factory=dict)
    outs: Mapping[str, str] = field(default_factory=dict)
    final: fx.Graph | None = None

    def is_shared(self, site: Site) -> bool:
        """Return whether only all ranks together can compute a site's output."""
        return not self.has_whole and self._name(site) in self.rewritten

    def new_out(self, site: Site) -> str | None:
        """Return the name of the node that gives a site's output in the final graph."""
        return self.outs.get(self._name(site))

    def completed(self, graph: fx.Graph, mirror: Mirror, sites: Sequence[Site]) -> FirstLook:
        """Return the record with each site's outcome. graph: after all passes. mirror, sites: of the rewritten graph, with decisions."""
        left, outs = set(graph.nodes), {}
        # Rewritten attentions keep the order of the original ones.
        every = iter(in_order(mirror, sites))
        for site in self.sites:
            later, *_ = itertools.islice(every, self.parts.get(self._name(site), 1))
            site.decision = later.decision
            new = self.rewritten.get(self._name(site))
            found = new if new in left else later.new_out
            if found is not None:
                outs[self._name(site)] = found.name
        return dataclasses.replace(self, outs=outs, final=torch_compat.copied_graph(graph))

    def _name(self, site: Site) -> str:
        old = self.mirror.dynamo_node(site.match.out)
        return "" if old is None else old.name


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedGraph(Outcome):
    """A graph that was rewritten for a sequence, or a cache, that ranks share.

    first_look: the graph before, with options.verify. meetings: where its ranks meet before each call.
    """

    first_look: FirstLook | None = None
    meetings: tuple[Meeting, ...] = ()

    def around(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        return in_step(compiled, self.meetings)


def in_order(mirror: Mirror, sites: Sequence[Site]) -> list[Site]:
    """Return sites in the order of their outputs."""
    return sorted(sites, key=lambda site: mirror.order(site.match.out))


def runnable_copy(graph: fx.Graph) -> fx.Graph:
    """Copy a graph so that it can run by itself. Marks around the bodies of checkpoints, which nothing uses, are left out."""
    found = torch_compat.copied_graph(graph)
    for node in found.find_nodes(op="get_attr"):
        if not node.users:
            found.erase_node(node)
    return found
