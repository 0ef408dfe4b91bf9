"""Execution of the steps: steps on the whole in their order, and each row of steps on units for one unit after the other."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from attn_compiler.passes.graph import faults
from attn_compiler.passes.graph.onward import Onward, Trial
from attn_compiler.passes.graph.unit import FoundSites, Unit
from attn_compiler.passes.pipeline import steps
from attn_compiler.passes.pipeline.step import OF_CALL, OF_UNIT, PipelineStep, parsed
from attn_compiler.passes.pipeline.work import Work, located
from attn_compiler.reporting.dump import Dumper, timed
from attn_compiler.torch_private import compat as torch_compat, tracing as torch_tracing


@dataclass(frozen=True, kw_only=True, slots=True)
class StepValues:
    """The values that a step may take, by name."""

    work: Work
    unit: Unit | None = None
    trial: Trial | None = None
    failed: Exception | None = None

    def get(self, name: str) -> Any:
        if name in OF_CALL:
            return getattr(self, name)
        if self.unit is not None and name in OF_UNIT:
            return self.unit.mirrored if name == "mirror" else getattr(self.unit, name)
        return self.work.results[name] if name in self.work.results else getattr(self.work, name)

    def put(self, name: str, value: Any) -> None:
        if self.unit is not None and name in OF_UNIT:
            setattr(self.unit, name, value)
        elif hasattr(self.work, name):
            setattr(self.work, name, value)
        else:
            self.work.results[name] = value


def call(step: PipelineStep, values: StepValues) -> Onward | Trial | None:
    """Run a step. Tests put others in the place of this function."""
    named = parsed(step.run)
    said = named.function(*map(values.get, named.takes))
    if isinstance(said, Onward | Trial):
        return said
    if named.gives is not None:
        values.put(named.gives, said)
    return None


def _is_needed(step: PipelineStep, values: StepValues) -> bool:
    if step.only_if is None:
        return True
    name, *attributes = step.only_if.split(".")
    return bool(functools.reduce(getattr, attributes, values.get(name)))


def run_steps(work: Work) -> None:
    """Run every step, until one says that nothing more is done."""
    pipeline = steps.PIPELINE
    at = 0
    while at < len(pipeline):
        step = pipeline[at]
        if step.on == "unit":
            row = tuple(itertools.takewhile(lambda one: one.on == "unit", pipeline[at:]))
            _run_on_units(row, work)
            at += len(row)
            continue
        values = StepValues(work=work)
        if not _is_needed(step, values):
            work.results |= dict.fromkeys(filter(None, [parsed(step.run).gives]), ())
            at += 1
            continue
        with located(step.name, None):
            said = call(step, values)
        if said is None:
            at += 1
        elif isinstance(said, Onward) and said.step is None:
            return
        else:
            at = _place(step, said, pipeline)


def load(row: tuple[PipelineStep, ...]) -> None:
    """Import all that steps call, before their time is taken: half of a start's imports."""
    for step in row:
        _ = parsed(step.run).function


def _run_on_units(row: tuple[PipelineStep, ...], work: Work) -> None:
    work.seconds = dict.fromkeys((step.name for step in row), 0.0) | work.seconds
    work.dumper = Dumper.create(work.options.dump_dir if work.snapshot else None, torch_compat.graph_name())
    load(tuple(step for step in row if any(_is_needed(step, StepValues(work=work, unit=one)) for one in work.units)))
    for unit in work.units:
        with torch_tracing.tracing_in(unit.mode):
            _run_on(unit, row, work)


@dataclass(kw_only=True, eq=False)
class _OnTrial:
    """A graph on trial. judge: the place of the step that judges it. failed: the exception that a step on it raised."""

    trial: Trial
    judge: int
    failed: Exception | None = None


def _run_on(unit: Unit, row: tuple[PipelineStep, ...], work: Work) -> None:
    at, judges = 0, {step.judge for step in row}
    on: _OnTrial | None = None
    while at < len(row):
        step = row[at]
        is_judged = on is not None and at == on.judge
        # No trial within a trial, and no judge without one.
        if (step.judge is not None and on is not None) or (step.name in judges and not is_judged):
            at += 1
            continue
        values = StepValues(work=work, unit=unit)
        if on is not None:
            values = StepValues(work=work, unit=unit, trial=on.trial, failed=on.failed)
        on = None if is_judged else on
        watched = _confined(step, unit) if on is None else _for_the_judge(on)
        with _dumped(step, unit, work.dumper), timed(step.name, work.seconds), watched as attempt:
            said = call(step, values) if _is_needed(step, values) else None
        if attempt.reason is not None:
            unit.log.left_alone, unit.found = attempt.reason, FoundSites()
            return
        if on is not None and (said is not None or on.failed is not None):
            at = on.judge
        elif said is None:
            at += 1
        elif isinstance(said, Trial):
            on = _OnTrial(trial=said, judge=_named(str(step.judge), row))
            at = _place(step, said, row)
        elif said.step is None:
            return
        else:
            at = _place(step, said, row)


def _place(step: PipelineStep, said: Onward | Trial, row: tuple[PipelineStep, ...]) -> int:
    if isinstance(said, Trial):
        return _named(step.leads[0] if said.is_other_graph else str(step.judge), row)
    if said.step not in step.leads:
        raise ValueError(f"the pass {step.name!r} leads to {said.step!r}, of which its line says nothing")
    return _named(said.step, row)


def _named(name: str, row: tuple[PipelineStep, ...]) -> int:
    return next(place for place, step in enumerate(row) if step.name == name)


@contextlib.contextmanager
def _for_the_judge(on: _OnTrial) -> Iterator[faults.Attempt]:
    """Catch any failure on a trial graph: its judge decides what to do about it."""
    try:
        yield faults.Attempt()
    except Exception as error:  # noqa: BLE001 (the judge raises it, or gives it as a reason)
        on.failed = error


@contextlib.contextmanager
def _confined(step: PipelineStep, unit: Unit) -> Iterator[faults.Attempt]:
    """Confine a failure to this graph, if nothing of it was rewritten yet: graphs nested in it or around it go on."""
    with located(step.name, unit):
        if step.costs_all or unit.is_rewritten:
            yield faults.Attempt()
            return
        with faults.confined(unit.log, step.name, unit.name or "the graph") as attempt:
            yield attempt


@contextlib.contextmanager
def _dumped(step: PipelineStep, unit: Unit, dumper: Dumper) -> Iterator[None]:
    with dumper.around(step.name, unit.graph_module):
        yield
    shown = None if step.shows is None else step.shows(unit)
    if shown is not None:
        dumper.graph(step.name, shown)
