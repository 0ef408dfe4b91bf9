"""What is done to a graph: what was kept of the same graph is done again, or the passes run (pipeline.py).

The rooms, in the order in which a graph goes through them:

    spelling/          other spellings become plain ones: FlexAttention, DTensors, checkpoints, calls of libraries
    graph/             what all steps work on: the unit, its mirror of ATen ops, sites, axes, views, values
    matching/          which nodes are an attention (patterns/), and what only looks like one
    recovering/        what masks and score changes mean (reading/ reads an element of each op's result), and the spec
    unpad/             takes padding out of the graph, which is matched again then
    context_parallel/  spreads a sequence over ranks, and the graph is matched again then
    writing/           the decision, layouts, the kernel's nodes, and the summary for the report
    rewrites/          what was done to a graph, kept on disk

What fails on one site, or one call, leaves that as it was (graph/faults.py);
what fails otherwise leaves the model's graph as it was.
"""

from __future__ import annotations

import dataclasses
import logging
import traceback
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import fx

from attn_compiler.options.options import Options
from attn_compiler.passes.graph.unit import Unit, units
from attn_compiler.passes.graph.work import Work, located, timed
from attn_compiler.passes.recovering import borders
from attn_compiler.passes.recovering.borders import Border
from attn_compiler.passes.rewrites import remembered
from attn_compiler.passes.rewrites.remembered import KeptFile, Remembered
from attn_compiler.reasons.errors import AttnCompilerWarning
from attn_compiler.reporting.report import Report
from attn_compiler.spec.target import Target
from attn_compiler.torch_private import collector, compat as torch_compat, inductor as torch_inductor
from attn_compiler.torch_private.meanings import Known
from attn_compiler.torch_private.snapshots import Snapshot
from attn_compiler.torch_private.store import Store

if TYPE_CHECKING:
    from attn_compiler.passes.unpad.outcome import Packed

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewritten:
    """What became of one graph. originals: each unit's graph as the model made it. failed: nothing was rewritten. snapshot: how the graph
    came; None if it is still so. It shares its graphs with `originals`. known: what is known of the graph's outputs, by their places.
    read: the places of inputs that may be known, and that the graph reads and does not write to.
    """

    report: Report
    units: tuple[Unit, ...]
    originals: tuple[fx.Graph, ...]
    failed: bool
    snapshot: Snapshot | None = None
    known: tuple[tuple[int, Known], ...] = ()
    read: tuple[int, ...] = ()

    @property
    def packed(self) -> Packed | None:
        """The packed graph, where padding was taken out."""
        if all(unit.unpadded is None for unit in self.units):
            return None
        from attn_compiler.passes.unpad.outcome import Packed

        return next((unit.unpadded for unit in self.units if isinstance(unit.unpadded, Packed)), None)

    @property
    def further_inputs(self) -> tuple[Any, ...]:
        """Fake values of what the rewritten graph takes besides the model's inputs."""
        return () if self.packed is None else self.packed.inputs

    def take_back(self, gm: fx.GraphModule) -> None:
        """Make the graph as it came, whatever a compiler did to it in the meantime."""
        if self.snapshot is not None:
            from attn_compiler.passes.writing import buffers

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
    work = Work()
    torch_inductor.deepen_stack()
    try:
        # Looking through all that a process has loaded takes a third of their time.
        with collector.paused():
            report = _rewrite(gm, options, targets or {}, work, store)
    except Exception as error:
        from attn_compiler.passes.writing import buffers, summary

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
        read=_still_read(gm, work),
    )


def _still_read(gm: fx.GraphModule, work: Work) -> tuple[int, ...]:
    """The places of `work.read` that the rewritten graph reads: most masks that are proved it does not."""
    if any(unit.unpadded is not None for unit in work.units):
        # The model's own graph may run in its place.
        return work.read
    inputs = gm.graph.find_nodes(op="placeholder")
    return tuple(place for place in work.read if inputs[place].users)


def _rewrite(
    gm: fx.GraphModule, options: Options, targets: dict[str, Target], work: Work, store: Store | None
) -> Report:
    if options.is_context_parallel:
        # Where a sequence is, and what masks read, is followed from a graph into the checkpoints that it calls, and back.
        with located("checkpoints", None):
            from attn_compiler.passes.spelling import checkpoints

            work.snapshot = Snapshot(gm)
            work.inlined = checkpoints.inline(gm)
    with located("units", None):
        work.units = units(gm, options, targets)
    if work.units and work.snapshot is None:
        with located("snapshot", None):
            work.snapshot = Snapshot(gm)
    with located("borders", None):
        border = borders.reached(gm, work.units, options)
        work.read = border.read
    if store is None or (not work.units and border.root is None):
        return _run_passes(gm, options, work, border)
    work.seconds[_CACHE] = 0.0
    with timed(_CACHE, work.seconds):
        memory = remembered.begin(gm, options, border, store)
        kept = memory.find()
        found = None if kept is None else _again(memory, kept, work)
    if found is not None:
        return dataclasses.replace(found, seconds=((_CACHE, work.seconds[_CACHE]),))
    if kept is not None:
        # The nodes are others since the graph was made again what it was.
        return _rewrite(gm, options, targets, work, None)
    report = _run_passes(gm, options, work, border)
    with timed(_CACHE, work.seconds):
        report = memory.keep(report, work.known, work.units)
    return dataclasses.replace(report, seconds=tuple(work.seconds.items()))


#: what looking for what was done before, doing it again, and keeping it takes, among the seconds of passes
_CACHE = "cache"


def _again(memory: Remembered, kept: KeptFile, work: Work) -> Report | None:
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
            # Its graphs are given away, and the passes will change them: the next attempt takes copies of its own.
            work.snapshot = None
        return None
    work.known, work.units = kept.crossing.known, []
    return report


def _run_passes(gm: fx.GraphModule, options: Options, work: Work, border: Border) -> Report:
    # Many modules: a process that finds all of its rewrites imports none of them.
    from attn_compiler.passes import pipeline

    return pipeline.run(gm, options, work, border)
