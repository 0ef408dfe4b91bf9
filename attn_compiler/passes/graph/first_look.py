"""What a graph said of its attentions before they were rewritten for the whole sequence. `verify` holds it against what became of them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from attn_compiler.context_parallel import ContextParallel
from attn_compiler.context_parallel.lockstep import Meeting
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.site import Site
from attn_compiler.torch_private import compat as torch_compat


@dataclass(frozen=True, kw_only=True, eq=False)
class FirstLook:
    """Taken before the first rewrite, while bodies of checkpoints stand in the graph.

    cp: what the user gave. beside: names of the groups that share heads with this rank. mirror, original: of the graph. sites: found there,
    in the order of their outputs. axes: name of each input with a part of the sequence -> its axis of positions.
    has_whole: each rank can run the model's own graph, which gathers keys out of a cache that ranks share (decoding.py).
    rewritten: name of a site's output -> the node that took its place in the rewrite; none for a site of which every rank has all keys.
    parts: name of a site's output -> how many attentions became of it, where that is not one.
    outs: name of a site's output -> the name of what gives it in `final`. final: the graph after all passes.
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
        """Whether only all ranks together can tell what a site's output is."""
        return not self.has_whole and self._name(site) in self.rewritten

    def new_out(self, site: Site) -> str | None:
        """The name of what gives a site's output in the end."""
        return self.outs.get(self._name(site))

    def last(self, graph: fx.Graph, mirror: Mirror, sites: Sequence[Site]) -> FirstLook:
        """With what became of the sites. graph: after all passes. mirror, sites: of the rewritten graph, which has decisions."""
        left, outs = set(graph.nodes), {}
        # Attentions stand in the order in which they stood before they were rewritten.
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
class SharedGraph:
    """A graph that was rewritten for a sequence, or a cache, that ranks share.

    first_look: what was found before, with options.verify. meetings: where its ranks meet before each call.
    """

    first_look: FirstLook | None = None
    meetings: tuple[Meeting, ...] = ()

    def last(self, graph: fx.Graph, mirror: Mirror, sites: Sequence[Site]) -> SharedGraph:
        """As `FirstLook.last`."""
        look = None if self.first_look is None else self.first_look.last(graph, mirror, sites)
        return dataclasses.replace(self, first_look=look)


def in_order(mirror: Mirror, sites: Sequence[Site]) -> list[Site]:
    """Sites in the order of their outputs."""
    return sorted(sites, key=lambda site: mirror.order(site.match.out))


def copied(graph: fx.Graph) -> fx.Graph:
    """A copy that can be run by itself. The copy leaves out the marks around the bodies of checkpoints, which nothing uses."""
    found = torch_compat.copied_graph(graph)
    for node in found.find_nodes(op="get_attr"):
        if not node.users:
            found.erase_node(node)
    return found
