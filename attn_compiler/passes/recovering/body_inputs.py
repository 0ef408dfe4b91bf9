"""Extra inputs of a checkpoint's body: tensors of the calling graph that kernels read, and tensors kept between calls (buffers.py).

A model computes its mask once, outside the checkpoints of its layers. A layer receives the mask, but a kernel reads the tensors that the
mask was computed from, such as the padding mask.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx
from torch._subclasses import FakeTensor

from attn_compiler.passes.graph import axes, bodies, emit, saved
from attn_compiler.passes.graph.axes import AxisError
from attn_compiler.passes.graph.calls import target_name
from attn_compiler.passes.graph.mutation import Version
from attn_compiler.passes.graph.unit import Unit
from attn_compiler.torch_private import snapshots as torch_snapshots

_CHECKPOINT = "tag_activation_checkpoint"
_PREFIX = "attn_compiler_carried"


def why_not(unit: Unit) -> str | None:
    """Return why a body can't have extra inputs; None if it can."""
    if len(unit.place.calls) != 1:
        return "the graph that holds the attention is called in several places, or in a way that is not followed"
    (call,) = unit.place.calls
    if call.unit.is_body or target_name(call.node) != _CHECKPOINT:
        return f"the graph that holds the attention is called by {target_name(call.node)} or from another such graph"
    return None


def add(unit: Unit, name: str, value: torch.Tensor) -> fx.Node:
    """Add an input at the end of a body. value: a fake tensor. The argument that the call passes goes into unit.written."""
    last = bodies.placeholders(unit.graph_module)[-1]
    with unit.graph.inserting_after(last):
        node = unit.graph.placeholder(name)
    node.meta["example_value"] = value
    return node


def of_caller(unit: Unit, version: Version) -> fx.Node:
    """Return the Dynamo node of a caller's tensor, whose value is the same at the call and when the backward recomputes the body.
    Raises AxisError if the body can't have it."""
    reason = why_not(unit)
    above = None if reason else unit.place.calls[0].unit.mirror
    if above is None or version.node.graph is not above.graph:
        raise AxisError(reason or f"{version.node.name} is a tensor of neither this graph nor the one that calls it")
    value = emit.example(above, version.node)
    is_alike = isinstance(value, FakeTensor) and axes.shape_exprs(value) == axes.shape_exprs(version.node.meta["val"])
    if not is_alike or value.requires_grad:
        raise AxisError(f"{version.node.name} wants a gradient, or is not what Dynamo has for it")
    places = [above.order(node) for node in above.owned(unit.place.calls[0].node)]
    found = above.dynamo_node(version.node)
    if found is None or not places or not emit.holds_from(above, version, min(places)):
        raise AxisError(f"{version.node.name} holds something else when the body is called, or afterwards")
    return found


def carry(unit: Unit, version: Version) -> fx.Node:
    """Return the body's input for a tensor of its caller, shared by all sites. Raises AxisError as `of_caller` does."""
    found = of_caller(unit, version)
    known = next((node for node, given in unit.written.given.items() if given is found), None)
    if known is None:
        known = add(unit, f"{_PREFIX}_{found.name}", found.meta["example_value"])
        unit.written.given[known] = found
    return known


def forget_erased(unit: Unit) -> None:
    """Drop inputs that a failed attempt added and erased again, so that calls pass nothing for them."""
    for node in [node for node in unit.written.given if torch_snapshots.is_erased(node)]:
        del unit.written.given[node]


def pass_on(units: Iterable[Unit]) -> None:
    """Pass extra inputs in the calls of bodies. Runs after all other rewrites."""
    copies: dict[fx.Node, fx.Node] = {}
    for unit in units:
        if not unit.written.given:
            continue
        (call,) = unit.place.calls
        added = bodies.placeholders(unit.graph_module)[len(call.node.args) - call.first :]
        call.node.args = (*call.node.args, *(_kept(unit, node, copies) for node in added))
        call.unit.graph_module.recompile()


def _kept(unit: Unit, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """Return a call's argument for an extra input: a copy if a user may write to the tensor before the body runs again.

    copies: copies made so far, by tensor. Each is computed before the call of the first body that needs it.
    """
    given, (call,) = unit.written.given[node], unit.place.calls
    is_differentiated = any(site.spec is not None and site.spec.needs_grad for site in unit.found.sites)
    why = saved.written_by_user(call.unit, given) if node.users and is_differentiated else None
    if why is None:
        return given
    if given not in copies:
        with call.unit.graph.inserting_before(call.node):
            copies[given] = call.unit.graph.call_function(torch.ops.attn_compiler.held.default, (given,))
        copies[given].meta["example_value"] = given.meta["example_value"].clone()
    copy = saved.copy(str(given.name), given, why)
    for site in unit.found.sites:
        site.copies.append(copy)
    return copies[given]
