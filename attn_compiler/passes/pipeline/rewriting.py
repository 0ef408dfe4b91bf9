"""The backend's entry point: rewrite one graph in place with the bodies nested in it, and tell what was done, whatever fails."""

from __future__ import annotations

import dataclasses
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torch import fx

from attn_compiler.options.options import Options
from attn_compiler.passes.graph.onward import Outcome
from attn_compiler.passes.graph.unit import Unit
from attn_compiler.passes.pipeline import running
from attn_compiler.passes.pipeline.work import Work
from attn_compiler.reasons.errors import AttnCompilerWarning
from attn_compiler.reporting.report import Report
from attn_compiler.spec.target import Target
from attn_compiler.torch_private import collector, compat as torch_compat, inductor as torch_inductor
from attn_compiler.torch_private.known_masks import Known
from attn_compiler.torch_private.snapshots import Snapshot
from attn_compiler.torch_private.store import Store

Kind = TypeVar("Kind", bound=Outcome)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewritten:
    """The outcome for one graph. originals: each unit's graph as the model made it. failed: nothing was rewritten.

    snapshot: the graph before, shared with `originals`; None: it is unchanged. known: what is known of the graph's outputs, by index.
    read: indices of inputs that may be known, and that the graph reads and does not write to.
    strict: the user's option.
    """

    report: Report
    units: tuple[Unit, ...]
    originals: tuple[fx.Graph, ...]
    failed: bool
    snapshot: Snapshot | None = None
    known: tuple[tuple[int, Known], ...] = ()
    read: tuple[int, ...] = ()
    strict: bool = False

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """Return the outcomes of an option that rewrites graphs."""
        return tuple(unit.outcome for unit in self.units if unit.outcome is not None)

    def outcome(self, kind: type[Kind]) -> Kind | None:
        """Return the first outcome of this kind."""
        return next((one for one in self.outcomes if isinstance(one, kind)), None)

    def take_back(self, gm: fx.GraphModule) -> None:
        """Restore the original graph, whatever a compiler did to it in the meantime."""
        for outcome in self.outcomes:
            outcome.give_up()
        if self.snapshot is not None:
            from attn_compiler.passes.writing import lower

            self.snapshot.restore()
            lower.take_back(gm, self.units)


def run_pipeline(gm: fx.GraphModule, options: Options, targets: dict[str, Target] | None = None) -> Report:
    """Rewrite as `rewrite` does, and return the report alone."""
    return rewrite(gm, options, targets).report


def rewrite(
    gm: fx.GraphModule, options: Options, targets: dict[str, Target] | None = None, store: Store | None = None,
    start: Callable[[], object] = object,
) -> Rewritten:  # fmt: skip
    """Rewrite `gm` and the bodies nested in it in place, and say what was done.

    store: where rewrites are kept; with None the passes always run, and nothing is kept. start: called before they run.
    targets: by device type, for tests; a device that is missing there is this machine.
    A failure at one site costs that site. After any other failure every graph is restored, and the report says so. There is one warning
    for each distinct failure; with options.strict it raises PassFailed (or VerifyFailed) instead.
    """
    failure: str | None = None
    work = Work(gm=gm, options=options, targets=dict(targets or {}), store=store, start=start)
    torch_inductor.deepen_stack()
    try:
        # Garbage collection of all that a process has loaded would take a third of the steps' time.
        with collector.paused():
            report = _run(work)
    except Exception as error:
        from attn_compiler.passes.writing import lower, summary

        if work.snapshot is not None:
            work.snapshot.restore()
        lower.take_back(gm, work.units)
        for unit in work.units:
            if unit.outcome is not None:
                unit.outcome.give_up()
                unit.outcome = None
        if torch_compat.starts_over(error) or options.strict:
            raise
        failure = f"{error}\n{''.join(traceback.format_exception(error))}"
        warnings.warn(str(error), AttnCompilerWarning, stacklevel=2)
        report = summary.of_failure(gm, work.decided_for, work.seconds, failure)
    report = dataclasses.replace(report, dumped=work.dumper.directory, seconds=tuple(work.seconds.items()))
    work.dumper.report(report)
    originals = tuple(work.snapshot.graph(unit.graph_module) for unit in work.units) if work.snapshot else ()
    return Rewritten(
        report=report,
        units=tuple(work.units),
        originals=originals,
        failed=failure is not None,
        snapshot=None if failure is not None else work.snapshot,
        known=work.known,
        read=_still_read(work),
        strict=options.strict,
    )


def _run(work: Work) -> Report:
    running.run_steps(work)
    if work.report is None:
        raise ValueError("no step gave a report")
    return work.report


def _still_read(work: Work) -> tuple[int, ...]:
    """Return the indices of inputs that may be known and that the rewritten graph reads: it reads few of the masks that are proved."""
    read = () if work.border is None else work.border.read
    if any(unit.outcome is not None and unit.outcome.reads_all for unit in work.units):
        return read
    inputs = work.gm.graph.find_nodes(op="placeholder")
    return tuple(place for place in read if inputs[place].users)
