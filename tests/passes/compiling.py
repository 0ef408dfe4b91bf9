"""Compile a function with the backend and keep what a test wants to know: results, reports, and the rewritten graphs."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import fx

import attn_compiler
from attn_compiler.passes.graph import mirror, unit
from attn_compiler.passes.graph.calls import target_name
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.reasons.errors import AttnCompilerWarning
from attn_compiler.reporting.facts import SiteReport
from attn_compiler.reporting.report import Report
from attn_compiler.torch_private import compat as torch_compat, inductor as torch_inductor, tracing as torch_tracing

#: Of all lowerings one, whatever the measured priorities of this machine say. The rewritten graph runs op by op, as the passes left it:
#: what AOTAutograd and Inductor make of it is asked where that matters, and takes a third of the time.
OPTIONS: dict[str, Any] = {"inner": "eager", "strict": True, "lowerings": ["sdpa_cpu_flash"]}
CPU_FLASH = "_scaled_dot_product_flash_attention_for_cpu"

#: What no graph holds any more once its attention is a kernel.
WRITTEN_OUT = frozenset(
    "matmul bmm baddbmm einsum softmax repeat_interleave repeat tile masked_fill scaled_dot_product_attention".split()
)


@dataclass(kw_only=True)
class Graph:
    """One rewritten graph, as the inner compiler got it. calls: bare names of what it calls, bodies included. text: its code."""

    calls: list[str]
    text: str


@dataclass(kw_only=True)
class Compiled:
    """A compiled function, and every graph that was compiled for it so far."""

    function: Callable[..., Any]
    graphs: list[Graph] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _recording(self.graphs):
            before = len(attn_compiler.reports())
            try:
                return self.function(*args, **kwargs)
            finally:
                self.reports.extend(attn_compiler.reports()[before:])

    @property
    def report(self) -> Report:
        """The one report; fails if there were several graphs or none."""
        (report,) = self.reports
        return report

    @property
    def site(self) -> SiteReport:
        """The one distinct site of the one graph."""
        assert not self.report.misses, self.report.misses
        (site,) = self.report.sites
        return site

    @property
    def text(self) -> str:
        return "\n".join(graph.text for graph in self.graphs)

    @property
    def calls(self) -> list[str]:
        return [call for graph in self.graphs for call in graph.calls]


def compiled(function: Callable[..., Any], *, dynamic: bool | None = None, **options: Any) -> Compiled:
    """torch.compile with our backend, from an empty cache. options: on top of OPTIONS; `lowering` in place of its lowerings."""
    torch._dynamo.reset()
    attn_compiler.reset()
    chosen = {**OPTIONS, **options}
    if "lowering" in options:
        del chosen["lowerings"]
    return Compiled(function=torch.compile(function, backend="attn_compiler", dynamic=dynamic, options=chosen))


@contextlib.contextmanager
def _recording(graphs: list[Graph]) -> Iterator[None]:
    compile_with_backend = torch_inductor.compile_with_backend

    def record(name: str, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        calls = [target_name(n) for m in torch_compat.graph_modules(gm) for n in m.graph.nodes if is_call(n)]
        graphs.append(Graph(calls=calls, text=str(gm.graph.python_code("self").src)))
        return compile_with_backend(name, gm, example_inputs)

    with mock.patch.object(torch_inductor, "compile_with_backend", record):
        yield


def is_call(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method")


def mirror_of(function: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> Mirror:
    """The mirror of the one graph that Dynamo captures of `function`; nothing is left out of it."""
    return captured(function, *args, dynamic=dynamic)[1]


def captured(function: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> tuple[fx.GraphModule, Mirror]:
    """The one graph that Dynamo captures of `function`, and its mirror."""
    found: list[tuple[fx.GraphModule, Mirror]] = []

    def backend(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        mode = torch_tracing.fake_mode_of_values(unit.examples(gm))
        assert mode is not None
        with torch_tracing.tracing_in(mode):
            found.append((gm, mirror.build(gm)))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)(*args)
    (pair,) = found
    return pair


def mark(tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Make every dimension of one of these sizes dynamic; specialising it is then an error of Dynamo's."""
    for dim, size in enumerate(tensor.shape):
        if size in sizes:
            torch._dynamo.mark_dynamic(tensor, dim)
    return tensor


def warned(action: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What an action returns, and our warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = action()
    return result, [str(w.message) for w in caught if issubclass(w.category, AttnCompilerWarning)]
