"""The small graph that runs before each step: the number of real tokens, their places, and the facts that the packed graph rests on."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import fx

from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.unpad.agreeing import shared_batch
from attn_compiler.passes.unpad.exits import AskedTokens, RuntimeFact
from attn_compiler.passes.unpad.forms import KeepsPadding
from attn_compiler.passes.unpad.masks import Padding
from attn_compiler.passes.unpad.unpadding import Batch
from attn_compiler.reasons.codes import Code
from attn_compiler.torch_private import compat as torch_compat

#: the most nodes of the model that it may run once more
_MOST = 64


def graph(
    module: fx.GraphModule,
    mirror: Mirror,
    padding: Padding,
    facts: Sequence[RuntimeFact],
    counted: Sequence[RuntimeFact] = (),
    compared: Sequence[tuple[fx.Node, int, int | None]] | None = None,
) -> fx.GraphModule:
    """Make a graph that takes the inputs of the model's graph, and returns these values.

    bool (B, S): which tokens are packed.
    A tuple, for each fact: bool (), whether it holds.
    bool (B, S): which tokens are real; None in graphs that pack no padding.
    A tuple of (B, S | 1, ...): what tells rows apart; None where rows share nothing.
    counted: facts that hold because the positions that count for them are packed. compared: what tells rows apart, with axes of rows and
    positions.
    Raises KeepsPadding where that takes more than a few of the model's nodes.
    """
    asked = [
        padding.tensor.node,
        *(x for fact in (*facts, *counted) for x in fact.needs),
        *(x for x, *_ in compared or ()),
    ]
    _check_unwritten(mirror, asked)
    roots = [_dynamo(mirror, node) for node in asked]
    wanted = _above(mirror, roots)
    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder" or node in wanted:
            copies[node] = new.node_copy(node, lambda n: copies[n])
    # Elements of a mask that has to be 0 or 1, and are neither, are left as the model has them (zeroing.py).
    relation, number = (torch.eq, 0) if padding.negated else (torch.ne, 0)
    if padding.negated and padding.is_asked:
        relation, number = torch.ne, 1
    if padding.is_absent:
        real = new.call_function(torch.ones_like, (copies[roots[0]],), {"dtype": torch.bool})
    else:
        real = new.call_function(relation, (copies[roots[0]], number))

    def given(fact: RuntimeFact) -> list[fx.Node]:
        return [copies[_dynamo(mirror, x)] for x in fact.needs]

    packed = real
    for fact in counted:
        if fact.counts is not None:
            packed = new.call_function(torch.logical_or, (packed, fact.counts(new, given(fact), real)))
    tokens = AskedTokens(real=real, packed=packed)
    holds = tuple(fact.holds(new, given(fact), tokens) for fact in facts)
    if compared is None:
        new.output((packed, holds, real if counted else None, None))
    else:
        told = tuple(_by_token(new, copies[_dynamo(mirror, x)], real, i, j) for x, i, j in compared)
        new.output((new.call_function(torch.ones_like, (real,)), holds, real, told))
    return fx.GraphModule(module, new)


def _by_token(graph: fx.Graph, x: fx.Node, real: fx.Node, rows: int, positions: int | None) -> fx.Node:
    """Make (B, S | 1, ...) of a value with these axes; both may be one."""
    if rows == positions:
        x = graph.call_method("movedim", (x, rows, 0))
        return graph.call_method("unflatten", (x, 0, graph.call_function(getattr, (real, "shape"))))
    if positions is None:
        return graph.call_method("unsqueeze", (graph.call_method("movedim", (x, rows, 0)), 1))
    return graph.call_method("movedim", (x, (rows, positions), (0, 1)))


def with_places(
    asked: fx.GraphModule, windows: Sequence[int | None] = (), *, needs_keys: bool = False, are_later: bool = False
) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """Make a module that tells what `graph` tells, and where tokens are, as the host wants it.

    Returns the module and the indices of its inputs, all of which it reads, among those of the model's graph. The module returns int64,
    the number of packed tokens and then 1 for each fact that holds; bool (B, S), which tokens are packed; then the tensors of `Batch`.
    windows: of attentions in which rows share tokens. They add `sharing.FACTS`, the second if keys are needed, and then the number of
    groups. are_later: in place of `Batch`, the module returns what else `Batch.from_mask` takes.
    """
    new = torch_compat.copied_graph(asked.graph)
    output: Any = new.output_node()
    packed, holds, real, compared = output.args[0]
    size = len(fields(Batch)) if windows else len(fields(Batch)) - 2
    with new.inserting_before(output):
        if windows:
            found = new.call_function(_shared_places_of, (real, compared, tuple(windows)))
            of_batch = [0, 1, 2] if needs_keys else [0, 2]
            holds = (*holds, *(new.call_function(operator.getitem, (found, size + i)) for i in of_batch))
        elif not are_later:
            found = new.call_function(_places_of, (packed, real))
        if are_later and not windows:
            places, number = [real], new.call_function(torch.sum, (packed,))
        else:
            places = [new.call_function(operator.getitem, (found, i)) for i in range(size)]
            starts = places[[field.name for field in fields(Batch)].index("starts")]
            number = new.call_function(torch.select, (starts, 0, -1))
        told = new.call_function(torch.stack, ([number, *(new.call_method("to", (x, torch.int64)) for x in holds)],))
    output.args = ((told, packed, *places),)
    read = []
    for i, node in enumerate(list(new.find_nodes(op="placeholder"))):
        if node.users:
            read.append(i)
        else:
            new.erase_node(node)
    return fx.GraphModule(asked, new), tuple(read)


def _places_of(packed: torch.Tensor, real: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    return Batch.from_mask(packed, real).inputs


def _shared_places_of(
    real: torch.Tensor, compared: Sequence[torch.Tensor], windows: Sequence[int | None]
) -> tuple[torch.Tensor, ...]:
    batch, *told = shared_batch(real, compared, windows)
    return *batch.inputs, *told


def _dynamo(mirror: Mirror, node: fx.Node) -> fx.Node:
    found = mirror.dynamo_node(node)
    if found is None:
        raise KeepsPadding(
            Code.PADDING_OUT_OF_REACH, "what is asked at run time is a value of the captured graph", node.name, at=node
        )
    return found


def _check_unwritten(mirror: Mirror, roots: Sequence[fx.Node]) -> None:
    """Raise KeepsPadding if a tensor that the graph of facts reads was written in place before: that graph has no such writes."""
    found: set[fx.Node] = set()
    for root in roots:
        waiting = [root]
        while waiting:
            node = waiting.pop()
            if node in found:
                continue
            found.add(node)
            waiting.extend(node.all_input_nodes)
            writers = mirror.writers_into(node).nodes if isinstance(node.meta.get("val"), torch.Tensor) else []
            if any(mirror.order(writer) < mirror.order(root) for writer in writers):
                rule = "nothing writes in place to what is asked at run time"
                raise KeepsPadding(
                    Code.PADDING_WRITTEN, rule, f"{writers[0].target} writes to {node.name}", at=writers[0]
                )


def _above(mirror: Mirror, roots: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the nodes that these are computed from."""
    found: set[fx.Node] = set()
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node in found or node.op in ("placeholder", "get_attr"):
            found.add(node)
            continue
        if node.op not in ("call_function", "call_method") or not mirror.computes_only(node) or len(found) > _MOST:
            rule = "what is asked at run time is made of the inputs by a few ops"
            raise KeepsPadding(Code.PADDING_OUT_OF_REACH, rule, f"{node.name} is in between")
        found.add(node)
        waiting.extend(node.all_input_nodes)
    return found
