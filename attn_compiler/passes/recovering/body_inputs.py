"""Further inputs of a checkpoint's body: what its kernels read of the graph that calls it, and what is kept from call to call (buffers.py).

A model makes its mask once, outside of the checkpoints of its layers. What a layer is given is the mask; what a kernel wants is what the
mask was made from, such as which tokens are padding.
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
    """Why a body can't have further inputs; None if it can."""
    if len(unit.place.calls) != 1:
        return "the graph that holds the attention is called in several places, or in a way that is not followed"
    (call,) = unit.place.calls
    if call.unit.is_body or target_name(call.node) != _CHECKPOINT:
        return f"the graph that holds the attention is called by {target_name(call.node)} or from another such graph"
    return None


def add(unit: Unit, name: str, value: torch.Tensor) -> fx.Node:
    """A further input of a body, the last one. value: fake. What its call gives for it goes into unit.written."""
    last = bodies.placeholders(unit.graph_module)[-1]
    with unit.graph.inserting_after(last):
        node = unit.graph.placeholder(name)
    node.meta["example_value"] = value
    return node


def of_caller(unit: Unit, version: Version) -> fx.Node:
    """The Dynamo node of what a tensor of a body's caller holds, when the body is called and when the backward computes it once more.
    Raises AxisError where the body can't have it."""
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
    """The input of a body that is what a tensor of its caller holds: one for all sites. Raises AxisError as `of_caller`."""
    found = of_caller(unit, version)
    known = next((node for node, given in unit.written.given.items() if given is found), None)
    if known is None:
        known = add(unit, f"{_PREFIX}_{found.name}", found.meta["example_value"])
        unit.written.given[known] = found
    return known


def forget_erased(unit: Unit) -> None:
    """A further input that an attempt made and took back is given nothing."""
    for node in [node for node in unit.written.given if torch_snapshots.is_erased(node)]:
        del unit.written.given[node]


def pass_on(units: Iterable[Unit]) -> None:
    """Let the calls of bodies give them their further inputs, once everything else is done."""
    copies: dict[fx.Node, fx.Node] = {}
    for unit in units:
        if not unit.written.given:
            continue
        (call,) = unit.place.calls
        added = bodies.placeholders(unit.graph_module)[len(call.node.args) - call.first :]
        call.node.args = (*call.node.args, *(_kept(unit, node, copies) for node in added))
        call.unit.graph_module.recompile()


def _kept(unit: Unit, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """What a call gives for a further input of a body: a copy where a user may write to the tensor before the body is run again.

    copies: those that there are, by the tensor: the first body's call has them made.
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
