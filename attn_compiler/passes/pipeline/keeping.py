"""The steps around all others: a copy of the graph as it came, and its rewrite on disk."""

from __future__ import annotations

import logging

from torch import fx

from attn_compiler.passes.graph.onward import Onward
from attn_compiler.passes.graph.unit import Unit
from attn_compiler.passes.pipeline.work import Work
from attn_compiler.reporting.dump import timed
from attn_compiler.torch_private import compat as torch_compat
from attn_compiler.torch_private.op_library import NAMESPACE
from attn_compiler.torch_private.snapshots import Snapshot

log = logging.getLogger(__name__)
#: the entry, among the seconds of steps, for finding a kept rewrite, repeating it, and keeping one
_CACHE = "cache"


def snapshot(gm: fx.GraphModule, units: list[Unit]) -> Snapshot | None:
    """Copy a graph that has attention, or a call of ours that stands for the model's function."""
    nodes = (node for module in torch_compat.graph_modules(gm) for node in module.graph.nodes)
    return (
        Snapshot(gm) if units or any(getattr(node.target, "namespace", None) == NAMESPACE for node in nodes) else None
    )


def find(work: Work) -> Onward | None:
    """Repeat the rewrite that was kept of the same graph; without one, start what compiles kernels."""
    onward = _repeat(work)
    if work.snapshot is not None and onward is None:
        work.start()
    return onward


def _repeat(work: Work) -> Onward | None:
    if work.store is None or work.border is None or (work.snapshot is None and work.border.root is None):
        return None
    from attn_compiler.passes.rewrites import remembered

    with timed(_CACHE, work.seconds):
        work.remembered = remembered.begin(work.gm, work.options, work.border, work.store)
        kept = work.remembered.find()
        if kept is None:
            return None
        try:
            work.report = work.remembered.apply(kept)
        except Exception as error:
            if torch_compat.starts_over(error):
                raise
            # The steps can do without a kept file, whatever is wrong with it.
            log.debug("what was kept of graph %s does not fit: %r", torch_compat.graph_name(), error)
            if work.snapshot is not None:
                work.snapshot.restore()
            # The graph's nodes are others now, so nothing is looked up or kept. Its snapshot was given away: `units` leads to another.
            work.snapshot = work.store = work.remembered = None
            return Onward(step="units")
    work.known, work.units = kept.crossing.known, []
    return Onward(step=None)


def keep(work: Work) -> None:
    """Keep what the steps did, for the next process."""
    if work.remembered is not None and work.report is not None:
        with timed(_CACHE, work.seconds):
            work.report = work.remembered.keep(work.report, work.known, work.units)
