"""A step, its answers about the steps after it, and the contract of any tuple of steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import fx

from attn_compiler.passes.graph.unit import Unit


@dataclass(frozen=True, kw_only=True, slots=True)
class Onward:
    """Go on from the step of this name. None: nothing more is done to the graph."""

    step: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Again:
    """The graph is another one: go on from `step`. A failure before the step `judge`, or an answer that leads elsewhere, leads there."""

    step: str
    judge: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineStep:
    """A step. run: for a step on units, a function of the work and a unit; else one of the work. It may say where to go on.

    needs: the steps before it whose results it takes. leads: the steps that it may go on from, besides the next one.
    costs_all: its exceptions cost all graphs and not one, since it changes the Dynamo graph, or tells users what they did wrong.
    shows: a graph of the unit that dumps have after this step.
    """

    name: str
    run: Callable[..., Onward | Again | None]
    on: Literal["work", "unit"] = "unit"
    needs: tuple[str, ...] = ()
    leads: tuple[str, ...] = ()
    costs_all: bool = False
    shows: Callable[[Unit], fx.Graph | None] | None = None


def check_contracts(pipeline: tuple[PipelineStep, ...]) -> None:
    """Raise ValueError if a step needs one that is not before it, or leads to none, or two have one name."""
    names = [step.name for step in pipeline]
    known: set[str] = set()
    for step in pipeline:
        if step.name in known:
            raise ValueError(f"two passes are called {step.name!r}")
        missing = set(step.needs) - known
        if missing:
            raise ValueError(f"the pass {step.name!r} needs {sorted(missing)}, which nothing before it gives")
        lost = set(step.leads) - set(names)
        if lost:
            raise ValueError(f"the pass {step.name!r} leads to {sorted(lost)}, which is no pass")
        known.add(step.name)
