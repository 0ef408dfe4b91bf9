"""Why a graph keeps its padding: what a rule raises, and what makes a reason of it."""

from __future__ import annotations

from torch import fx

from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason


class KeepsPadding(Exception):
    """The graph stays as it is. Internal: the pass turns it into a line of the report.

    reason: why. at: the mirror node that is to blame; None if it is no node.
    """

    def __init__(
        self, code: Code, rule: str, observed: str, *, at: fx.Node | None = None, remedy: str | None = None
    ) -> None:
        super().__init__(rule)
        self.reason = Reason(code=code, rule=rule, observed=observed, remedy=remedy)
        self.at = at


#: what an op has to be that reads packed tokens
POSITION_WISE = "each op between the inputs and the outputs works on each position by itself"
