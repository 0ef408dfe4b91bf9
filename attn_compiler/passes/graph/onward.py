"""Answers of a step about the steps after it, and the outcome of an option. An option's room makes its own kinds of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from attn_compiler.reporting.facts import UnpadReport


@dataclass(frozen=True, kw_only=True, slots=True)
class Onward:
    """Go on from the step of this name. None: nothing more is done to the graph."""

    step: str | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Trial:
    """A graph that an option has rewritten. It goes on from the step's first lead, up to the step's judge.

    A failure on the way, or an answer that leads elsewhere, leads to the judge, too. `among`: the only lowerings that may serve; None: all.
    """

    @property
    def is_other_graph(self) -> bool:
        """Return whether the graph has to be matched again; else the judge is next."""
        return True

    @property
    def among(self) -> tuple[str, ...] | None:
        return None


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """The outcome of an option for a graph."""

    #: calls may read inputs that the rewritten graph does not read
    reads_all: ClassVar[bool] = False

    @property
    def beside(self) -> tuple[fx.GraphModule, ...]:
        """Return other graphs that calls may run: copies of the unit's as it was."""
        return ()

    def row(self) -> UnpadReport | None:
        """Return its row of the report."""
        return None

    def around(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Return the graph's compiled function with all that the option does at a call."""
        return compiled

    def give_up(self) -> None:
        """Undo what outlives the graph, which is not compiled after all."""
