"""The pipeline: its passes in order, what each needs and gives, and `run_pipeline`, which carries it out on one graph.

A pass is a function (unit, mirror) -> None on one GraphModule. What fails on one site, or one call, leaves that as it was (faults.py);
what fails otherwise leaves the model's graph as it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from attn_compiler import torch_compat, torch_tracing
from attn_compiler.codes import Code
from attn_compiler.decisions import Reason
from attn_compiler.dump import Dumper
from attn_compiler.errors import AttnCompilerError, AttnCompilerWarning
from attn_compiler.meanings import Known
from attn_compiler.options import Options
from attn_compiler.passes import (
    body_inputs,
    borders,
    buffers,
    context_parallel,
    dtensors,
    expand,
    faults,
    flex,
    keys_last,
    layout,
    library_calls,
    lower,
    match,
    recover,
    remembered,
    select,
    summary,
    unpad,
    verify,
)
from attn_compiler.passes.borders import Border
from attn_compiler.passes.mirror import Mirror
from attn_compiler.passes.remembered import Kept, Memory
from attn_compiler.passes.unit import Unit, module_path, units, unsupported_tensor
from attn_compiler.passes.unpad.outcome import Packed
from attn_compiler.report import Report
from attn_compiler.rewrites.store import Store
from attn_compiler.target import Target
from attn_compiler.torch_snapshots import Snapshot

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """needs, gives: facts that must be there before it runs, and that are there after. rewrites: changes the Dynamo graph."""

    name: str
    run: Callable[[Unit, Mirror], None]
    needs: frozenset[str]
    gives: frozenset[str]
    rewrites: bool = False


def _expand(unit: Unit, _: Mirror | None) -> None:
    def trying(call: fx.Node) -> contextlib.AbstractContextManager[object]:
        return faults.confined(unit, "expand", module_path(call))

    unit.expanded = expand.run(unit.graph_module, trying)
    shared = dtensors.run(unit.graph_module, unit.mode, trying)
    unit.local.update(shared.local)
    unit.untried.update(shared.left)
    found = flex.run(unit.graph_module, trying)
    unit.spelled.extend(found.spelled)
    unit.untried.update(found.left)
    of_libraries = library_calls.run(unit.graph_module, trying)
    unit.spelled.extend(of_libraries.spelled)
    unit.untried.update(of_libraries.left)
    unit.moved = keys_last.run(unit.graph_module, unit.mode, trying)


def _mirror(unit: Unit, _: Mirror | None) -> None:
    unit.longer = context_parallel.longer(unit)
    unit.mirrored()


def _give_back(unit: Unit, _: Mirror | None) -> None:
    flex.give_back(unit.graph_module, unit.spelled)


def _facts(*names: str) -> frozenset[str]:
    return frozenset(names)


PIPELINE: tuple[Pass, ...] = (
    Pass(name="expand", run=_expand, needs=_facts(), gives=_facts("plain calls"), rewrites=True),
    Pass(name="mirror", run=_mirror, needs=_facts("plain calls"), gives=_facts("mirror")),
    Pass(name="match", run=match.run, needs=_facts("mirror"), gives=_facts("sites", "misses")),
    Pass(name="recover", run=recover.run, needs=_facts("sites"), gives=_facts("specs")),
    Pass(
        name="context_parallel",
        run=context_parallel.run,
        needs=_facts("mirror", "specs"),
        gives=_facts("whole sequences"),
        rewrites=True,
    ),
    Pass(name="unpad", run=unpad.run, needs=_facts("mirror", "specs", "whole sequences"), gives=_facts("real tokens")),
    Pass(name="select", run=select.run, needs=_facts("specs", "real tokens"), gives=_facts("decisions")),
    Pass(name="layout", run=layout.run, needs=_facts("specs", "decisions"), gives=_facts("copies")),
    Pass(
        name="lower",
        run=lower.run,
        needs=_facts("mirror", "decisions", "copies"),
        gives=_facts("kernels"),
        rewrites=True,
    ),
    Pass(name="give_back", run=_give_back, needs=_facts("kernels"), gives=_facts("own calls"), rewrites=True),
    Pass(name="verify", run=verify.run, needs=_facts("kernels", "own calls"), gives=_facts("checked graph")),
)


def check_contracts(pipeline: tuple[Pass, ...]) -> None:
    """Raise ValueError if a pass needs a fact that no pass before it gives."""
    known: set[str] = set()
    for step in pipeline:
        missing = step.needs - known
        if missing:
            raise ValueError(f"the pass {step.name!r} needs {sorted(missing)}, which nothing before it gives")
        known |= step.gives


check_contracts(PIPELINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewritten:
    """What became of one graph. originals: each unit's graph as the model made it. failed: nothing was rewritten. snapshot: how the graph
    came; None if it is still so. It shares its graphs with `originals`. known: what is known of the graph's outputs, by their places.
    """

    report: Report
    units: tuple[Unit, ...]
    originals: tuple[fx.Graph, ...]
    failed: bool
    snapshot: Snapshot | None = None
    known: tuple[tuple[int, Known], ...] = ()

    @property
    def packed(self) -> Packed | None:
        """The packed graph, where padding was taken out."""
        return next((unit.unpadded for unit in self.units if isinstance(unit.unpadded, Packed)), None)

    @property
    def further_inputs(self) -> tuple[Any, ...]:
        """Fake values of what the rewritten graph takes besides the model's inputs."""
        return () if self.packed is None else self.packed.inputs

    def take_back(self, gm: fx.GraphModule) -> None:
        """Make the graph as it came, whatever a compiler did to it in the meantime."""
        if self.snapshot is not None:
            self.snapshot.restore()
            buffers.discard(gm, self.units)


def run_pipeline(gm: fx.GraphModule, options: Options, targets: dict[str, Target] | None = None) -> Report:
    """As `rewrite`, for those who want the report alone."""
    return rewrite(gm, options, targets).report


def rewrite(
    gm: fx.GraphModule, options: Options, targets: dict[str, Target] | None = None, store: Store | None = None
) -> Rewritten:
    """Rewrite `gm` and the bodies nested in it in place, and say what was done.

    store: where rewrites are kept; with None the passes always run, and nothing is kept.
    targets: by device type, for tests; a device that is missing there is this machine.
    What fails at one site costs that site; whatever else fails, every graph is left as it came and the report says so. There is one
    warning for each distinct failure; with options.strict it raises PassFailed (or VerifyFailed) instead.
    """
    failure: str | None = None
    work = _Work(seconds=dict.fromkeys((step.name for step in PIPELINE), 0.0))
    try:
        with _without_collector():
            report = _rewrite(gm, options, targets or {}, work, store)
    except Exception as error:
        if work.snapshot is not None:
            work.snapshot.restore()
        buffers.discard(gm, work.units)
        if torch_compat.starts_over(error) or options.strict:
            raise
        failure = f"{error}\n{''.join(traceback.format_exception(error))}"
        warnings.warn(str(error), AttnCompilerWarning, stacklevel=2)
        report = summary.of_failure(gm, work.units, work.seconds, failure)
    report = dataclasses.replace(report, dumped=work.dumper.directory)
    work.dumper.report(report)
    originals = tuple(work.snapshot.graph(unit.graph_module) for unit in work.units) if work.snapshot else ()
    return Rewritten(
        report=report,
        units=tuple(work.units),
        originals=originals,
        failed=failure is not None,
        snapshot=None if failure is not None else work.snapshot,
        known=work.known,
    )


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Without Python's cyclic collector: what the passes make is needed to their end, and looking through it and all that a process has
    loaded takes a third of their time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(kw_only=True)
class _Work:
    """What is there of a rewriting when something fails."""

    seconds: dict[str, float]
    units: list[Unit] = field(default_factory=list)
    snapshot: Snapshot | None = None
    known: tuple[tuple[int, Known], ...] = ()
    dumper: Dumper = field(default_factory=lambda: Dumper(directory=None, traced=False))


def _rewrite(
    gm: fx.GraphModule, options: Options, targets: dict[str, Target], work: _Work, store: Store | None
) -> Report:
    with _located("units", None):
        work.units = units(gm, options, targets)
    if work.units:
        with _located("snapshot", None):
            work.snapshot = Snapshot(gm)
    with _located("borders", None):
        border = borders.reached(gm, work.units, options)
    if store is None or (not work.units and border.root is None):
        return _run_passes(gm, options, work, border)
    work.seconds[_CACHE] = 0.0
    with _timed(_CACHE, work.seconds):
        memory = remembered.begin(gm, options, border, store)
        kept = memory.find()
        found = None if kept is None else _again(memory, kept, work)
    if found is not None:
        return dataclasses.replace(found, seconds=((_CACHE, work.seconds[_CACHE]),))
    if kept is not None:
        # The nodes are others since the graph was made again what it was.
        return _rewrite(gm, options, targets, work, None)
    report = _run_passes(gm, options, work, border)
    with _timed(_CACHE, work.seconds):
        report = memory.keep(report, work.known, work.units)
    return dataclasses.replace(report, seconds=tuple(work.seconds.items()))


#: what looking for what was done before, doing it again, and keeping it takes, among the seconds of passes
_CACHE = "cache"


def _again(memory: Memory, kept: Kept, work: _Work) -> Report | None:
    """The report of what was done again; None, and graphs as they came, if it does not fit."""
    try:
        report = memory.apply(kept)
    except Exception as error:
        if torch_compat.starts_over(error):
            raise
        # Whatever is wrong with a file, the passes need none.
        log.debug("what was kept of graph %s does not fit: %r", torch_compat.graph_name(), error)
        if work.snapshot is not None:
            work.snapshot.restore()
        return None
    work.known, work.units = kept.crossing.known, []
    return report


def _run_passes(gm: fx.GraphModule, options: Options, work: _Work, border: Border) -> Report:
    work.dumper = Dumper.create(options.dump_dir if work.units else None, torch_compat.graph_name())
    for unit in work.units:
        _run(unit, work.dumper, work.seconds)
        context_parallel.check_not_left(unit)
    with _located("buffers", None):
        buffers.install(gm, work.units)
    with _located("body inputs", None):
        body_inputs.pass_on(work.units)
    with _located("borders", None):
        work.known = borders.crossed(border)
    warned = faults.warned(work.units)
    with _located("report", None):
        return summary.report(gm, work.units, work.seconds, faults=warned)


def _run(unit: Unit, dumper: Dumper, seconds: dict[str, float]) -> None:
    unsupported = unsupported_tensor(unit.graph_module)
    if unsupported is not None:
        unit.left_alone = Reason(
            code=Code.CLOSED_TENSOR, rule="the graph's inputs are plain strided tensors", observed=unsupported
        )
        return
    if unit.in_autocast:
        unit.left_alone = Reason(
            code=Code.AUTOCAST_BODY,
            rule="an exported program's attention is outside of `with torch.autocast`",
            observed="wrap_with_autocast runs the graph that it is in",
            remedy="export the model in the dtype that autocast would have given (model.bfloat16()), without autocast",
        )
        return
    with torch_tracing.tracing_in(unit.mode):
        for step in PIPELINE:
            located = _located(step.name, unit)
            with _dumped(step, unit, dumper), _timed(step.name, seconds), located, _confined(step, unit) as attempt:
                step.run(unit, unit.mirror)  # type: ignore[arg-type]
            if attempt.reason is not None:
                unit.left_alone = attempt.reason
                unit.sites.clear()
                unit.misses.clear()
                unit.untried.clear()
                return
            if step.name == "match" and not unit.sites and context_parallel.asked(unit) is None:
                _give_back(unit, unit.mirror)
                return


def _confined(step: Pass, unit: Unit) -> contextlib.AbstractContextManager[faults.Attempt]:
    """Whatever fails of one graph before anything of it was rewritten costs that graph, and no other that is nested in it or around it."""
    if step.rewrites or unit.is_rewritten:
        return contextlib.nullcontext(faults.Attempt())
    return faults.confined(unit, step.name, unit.name or "the graph")


@contextlib.contextmanager
def _timed(name: str, seconds: dict[str, float]) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] += time.perf_counter() - start


@contextlib.contextmanager
def _dumped(step: Pass, unit: Unit, dumper: Dumper) -> Iterator[None]:
    with dumper.around(step.name, unit.graph_module):
        yield
    if step.name == "mirror" and unit.mirror is not None:
        dumper.graph("mirror", unit.mirror.graph)


@contextlib.contextmanager
def _located(name: str, unit: Unit | None) -> Iterator[None]:
    """Say which pass and which module an exception came from."""
    try:
        yield
    except AttnCompilerError:
        raise
    except Exception as error:
        if torch_compat.starts_over(error):
            raise
        raise faults.failed(name, (unit and (unit.current or unit.name)) or "the graph", error) from error
