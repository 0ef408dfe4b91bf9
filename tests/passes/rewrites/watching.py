"""What rewriting made of graphs, written out to be compared: by the passes, and done again from a cache."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.utils import _pytree as pytree

from attn_compiler import passes
from attn_compiler.passes.pipeline import running
from attn_compiler.passes.pipeline.step import PipelineStep
from attn_compiler.reporting.report import Report
from attn_compiler.torch_private import compat as torch_compat, symbols as torch_symbols, tracing as torch_tracing


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One graph. nodes: of the graph and of its bodies. ran: the passes that ran. guards: of symbolic sizes."""

    nodes: list[dict[str, Any]]
    code: list[str]
    report: Report
    known: Any
    ran: tuple[str, ...]
    guards: list[str]


@contextlib.contextmanager
def watched() -> Iterator[list[Seen]]:
    """Every graph that is rewritten inside, as it came out."""
    found: list[Seen] = []
    ran: list[str] = []
    rewrite = passes.rewrite

    call = running.call

    def noting(step: PipelineStep, values: running.StepValues) -> Any:
        if step.on == "unit":
            ran.append(step.name)
        return call(step, values)

    def watching(gm: fx.GraphModule, *args: Any, **named: Any) -> passes.Rewritten:
        ran.clear()
        rewritten = rewrite(gm, *args, **named)
        found.append(
            Seen(
                nodes=described(gm),
                code=[module.graph.python_code("self").src for module in torch_compat.graph_modules(gm)],
                report=rewritten.report,
                known=rewritten.known,
                ran=tuple(ran),
                guards=guards(gm),
            )
        )
        return rewritten

    with mock.patch.object(passes, "rewrite", watching), mock.patch.object(running, "call", noting):
        yield found


def guards(gm: fx.GraphModule) -> list[str]:
    """All that calls of a graph have to hold, each once, and what is known of symbols."""
    values = [
        node.meta.get("example_value") for module in torch_compat.graph_modules(gm) for node in module.graph.nodes
    ]
    mode = torch_tracing.fake_mode_of_values(values)
    if mode is None or mode.shape_env is None:
        return []
    return [
        *sorted({str(guard) for guard in torch_symbols.guards(mode.shape_env)}),
        str(torch_symbols.knowledge(mode.shape_env)),
    ]


def described(gm: fx.GraphModule) -> list[dict[str, Any]]:
    """All that is said by the nodes of a graph and its bodies. Memory goes by when it is met first."""
    memory: dict[int, int] = {}
    return [
        {
            "name": node.name,
            "op": node.op,
            "target": node.target,
            "given": _text((node.args, node.kwargs)),
            "value": pytree.tree_map(lambda x: _value(x, memory), node.meta.get("example_value", "nothing")),
            "from": [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()],
            "line": node.meta.get("stack_trace"),
            "says": sorted(node.meta),
        }
        for module in torch_compat.graph_modules(gm)
        for node in module.graph.nodes
    ]


def _text(arguments: Any) -> str:
    """Every number with its type: 1, 1.0 and True are different arguments."""
    leaves, spec = pytree.tree_flatten(fx.node.map_arg(arguments, lambda n: f"%{n.name}"))
    return f"{spec} {[(type(x).__name__, str(x)) for x in leaves]}"


def _value(x: Any, memory: dict[int, int]) -> Any:
    if isinstance(x, torch.SymInt):
        return str(x)  # To compare two would be a guard.
    if not isinstance(x, torch.Tensor):
        return x
    sizes = [str(size) for size in (*x.shape, *x.stride(), x.storage_offset())]
    # What is made on the way and erased again has no number.
    where = memory.setdefault(torch_compat.without_transforms(x).untyped_storage()._cdata, len(memory))
    return type(x).__name__, x.dtype, x.device, x.requires_grad, *sizes, where


def without_times(report: Report) -> dict[str, Any]:
    """A report but for what differs from one run to the next."""
    told = report.to_dict()
    return {name: x for name, x in told.items() if name not in ("seconds", "from_cache", "kernels", "graph")}
