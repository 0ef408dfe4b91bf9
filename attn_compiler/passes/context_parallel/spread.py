"""The state of a graph between the rewriting of its attentions and the agreement of its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attn_compiler.context_parallel import ContextParallel
from attn_compiler.passes.context_parallel.decoding import SlotOutcome
from attn_compiler.passes.context_parallel.sites import RewrittenSite
from attn_compiler.passes.graph.first_look import FirstLook
from attn_compiler.passes.graph.mirror import Mirror


@dataclass(frozen=True, kw_only=True, eq=False)
class Rewrite:
    """The rewriting of a graph. sites, misses: the numbers to be found when it is matched again. look: with options.verify."""

    sites: int
    misses: int
    look: FirstLook | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceRewrite(Rewrite):
    """The rewriting over a shared sequence. shared: the attentions whose keys several ranks have. lengths: positions that a rank has.

    done: by the module of each of these. by_value: a note where numbers of the length were looked for by their values alone.
    """

    shared: int
    lengths: tuple[int, ...]
    done: Mapping[str, RewrittenSite]
    by_value: str


@dataclass(frozen=True, kw_only=True, eq=False)
class SlotRewrite(Rewrite):
    """The rewriting of a graph with a cache that ranks share."""

    outcome: SlotOutcome


@dataclass(frozen=True, kw_only=True, eq=False)
class Spread:
    """A graph that was rewritten, or has an error, and that its ranks have to agree on.

    beside: groups of ranks that have other heads. mirror: of the graph as it came. call: the facts of the call for the other ranks.
    """

    cp: ContextParallel
    beside: tuple[str, ...]
    mirror: Mirror
    call: tuple[str, ...]
    rewrite: SequenceRewrite | SlotRewrite | None = None
    error: Exception | None = None

    @property
    def is_other_graph(self) -> bool:
        """Return whether the graph has to be matched again."""
        rewrite = self.rewrite
        return isinstance(rewrite, SequenceRewrite) or (isinstance(rewrite, SlotRewrite) and bool(rewrite.outcome.sent))
