"""The state of a rewriting while it goes on: results of its steps, the time of each, and the origin of an exception."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import fx

from attn_compiler.options.options import Options
from attn_compiler.passes.graph import faults
from attn_compiler.passes.graph.unit import Unit
from attn_compiler.passes.recovering.reading.readers import Readers
from attn_compiler.reasons.errors import AttnCompilerError
from attn_compiler.reporting.dump import Dumper
from attn_compiler.reporting.report import Report
from attn_compiler.spec.target import Target
from attn_compiler.torch_private import compat as torch_compat
from attn_compiler.torch_private.known_masks import Known
from attn_compiler.torch_private.snapshots import Snapshot
from attn_compiler.torch_private.store import Store

if TYPE_CHECKING:
    from attn_compiler.passes.recovering.borders import Border
    from attn_compiler.passes.rewrites.remembered import Remembered


@dataclass(kw_only=True)
class Work:
    """One graph module on its way through the steps, with the bodies nested in it.

    gm, options, store, start: as `rewrite` is given them. targets: by device type; completed by machine.
    seconds, dumper, readers: of all steps.
    units: the graphs that steps work on. snapshot: the graph as it came; None for one that no step changes.
    border: what is known on both sides of the graph. remembered: where the rewrite is kept.
    results: of other steps, by name; PIPELINE says who gives and who takes each.
    known: as in `Rewritten`. warned: the warnings of faults. report: the final report.
    """

    gm: fx.GraphModule
    options: Options
    targets: dict[str, Target] = field(default_factory=dict)
    store: Store | None = None
    start: Callable[[], object] = object
    seconds: dict[str, float] = field(default_factory=dict)
    dumper: Dumper = field(default_factory=lambda: Dumper(directory=None, traced=False))
    readers: Readers = field(default_factory=Readers)
    units: list[Unit] = field(default_factory=list)
    snapshot: Snapshot | None = None
    border: Border | None = None
    remembered: Remembered | None = None
    results: dict[str, Any] = field(default_factory=dict)
    known: tuple[tuple[int, Known], ...] = ()
    warned: tuple[str, ...] = ()
    report: Report | None = None

    @property
    def decided_for(self) -> dict[str, Target]:
        """Return the machines of the graph's attentions; none without any."""
        return self.targets if self.units else {}


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
