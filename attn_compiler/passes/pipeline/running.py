"""Execution of the steps: steps on the whole in their order, and each row of steps on units for one unit after the other."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

from attn_compiler.passes.graph import faults
from attn_compiler.passes.graph.unit import FoundSites, Unit
from attn_compiler.passes.pipeline import steps
from attn_compiler.passes.pipeline.step import Again, Onward, PipelineStep
from attn_compiler.passes.pipeline.work import Work, located, timed
from attn_compiler.reporting.dump import Dumper
from attn_compiler.torch_private import compat as torch_compat, tracing as torch_tracing


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
        with located(step.name, None):
            said = step.run(work)
        if said is None:
            at += 1
        elif said.step is None:
            return
        else:
            at = _place(step, said, pipeline)


def _run_on_units(row: tuple[PipelineStep, ...], work: Work) -> None:
    work.seconds = dict.fromkeys((step.name for step in row), 0.0) | work.seconds
    work.dumper = Dumper.create(
        work.options.dump_dir if work.units or work.has_linear_calls else None, torch_compat.graph_name()
    )
    for unit in work.units:
        with torch_tracing.tracing_in(unit.mode):
            _run_on(unit, row, work)


def _run_on(unit: Unit, row: tuple[PipelineStep, ...], work: Work) -> None:
    at, judge = 0, None
    while at < len(row):
        step, said = row[at], None
        is_on_trial = judge is not None and at < judge
        watched = _for_the_judge(work) if is_on_trial else _confined(step, unit)
        with _dumped(step, unit, work.dumper), timed(step.name, work.seconds), watched as attempt:
            said = step.run(work, unit)
        if attempt.reason is not None:
            unit.log.left_alone, unit.found = attempt.reason, FoundSites()
            return
        if judge is not None and is_on_trial and (said is not None or work.failed is not None):
            at = judge
        elif said is None:
            at += 1
        elif said.step is None:
            return
        else:
            at = _place(step, said, row)
            judge = _named(said.judge, row) if isinstance(said, Again) else None


def _place(step: PipelineStep, said: Onward | Again, row: tuple[PipelineStep, ...]) -> int:
    named = {said.step, said.judge} if isinstance(said, Again) else {said.step}
    if not named <= set(step.leads):
        raise ValueError(f"the pass {step.name!r} leads to {sorted(map(str, named))}, of which its line says nothing")
    return _named(str(said.step), row)


def _named(name: str, row: tuple[PipelineStep, ...]) -> int:
    return next(place for place, step in enumerate(row) if step.name == name)


@contextlib.contextmanager
def _for_the_judge(work: Work) -> Iterator[faults.Attempt]:
    """Catch any failure on a trial graph: its judge decides what to do about it."""
    try:
        yield faults.Attempt()
    except Exception as error:  # noqa: BLE001 (the judge raises it, or gives it as a reason)
        work.failed = error


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
