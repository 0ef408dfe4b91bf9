"""Calls of linear attention: each gets its lowering, or the model's own function back; and their rows for the report."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence

import torch
from torch import fx

from attn_compiler import lowerings
from attn_compiler.lowerings.graph_ops import linear_call
from attn_compiler.options.options import Options
from attn_compiler.passes.graph.unit import module_path
from attn_compiler.passes.matching.linear import deciding
from attn_compiler.passes.writing import linear_steps
from attn_compiler.reasons.decisions import Decision
from attn_compiler.reporting.dump import Dumper, timed
from attn_compiler.reporting.facts import LinearReport
from attn_compiler.spec.linear import LinearForm, LinearSpec
from attn_compiler.spec.target import Target
from attn_compiler.torch_private import compat as torch_compat


def are_in(gm: fx.GraphModule) -> bool:
    """Return whether the graph, or a body nested in it, has such a call."""
    return any(linear_call.calls(module.graph) for module in torch_compat.graph_modules(gm))


def lower(gm: fx.GraphModule, options: Options, seconds: dict[str, float], dumper: Dumper) -> tuple[LinearReport, ...]:
    """Replace each call by a lowering, chosen from the spec, the target and the options alone. Return rows of the report."""
    if not are_in(gm):
        return ()
    with timed("linear", seconds), dumper.around("linear", gm):
        return tuple(_row(*alike, modules) for alike, modules in _lowered(gm, options).items())


def _lowered(gm: fx.GraphModule, options: Options) -> dict[tuple[LinearSpec, Decision], list[str]]:
    """Replace the calls. Return the modules of all calls of one spec and decision."""
    found: dict[tuple[LinearSpec, Decision], list[str]] = {}
    for module in torch_compat.graph_modules(gm):
        calls = linear_call.calls(module.graph)
        shared = linear_steps.shared_memory(module.graph) if calls else frozenset()
        for node in calls:
            operands, text = node.args
            tensors = [x.meta["example_value"] for x in operands]  # type: ignore[union-attr]
            form = LinearForm.from_text(str(text))
            spec = deciding.call_of(form, tensors)
            decision = deciding.chosen(spec, options)
            if decision.lowering == "linear_triton":
                spec = dataclasses.replace(spec, form=dataclasses.replace(form, precision=options.linear_precision))
                node.args = (operands, spec.form.text)
            every = lowerings.linear_table.LINEAR_LOWERINGS
            # None: the model's own function.
            lowering = next((one for one in every if one.name == decision.lowering), None)
            step = None if lowering is None else lowering.step_op
            if step is None or not linear_steps.write_over(node, spec, step, shared):
                _replace(node, linear_call.linear_own if lowering is None else lowering.op)
            found.setdefault((spec, decision), []).append(module_path(node))
    return found


#: operands that do not affect the last state
_OF_OUT = frozenset({"q", "C", "D"})


def _replace(node: fx.Node, op: torch._ops.OpOverload) -> None:
    """Replace a call by a new node, which a kept rewrite records. If only the state is read, q has no gradient, as in the model."""
    operands, text = node.args
    reads = [user for user in node.users if user.target is not operator.getitem or (user.args[1] == 0 and user.users)]
    with node.graph.inserting_before(node):
        if not reads:
            roles = LinearForm.from_text(str(text)).roles
            pairs = zip(roles, operands, strict=True)  # type: ignore[arg-type]
            operands = [_detached(x) if role in _OF_OUT else x for role, x in pairs]
        new = node.graph.call_function(op, (operands, text))
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def _detached(x: fx.Node) -> fx.Node:
    found = x.graph.call_method("detach", (x,))
    found.meta = {**x.meta, "example_value": x.meta["example_value"].detach()}
    return found


def give_back(gm: fx.GraphModule) -> None:
    """Restore the model's own function in every call, for a graph that is compiled as the model made it."""
    for module in torch_compat.graph_modules(gm):
        linear_call.give_back(module.graph)


def _row(spec: LinearSpec, decision: Decision, modules: Sequence[str]) -> LinearReport:
    row = lowerings.linear_table.row_of(spec, Target.current(spec.device))
    return LinearReport(
        modules=tuple(modules),
        spec=spec,
        decision=decision,
        evidence=None if row is None else f"{row.why} ({row.since})",
    )
