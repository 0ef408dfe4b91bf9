"""Calls of linear attention: each gets its lowering, or the model's own function back; and their rows for the report.

A decoding step whose new state overwrites the old one, as in caches: the kernel writes there itself.

    out, last = linear_call([…, state], text);  state.copy_(last)    becomes    out = step([…], state, text)

The state is written earlier than the model writes it. So nothing may read it in between: it is an input of the graph that only the call
and the copy use, until the copy, and no other input lies in its memory. Inductor's own way (a copy of the state that is written in place,
and removed later) gave wrong results with two steps one after the other, torch 2.13.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import fx

from attn_compiler import lowerings
from attn_compiler.lowerings.graph_ops import linear_call
from attn_compiler.options.options import Options
from attn_compiler.passes.graph import mutation
from attn_compiler.passes.graph.unit import module_path
from attn_compiler.passes.matching.linear import deciding
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
        shared = shared_memory(module.graph) if calls else frozenset()
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
            if step is None or not write_over(node, spec, step, shared):
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


def shared_memory(graph: fx.Graph) -> Set[Any]:
    """Return the storages that several inputs of a graph lie in."""
    each = (mutation.storages_of(node.meta.get("example_value")) for node in graph.find_nodes(op="placeholder"))
    counts = Counter(storage for storages in each for storage in storages)
    return {storage for storage, count in counts.items() if count > 1}


def write_over(node: fx.Node, spec: LinearSpec, op: torch._ops.OpOverload, shared: Set[Any]) -> bool:
    """Replace a `linear_call` and the copy of its state by a step, if the graph does nothing else with both states.

    shared: `shared_memory` of the graph.
    """
    form = LinearForm.from_text(str(node.args[1]))
    if spec.length != 1 or spec.needs_grad or "state" not in form.roles:
        return False
    operands = list(node.args[0])  # type: ignore[arg-type]
    state = operands.pop(form.roles.index("state"))
    copy = _copy_of(node, state)
    if (
        copy is None
        or state in operands
        or not _can_be_written(state, form)
        or not shared.isdisjoint(mutation.storages_of(state.meta["example_value"]))
        # Only the call and the copy use the state, until the copy. A view that was made before may be read after the call.
        or not (node < copy and all(copy < user for user in state.users if user not in (node, copy)))
    ):
        return False
    with node.graph.inserting_before(node):
        out = node.graph.call_function(op, (operands, state, node.args[1]))
    out.meta = {**node.meta, "example_value": node.meta["example_value"][0]}
    for user in [user for user in node.users if user.args[1] == 0]:
        user.replace_all_uses_with(out)
        node.graph.erase_node(user)
    copy.replace_all_uses_with(state)
    for erased in (copy, copy.args[1], node):
        node.graph.erase_node(erased)  # type: ignore[arg-type]
    return True


def _copy_of(node: fx.Node, state: fx.Node) -> fx.Node | None:
    """Return the copy of the new state over the old one, if the new one is used for nothing else."""
    if not all(user.target is operator.getitem for user in node.users):
        return None
    lasts = [user for user in node.users if user.args[1] == 1]
    if len(lasts) != 1 or len(lasts[0].users) != 1:
        return None
    (copy,) = lasts[0].users
    is_copy = copy.op == "call_method" and copy.target == "copy_"
    return copy if is_copy and copy.args == (state, lasts[0]) and not copy.kwargs else None


def _can_be_written(state: fx.Node, form: LinearForm) -> bool:
    value = state.meta.get("example_value")
    return (
        state.op == "placeholder"
        and isinstance(value, torch.Tensor)
        and value.dtype == getattr(torch, form.state_dtype)
        and value.is_contiguous()
        and not value.requires_grad
    )
