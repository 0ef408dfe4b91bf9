"""Reports of attention that Dynamo leaves to Python: no graph has it, and the backend may not be called at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attn_compiler.compiling.attempts import StepFailed, options_of, step
from attn_compiler.reporting.publishing import publish
from attn_compiler.reporting.report import Report
from attn_compiler.torch_private import observe as torch_observe
from attn_compiler.torch_private.observe import Break


def watch(backend: Callable[..., Any]) -> None:
    """Publish a report of each such attention in code compiled for this backend."""
    torch_observe.watch_breaks(backend, _tell)


def report(found: Break) -> Report | None:
    """Return a report with the miss alone; None if no attention is left to Python."""
    from attn_compiler.passes.matching import left_to_python

    miss = left_to_python.find(found)
    if miss is None:
        return None
    return Report(graph=found.graph, model=torch_observe.model_name(), target="Python, no graph", misses=(miss,))


def _tell(found: Break) -> None:
    # Dynamo is at the end of a frame, which may have no graph.
    own = options_of(found.settings)
    try:
        with step("look for attention that is left to Python"):
            said = report(found)
            if said is not None:
                publish(said, own)
    except StepFailed as failed:
        failed.warn(own, found.graph, "the model runs, and the report may miss it")
