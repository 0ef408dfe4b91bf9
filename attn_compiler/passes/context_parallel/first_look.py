"""What the model's own graph said of its attentions before they were rewritten for the whole sequence: `verify` holds that against what
became of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from attn_compiler.context_parallel import ContextParallel
from attn_compiler.passes.mirror import Mirror
from attn_compiler.passes.site import Site


@dataclass(frozen=True, kw_only=True, eq=False)
class FirstLook:
    """cp: what the user gave. mirror: of the model's own graph. sites: found there, in the order of their outputs. axes: name of each input
    with a part of the sequence -> its axis of positions. rewritten: name of a site's output -> the node that took its place."""

    cp: ContextParallel
    mirror: Mirror
    sites: tuple[Site, ...]
    axes: Mapping[str, int]
    rewritten: Mapping[str, fx.Node]

    def new_out(self, site: Site) -> fx.Node | None:
        """What took the place of a site's output; None if every rank has all of the site's keys."""
        old = self.mirror.dynamo_node(site.match.out)
        return None if old is None else self.rewritten.get(old.name)
