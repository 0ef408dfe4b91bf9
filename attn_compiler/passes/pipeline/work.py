"""The state of a rewriting while it goes on: results of its steps, the time of each, and the origin of an exception."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import fx

from attn_compiler.options.options import Options
from attn_compiler.passes.graph import faults
from attn_compiler.passes.graph.unit import Unit
from attn_compiler.passes.recovering.borders import Border
from attn_compiler.passes.recovering.reading.readers import Readers
from attn_compiler.passes.rewrites.remembered import Remembered
from attn_compiler.reasons.errors import AttnCompilerError
from attn_compiler.reporting.dump import Dumper
from attn_compiler.reporting.report import Report
from attn_compiler.spec.target import Target
from attn_compiler.torch_private import compat as torch_compat
from attn_compiler.torch_private.known_masks import Known
from attn_compiler.torch_private.snapshots import Snapshot
from attn_compiler.torch_private.store import Store

if TYPE_CHECKING:
    from attn_compiler.passes.context_parallel.spread import Spread
    from attn_compiler.passes.matching.unseen import Unseen
    from attn_compiler.passes.spelling.checkpoints import Inlined
    from attn_compiler.passes.unpad.packing import Trial
    from attn_compiler.passes.writing.linear_calls import LinearSite


@dataclass(kw_only=True)
class Work:
    """One graph module on its way through the steps, with the bodies nested in it.

    gm, options, store: as `rewrite` is given them. targets: by device type; completed by machine.
    seconds, dumper, readers: of all steps.
    units: the graphs that steps work on. snapshot: the graph as it came. inlined: bodies of checkpoints that stand in the graph for now.
    border: what is known on both sides of the graph. memory: where the rewrite is kept. unseen: misses that no pattern starts from.
    trial, failed: for the current unit, a rewritten graph that has to be judged, and the exception that looking at it raised.
    padded: beside a packed graph, the model's own, which gets kernels as any graph does.
    has_linear_calls, linear: whether there were calls of linear attention, and their outcome.
    known: as in `Rewritten`. warned: the warnings of faults. report: the final report.
    """

    gm: fx.GraphModule
    options: Options
    targets: dict[str, Target] = field(default_factory=dict)
    store: Store | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    dumper: Dumper = field(default_factory=lambda: Dumper(directory=None, traced=False))
    readers: Readers = field(default_factory=Readers)
    units: list[Unit] = field(default_factory=list)
    snapshot: Snapshot | None = None
    inlined: list[Inlined] | None = None
    border: Border | None = None
    memory: Remembered | None = None
    unseen: Unseen | None = None
    trial: Spread | Trial | None = None
    failed: Exception | None = None
    padded: Unit | None = None
    has_linear_calls: bool = False
    linear: tuple[LinearSite, ...] = ()
    known: tuple[tuple[int, Known], ...] = ()
    warned: tuple[str, ...] = ()
    report: Report | None = None

    @property
    def decided_for(self) -> dict[str, Target]:
        """Return the machines of the graph's attentions; none without any."""
        return self.targets if self.units else {}

    def begin_anew(self) -> None:
        """Restore the graph for another attempt. Its nodes are others then, so nothing is looked up or kept."""
        if self.snapshot is not None:
            self.snapshot.restore()
        # The snapshot's graphs are given away, and the steps will change them: the next attempt takes copies of its own.
        self.snapshot = self.store = self.memory = None


@contextlib.contextmanager
def timed(name: str, seconds: dict[str, float]) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start


@contextlib.contextmanager
def located(name: str, unit: Unit | None) -> Iterator[None]:
    """Raise an exception of the block as one that names the pass and the module."""
    try:
        yield
    except AttnCompilerError:
        raise
    except Exception as error:
        if torch_compat.starts_over(error):
            raise
        raise faults.failed(name, (unit and (unit.log.current or unit.name)) or "the graph", error) from error
