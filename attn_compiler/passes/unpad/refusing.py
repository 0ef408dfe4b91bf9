"""The exception of a rule for which a graph keeps its padding, with its reason."""

from __future__ import annotations

from torch import fx

from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason


class KeepsPadding(Exception):
    """A graph that stays as it is. Internal: the pass turns it into a line of the report.

    reason: for the report. at: the mirror node that is to blame; None if it is no node.
    """

    def __init__(
        self, code: Code, rule: str, observed: str, *, at: fx.Node | None = None, remedy: str | None = None
    ) -> None:
        super().__init__(rule)
        self.reason = Reason(code=code, rule=rule, observed=observed, remedy=remedy)
        self.at = at


#: the rule for ops that read packed tokens
POSITION_WISE = "each op between the inputs and the outputs works on each position by itself"
