"""How far rounding takes a sum of biases from what it is exactly: the operations between it and the tensors that it is read from."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from attn_compiler.passes.graph.site import Site
from attn_compiler.verifying.values import Values

#: ops on floats whose results are rounded, without the underscore that they may end in -> units in the last place at most.
#: That of a power or an exponential grows with the exponent's own error
_ROUNDED = {
    "add": 1,
    "sub": 1,
    "rsub": 1,
    "mul": 1,
    "div": 1,
    "reciprocal": 1,
    "log": 2,
    "exp": 16,
    "exp2": 16,
    "pow": 16,
    "to": 1,
    "_to_copy": 1,
    "type_as": 1,
}

#: Of the number that an element is filled with, and of the sum with what else is added
_ALWAYS = 2

#: in a graph that calls the body that a bias is handed to, where its operations are not looked for
_OUTSIDE = 8


def relative(site: Site, values: Values) -> float:
    """The largest error of what the model adds at a site, as a part of the largest number among it."""
    loads = {version.node for version in site.score_loads.values()}
    total = 0.0
    for node in _between(site, loads):
        dtype = _floating(node)
        if dtype is not None:
            total += _units(node) * torch.finfo(dtype).eps
        if node.op == "placeholder" and node not in loads and len(values.bodies) > 1:
            total += _OUTSIDE * max(_epsilons(values))
    ends = [_floating(term.operand.node) or torch.float32 for term in site.added]
    return total + _ALWAYS * max((torch.finfo(dtype).eps for dtype in ends), default=0.0)


def _between(site: Site, loads: set[fx.Node]) -> Iterator[fx.Node]:
    """The nodes that make what is added, up to what is loaded."""
    waiting = [term.operand.node for term in site.added]
    seen: set[fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        if node not in loads:
            waiting.extend(node.all_input_nodes)


def _units(node: fx.Node) -> int:
    if not isinstance(node.target, torch._ops.OpOverload):
        return 0
    return _ROUNDED.get(node.target.overloadpacket.__name__.rstrip("_"), 0)


def _floating(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) and value.is_floating_point() else None


def _epsilons(values: Values) -> Iterator[float]:
    for graph in values.bodies:
        yield from (torch.finfo(dtype).eps for dtype in map(_floating, graph.nodes) if dtype is not None)
