"""The small graph that runs before each step: how many tokens are real, and whether what the packed graph rests on holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.unpad.exits import AskedTokens, RuntimeFact
from attn_compiler.passes.unpad.masks import Padding
from attn_compiler.passes.unpad.refusing import KeepsPadding
from attn_compiler.reasons.codes import Code

#: nodes that may run once more for it
_MOST = 64


def graph(
    module: fx.GraphModule,
    mirror: Mirror,
    padding: Padding,
    facts: Sequence[RuntimeFact],
    counted: Sequence[RuntimeFact] = (),
) -> fx.GraphModule:
    """Takes the inputs of the model's graph. Gives two tensors, or three.

    bool (B, S): which tokens are packed.
    int64: the number of packed tokens, then for each fact 1 where it holds.
    bool (B, S): which tokens are real. Only graphs that may pack padding give it.

    counted: facts that hold because what counts for them is packed.

    Raises KeepsPadding where that takes more than a few of the model's nodes.
    """
    asked = [padding.tensor.node, *(x for fact in (*facts, *counted) for x in fact.needs)]
    _check_unwritten(mirror, asked)
    roots = [_dynamo(mirror, node) for node in asked]
    wanted = _above(mirror, roots)
    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder" or node in wanted:
            copies[node] = new.node_copy(node, lambda n: copies[n])
    relation = torch.eq if padding.negated else torch.ne
    real = new.call_function(relation, (copies[roots[0]], 0))

    def given(fact: RuntimeFact) -> list[fx.Node]:
        return [copies[_dynamo(mirror, x)] for x in fact.needs]

    packed = real
    for fact in counted:
        if fact.counts is not None:
            packed = new.call_function(torch.logical_or, (packed, fact.counts(new, given(fact), real)))
    tokens = AskedTokens(real=real, packed=packed)
    holds = [new.call_method("to", (fact.holds(new, given(fact), tokens), torch.int64)) for fact in facts]
    said = [new.call_method("sum", (packed,)), *holds]
    new.output((packed, new.call_function(torch.stack, (said,)), *([real] if counted else [])))
    return fx.GraphModule(module, new)


def _dynamo(mirror: Mirror, node: fx.Node) -> fx.Node:
    found = mirror.dynamo_node(node)
    if found is None:
        raise KeepsPadding(
            Code.PADDING_OUT_OF_REACH, "what is asked at run time is a value of the captured graph", node.name, at=node
        )
    return found


def _check_unwritten(mirror: Mirror, roots: Sequence[fx.Node]) -> None:
    """The graph of facts has no writes in place, so what it reads may have none before."""
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
    """What these are made of."""
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
