"""A step, the function that it names, and the contract of any tuple of steps."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Literal

from torch import fx

from attn_compiler.passes.graph.unit import Unit
from attn_compiler.passes.pipeline.work import Work

_ROOMS = "attn_compiler.passes."
_CALL = re.compile(r"(?:(?P<gives>\w+) = )?(?P<module>[\w.]+)\.(?P<function>\w+)\((?P<takes>[\w, ]*)\)")
#: fields of the unit that a step may take and give
OF_UNIT = frozenset(field.name for field in fields(Unit))
#: what all steps work on; a graph on trial, and the exception that a step on it raised
OF_CALL = ("work", "unit", "trial", "failed")


@dataclass(frozen=True, slots=True)
class PipelineStep:
    """A step. run: a call as Python writes it, "found = matching.match.find_sites(unit, mirror, spelling)", of a function below passes/.

    Its arguments and its result are fields of the unit or of the work, or results of other steps (`StepValues`). It may say where to go on.
    on: whether it runs for each unit, or once. needs: the steps before it whose results it takes.
    leads: the steps that it may go on from, besides the next one. judge: the step that judges the graph which it puts on trial.
    only_if: a value, or an attribute of one, without which there is nothing to do. The function is not imported then.
    costs_all: its exceptions cost all graphs and not one, since it changes the Dynamo graph, or tells users what they did wrong.
    shows: a graph of the unit that dumps have after this step.
    """

    name: str
    run: str
    needs: tuple[str, ...] = ()
    _: KW_ONLY
    on: Literal["work", "unit"] = "unit"
    leads: tuple[str, ...] = ()
    judge: str | None = None
    only_if: str | None = None
    costs_all: bool = False
    shows: Callable[[Unit], fx.Graph | None] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCall:
    """A step's `run`, parsed. gives: the name of the result, if it is kept."""

    module: str
    name: str
    takes: tuple[str, ...]
    gives: str | None

    @property
    def function(self) -> Callable[..., Any]:
        """Import the function: a process that finds a kept rewrite imports none of the later steps'."""
        found: Callable[..., Any] = getattr(importlib.import_module(_ROOMS + self.module), self.name)
        return found


@functools.cache
def parsed(run: str) -> StepCall:
    found = _CALL.fullmatch(run)
    if found is None:
        raise ValueError(f"{run!r} is no call of a function in a module of {_ROOMS}")
    takes = tuple(name.strip() for name in found["takes"].split(",") if name)
    return StepCall(module=found["module"], name=found["function"], takes=takes, gives=found["gives"])


def check_contracts(pipeline: tuple[PipelineStep, ...]) -> None:
    """Raise ValueError if a step needs one that is not before it, takes what nothing gives, or leads to none, or two have one name."""
    names = [step.name for step in pipeline]
    known: set[str] = set()
    values = {*OF_CALL, *OF_UNIT, *dir(Work), *Work.__dataclass_fields__}
    for step in pipeline:
        if step.name in known:
            raise ValueError(f"two passes are called {step.name!r}")
        missing = set(step.needs) - known | {*parsed(step.run).takes, (step.only_if or "work").split(".")[0]} - values
        if missing:
            raise ValueError(f"the pass {step.name!r} needs {sorted(missing)}, which nothing before it gives")
        lost = {*step.leads, step.judge} - {*names, None}
        if lost:
            raise ValueError(f"the pass {step.name!r} leads to {sorted(map(str, lost))}, which is no pass")
        known.add(step.name)
        values.add(str(parsed(step.run).gives))
