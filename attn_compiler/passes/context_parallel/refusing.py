"""The reason why a graph can't run on parts of a sequence, as an exception that the pass turns into an error for users."""

from __future__ import annotations

from torch import fx

from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason


class CannotShard(Exception):
    """A graph that can't run on parts. Internal: becomes ContextParallelUnsupported. at: the mirror node that it is about."""

    def __init__(self, rule: str, observed: str, *, at: fx.Node | None = None, remedy: str | None = None) -> None:
        super().__init__(rule)
        self.reason = Reason(code=Code.CONTEXT_PARALLEL_UNSUPPORTED, rule=rule, observed=observed, remedy=remedy)
        self.at = at
