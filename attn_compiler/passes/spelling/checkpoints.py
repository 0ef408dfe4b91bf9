"""Inlining of checkpoint bodies (`torch.utils.checkpoint`) for passes that must see body and caller, and the way back.

`inline` writes each body in place of its call, between two marks. `outline` makes a body of the nodes between the marks, and calls it as
before. The model still chooses what is recomputed, and how. Nodes that depend only on tensors outside go before the call, once for all
layers.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from attn_compiler.options.options import Options
from attn_compiler.passes.graph import bodies, unit as graph_units
from attn_compiler.passes.graph.calls import target_name
from attn_compiler.passes.graph.unit import Unit

_CHECKPOINT = "tag_activation_checkpoint"
_MARK, _BODY, _HELD = "attn_compiler_mark", "attn_compiler_body", "attn_compiler_held"
#: key in the meta of a body's own nodes, and of nodes that passes make on their behalf
_OF_BODY = "attn_compiler_of_body"


@dataclass(frozen=True, kw_only=True, eq=False)
class Inlined:
    """One body inlined in the graph of its caller.

    begin, end: the marks around it. nodes: those of the body itself. target, kwargs, meta: of the call. notes: the body's meta, such as the
    decision for each op to recompute it.
    """

    begin: fx.Node
    end: fx.Node
    nodes: frozenset[fx.Node]
    target: Any
    kwargs: Mapping[str, Any]
    meta: Mapping[str, Any]
    notes: Mapping[str, Any]


def inline_followed(gm: fx.GraphModule, units: list[Unit], options: Options) -> list[Inlined]:
    """Inline checkpoints if positions of a sequence are followed from a graph into them, and back. Bodies are no units any more then."""
    found = inline(gm) if units and options.follows_positions else []
    if found:
        units[:] = graph_units.units(gm, options)
    return found


def inline(gm: fx.GraphModule) -> list[Inlined]:
    """Inline the body of each checkpoint into the graph. A checkpoint inside a checkpoint stays a call."""
    calls = [node for node in gm.graph.nodes if node.op == "call_function" and target_name(node) == _CHECKPOINT]
    found = [_inline(gm, call, body) for call in calls if (body := _body(call)) is not None]
    if found:
        _erase_unused_bodies(gm)
        gm.recompile()
    return found


def outline(gm: fx.GraphModule, found: list[Inlined]) -> None:
    """Make bodies again from the nodes now between the marks."""
    for one in found:
        _outline(gm, one)
    if found:
        delattr(gm, _MARK)
        gm.recompile()


def outline_all(gm: fx.GraphModule, units: list[Unit], inlined: list[Inlined]) -> None:
    """Outline a graph, and the graphs beside it. If there are any, each may be a copy of the original one."""
    beside = [each for unit in units if unit.outcome is not None for each in unit.outcome.beside]
    if not inlined or not beside:
        outline(gm, inlined)
        return
    for copied in (gm, *beside):
        outline(copied, _in_copy(copied, inlined))


def _in_copy(gm: fx.GraphModule, found: list[Inlined]) -> list[Inlined]:
    """Find the same bodies in a graph that was copied and changed."""
    marks = [node for node in gm.graph.find_nodes(op="get_attr") if node.target == _MARK]
    of_copy = []
    for one, begin, end in zip(found, marks[::2], marks[1::2], strict=True):
        moved = dataclasses.replace(one, begin=begin, end=end, nodes=frozenset())
        own = frozenset(node for node in _between(moved) if _OF_BODY in node.meta)
        of_copy.append(dataclasses.replace(moved, nodes=own))
    return of_copy


def _body(call: fx.Node) -> fx.GraphModule | None:
    """Return the body of a call; None if it must stay. Inputs must come from the arguments, and results must be taken one by one."""
    given = bodies.bodies(call)
    if len(given) != 1 or bodies.first_argument(call, given[0]) != 1:
        return None
    results = given[0].graph.output_node().args[0]
    is_plain = isinstance(results, (tuple, list)) and all(isinstance(x, fx.Node) for x in results)
    are_taken = all(user.target is operator.getitem and isinstance(user.args[1], int) for user in call.users)
    return given[0] if is_plain and are_taken else None


def _inline(gm: fx.GraphModule, call: fx.Node, body: fx.GraphModule) -> Inlined:
    graph, known = gm.graph, dict(zip(bodies.placeholders(body), call.args[1:], strict=True))
    if not hasattr(gm, _MARK):
        gm.add_module(_MARK, nn.Module())
    made: list[fx.Node] = []
    with graph.inserting_before(call):
        begin = graph.get_attr(_MARK)
        for node in body.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            copied = graph.node_copy(node, lambda x: known[x])
            if node.op in ("get_attr", "call_module"):
                copied.target = _held(gm, operator.attrgetter(str(node.target))(body))
            copied.meta[_OF_BODY] = True
            known[node] = copied
            made.append(copied)
        end = graph.get_attr(_MARK)
    results: Any = body.graph.output_node().args[0]
    for user in list(call.users):
        at: Any = user.args[1]
        user.replace_all_uses_with(known[results[at]])  # type: ignore[arg-type]
        graph.erase_node(user)
    graph.erase_node(call)
    return Inlined(
        begin=begin,
        end=end,
        nodes=frozenset(made),
        target=call.target,
        kwargs=call.kwargs,
        meta=dict(call.meta),
        notes=dict(body.meta),
    )


def _held(gm: fx.GraphModule, value: object) -> str:
    """Hold a value of a body, a tensor or a nested body, in an attribute of the graph module. Return its name."""
    name = _unused_name(gm, _HELD)
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        gm.register_buffer(name, value)
    else:
        setattr(gm, name, value)
    return name


def _unused_name(gm: fx.GraphModule, stem: str) -> str:
    at = 0
    while hasattr(gm, f"{stem}_{at}"):
        at += 1
    return f"{stem}_{at}"


def _erase_unused_bodies(gm: fx.GraphModule) -> None:
    """Erase bodies that nothing calls any more. Otherwise they would count as parts of the model."""
    for node in gm.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if name != _MARK and not node.users and isinstance(getattr(gm, name, None), fx.GraphModule):
            gm.graph.erase_node(node)
            if not any(other.target == name for other in gm.graph.find_nodes(op="get_attr")):
                delattr(gm, name)


def _outline(gm: fx.GraphModule, one: Inlined) -> None:
    graph = gm.graph
    inside = _between(one)
    for node in _of_outside(inside, one):
        one.begin.prepend(node)
    inside = _between(one)
    members = set(inside)
    inputs = list(dict.fromkeys(x for node in inside for x in node.all_input_nodes if x not in members))
    outputs = [node for node in inside if any(user not in members for user in node.users)]
    if any(not isinstance(x.meta.get("example_value"), torch.Tensor) for x in outputs):
        raise ValueError("what is made in a checkpoint and used outside of it is a tensor")
    if outputs:
        name = _unused_name(gm, _BODY)
        gm.add_module(name, _made_body(gm, inside, inputs, outputs, one))
        with graph.inserting_before(one.end):
            # The graph of a module in `beside` may name another owning module, which has no such body.
            held = graph.create_node("get_attr", name)
            call = graph.call_function(one.target, (held, *inputs), dict(one.kwargs))
            call.meta = {**one.meta, "example_value": tuple(x.meta["example_value"] for x in outputs)}
            for at, old in enumerate(outputs):
                new = graph.call_function(operator.getitem, (call, at))
                new.meta = dict(old.meta)
                for user in [user for user in old.users if user not in members]:
                    user.replace_input_with(old, new)
    for node in (one.end, *reversed(inside), one.begin):
        graph.erase_node(node)


def _between(one: Inlined) -> list[fx.Node]:
    found, node = [], one.begin.next
    while node is not one.end:
        found.append(node)
        node = node.next
    return found


def _of_outside(inside: list[fx.Node], one: Inlined) -> list[fx.Node]:
    """Return nodes that passes made in the body from outside tensors alone, which may move out.
    None do if a node may change a mode: every call must give a value, unlike calls that enter autocast or turn gradients off."""
    if any(node.meta.get("example_value") is None and node.op != "get_attr" for node in inside):
        return []
    left, found = set(inside), []
    for node in inside:
        value = node.meta.get("example_value")
        is_moved = isinstance(value, torch.Tensor) and not value.requires_grad and node.op != "get_attr"
        if is_moved and node not in one.nodes and left.isdisjoint(node.all_input_nodes):
            left.remove(node)
            found.append(node)
    return found


def _made_body(
    gm: fx.GraphModule, inside: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node], one: Inlined
) -> fx.GraphModule:
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        known[node] = graph.placeholder(node.name)
        known[node].meta = dict(node.meta)
    for node in inside:
        known[node] = graph.node_copy(node, lambda x: known[x])
    graph.output(tuple(known[x] for x in outputs))
    made = fx.GraphModule(gm, graph)
    made.meta.update(one.notes)
    return made
