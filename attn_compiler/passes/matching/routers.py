"""Softmaxes that choose among experts, classes or tokens of a vocabulary: neither attention nor a miss.

Their inputs come from a linear layer, and no product takes their results: there is neither a q kᵀ nor a v.
"""

from __future__ import annotations

import torch
from torch import fx

from attn_compiler.passes.graph.calls import target_name
from attn_compiler.passes.graph.mirror import Mirror, opaque

_LINEAR = frozenset("linear addmm conv1d".split())
PRODUCTS = frozenset("matmul bmm mm mv baddbmm einsum linear addmm".split())
_STEPS_DOWN = 12
_MOST_ABOVE = 64


def is_choice(mirror: Mirror, softmax: fx.Node) -> bool:
    """Return whether a softmax is over a linear layer's output, and nothing multiplies its weights with values."""
    return _comes_from_linear(mirror, softmax) and not _reaches_product(softmax)


def _comes_from_linear(mirror: Mirror, softmax: fx.Node) -> bool:
    """Return whether all numbers above come from a linear layer or a parameter, through elementwise ops and selections only."""
    queue, seen, found = list(softmax.all_input_nodes[:1]), set[fx.Node](), False
    while queue:
        node = queue.pop()
        if node in seen:
            continue
        seen.add(node)
        if len(seen) > _MOST_ABOVE:
            return False
        if called(mirror, node) in _LINEAR:
            found = True
        elif node.op == "placeholder":
            if not _is_parameter(mirror, node):
                return False
        elif node.target is opaque or called(mirror, node) in PRODUCTS:
            return False
        else:
            queue.extend(node.all_input_nodes)
    return found


def _is_parameter(mirror: Mirror, node: fx.Node) -> bool:
    """Return whether a node is a parameter, or a buffer of the model, such as a bias that balances experts."""
    dynamo = mirror.dynamo_node(node)
    value = dynamo.meta.get("example_value") if dynamo is not None else None
    return isinstance(value, torch.nn.Parameter) or (dynamo is not None and "buffers" in dynamo.name)


def _reaches_product(softmax: fx.Node) -> bool:
    level = [softmax]
    for _ in range(_STEPS_DOWN):
        level = [user for node in level for user in node.users if user.target is not opaque]
        if any(_op(node) in PRODUCTS for node in level):
            return True
    return False


def called(mirror: Mirror, node: fx.Node) -> str:
    """Return the name of the function that the model called, for an opaque node from its Dynamo node."""
    owner = mirror.owner(node)
    return target_name(owner) if node.target is opaque and owner is not None else _op(node)


def _op(node: fx.Node) -> str:
    return str(node.target.overloadpacket.__name__) if isinstance(node.target, torch._ops.OpOverload) else ""
