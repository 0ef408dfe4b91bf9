"""What a few small models become when they are compiled on a CPU, and what that costs: python -m tests.gate.captures [NAME ...]

Prints JSON. In a process of its own: what was imported and compiled before changes what the passes call.

graphs, sites, misses, lowerings, copies: of the reports. nodes: of Dynamo's graphs. mirrored: of their mirrors. calls: of Python functions
within the passes. share: of CPU time, the passes' beside Dynamo's tracing, in a second compilation.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import fx

import attn_compiler
from attn_compiler import passes
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.pipeline import running, steps
from benchmarks import harness, models

#: (family, attention implementation, scenario) of benchmarks.models, in their small sizes
MODELS = (
    ("llama", "sdpa", "prefill_padded"),
    ("llama", "eager", "train_padded"),
    ("gpt2", "eager", "prefill_cache"),
    ("bert", "sdpa", "train_padded"),
    ("t5", "eager", "prefill"),
)
_OPTIONS: dict[str, Any] = {"inner": "eager", "strict": True, "cache_rewrites": False}


@dataclass(kw_only=True)
class Watched:
    """nodes: of graphs as Dynamo hands them over. mirrored: of mirrors. calls: of Python functions. seconds: CPU time in the passes."""

    nodes: int = 0
    mirrored: int = 0
    calls: int = 0
    seconds: float = 0.0


@contextmanager
def watching(*, counts_calls: bool) -> Iterator[Watched]:
    """What the passes do in here. counts_calls: slows them, so that their seconds say nothing."""
    watched, rewrite, build = Watched(), passes.rewrite, Mirror.__init__

    def counted(gm: fx.GraphModule, *given: Any, **named: Any) -> Any:
        watched.nodes += len(gm.graph.nodes)
        before = sys.getprofile()
        begin = time.process_time()
        if counts_calls:
            sys.setprofile(_counter(watched))
        try:
            return rewrite(gm, *given, **named)
        finally:
            sys.setprofile(before)
            watched.seconds += time.process_time() - begin

    def built(self: Mirror, graph: fx.Graph, *given: Any) -> None:
        watched.mirrored += len(graph.nodes)
        build(self, graph, *given)

    with mock.patch.object(passes, "rewrite", counted), mock.patch.object(Mirror, "__init__", built):
        yield watched


def _counter(watched: Watched) -> Callable[..., None]:
    def count(frame: Any, event: str, argument: Any) -> None:
        watched.calls += event == "call"

    return count


def capture(name: str, implementation: str, scenario: str) -> dict[str, str]:
    """One model compiled twice: once to count, once to see how long it takes."""
    way = models.SCENARIOS[scenario]
    model = models.build(name, "small", implementation).train(way.training)
    given = models.example_inputs(name, "small", way)
    with watching(counts_calls=True) as counted:
        _compile(model, given, way.training)
    reports = attn_compiler.reports()
    chosen = Counter(site.decision.lowering for report in reports for site in report.sites for _ in site.modules)
    copies = [copy for report in reports for site in report.sites for copy in site.copies]
    with watching(counts_calls=False) as timed:
        begin = time.process_time()
        _compile(model, given, way.training)
        rest = time.process_time() - begin - timed.seconds
    return {
        "graphs": str(len(reports)),
        "sites": str(reports.num_sites),
        "misses": str(reports.num_misses),
        "lowerings": ", ".join(f"{lowering} x{count}" for lowering, count in sorted(chosen.items())),
        "copies": ", ".join(f"{copy.operand} {copy.bytes} bytes" for copy in copies) or "none",
        "nodes": str(counted.nodes),
        "mirrored": str(counted.mirrored),
        "calls": str(counted.calls),
        "share": f"{timed.seconds / rest:.3f}",
    }


def _compile(model: torch.nn.Module, given: dict[str, Any], training: bool) -> None:
    torch._dynamo.reset()
    attn_compiler.reset()
    run: Any = torch.compile(model, backend="attn_compiler", dynamic=False, options=_OPTIONS)
    harness.make_step(run, given, training=training)()


def main(names: list[str]) -> None:
    # Else the first model's passes would count what they import.
    running.load(steps.PIPELINE)
    found = {" ".join(each): capture(*each) for each in MODELS if not names or each[0] in names}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
