"""Sinks behind the softmax: weights or an output times the share of them that one more number in the denominator leaves.

Models write that share as sigmoid(lse - sink), exp(lse - logaddexp(lse, sink)), softmax of the two joined, 1 / (1 + exp(sink - lse)), and
so on: shares.py reads it. Here its product is found, and it is seen that nothing else reads or writes what that is made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from attn_compiler.passes.graph import axes, mutation, views
from attn_compiler.passes.graph.axes import AxisError, Dims
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.matching.patterns import shares
from attn_compiler.passes.matching.patterns.score_chain import Joined
from attn_compiler.passes.matching.patterns.shares import Value, is_passed, moved

aten = torch.ops.aten
_PRODUCTS = frozenset({aten.mul.Tensor, aten.mul_.Tensor})
_QUOTIENTS = frozenset({aten.div.Tensor, aten.div_.Tensor, aten.true_divide.Tensor})


@dataclass(frozen=True, kw_only=True)
class Sunk:
    """node: the weights or the output with sinks, which has `dims`. logits: of the sinks. nodes: what makes it."""

    node: fx.Node
    dims: Dims
    logits: Joined | float
    nodes: frozenset[fx.Node]


def behind(
    mirror: Mirror,
    start: fx.Node,
    dims: Dims,
    known: Mapping[fx.Node, Value],
    own: frozenset[fx.Node],
    *,
    keeps_dtype: bool = False,
) -> Sunk | None:
    """What makes sinks of a product or a quotient below `start`, which has `dims`; None where there is no such product.

    known: the numbers of each query that are there for the softmax. own: what else may read them. keeps_dtype: what has sinks is in the
    dtype of `start`.
    """
    path, below = [start], shares.below(known)
    while True:
        readers = mirror.readers(path[-1])
        if len(readers) != 1:
            return None
        reader = readers[0]
        if reader.target in _PRODUCTS | _QUOTIENTS and any(x in below for x in reader.args[:2]):
            break
        if reader.args[0] is not path[-1] or not is_passed(reader):
            return None
        path.append(reader)
    other = _factor(path[-1], reader)
    reading = shares.Reading(mirror, known)
    share = None if other is None else reading.value(other)
    if share is None or share.power is not None or share.axis is not None:
        return None
    logits = reading.logits(1 / share.of[0] if reader.target in _QUOTIENTS else share.of[0])
    end = _in_dtype_of(mirror, start, reader) if keeps_dtype else [reader]
    if logits is None or end is None:
        return None
    try:
        dims = moved(path[1:], dims)
        if not _is_one_a_query(share.dims, dims, known):
            return None
        dims = moved(end[1:], dims)
    except AxisError:
        return None
    inside = {*path, *reading.nodes, *end[:-1]}
    if not _is_read_by(mirror, inside, {*inside, *own, end[-1]}) or not _hold(mirror, inside, {*inside, end[-1]}):
        return None
    return Sunk(node=end[-1], dims=dims, logits=logits, nodes=frozenset({*inside, end[-1]}))


def _factor(carried: fx.Node, node: fx.Node) -> fx.Node | None:
    """What a product or a quotient takes besides what is carried, as a divisor, and with the same shape as a result."""
    left, right = node.args[:2]
    if left is not carried and (node.target in _QUOTIENTS or mutation.writes(node)):
        return None
    other = right if left is carried else left
    is_same = axes.shape_exprs(views.value(node)) == axes.shape_exprs(views.value(carried))
    return other if isinstance(other, fx.Node) and other is not carried and is_same else None


def _in_dtype_of(mirror: Mirror, start: fx.Node, node: fx.Node) -> list[fx.Node] | None:
    """The product, and what stands between it and its cast back to the dtype that it began in, where it has another."""
    path = [node]
    while views.value(path[-1]).dtype != views.value(start).dtype:
        readers = mirror.readers(path[-1])
        if len(readers) != 1 or readers[0].args[0] is not path[-1] or not is_passed(readers[0]):
            return None
        path.append(readers[0])
    return path


def _is_one_a_query(share: Dims, dims: Dims, known: Mapping[fx.Node, Value]) -> bool:
    """Whether each number is multiplied with what has its own query, and with all of that."""
    queries = {a for value in known.values() for a in axes.flat(value.dims)}
    if len(share) > len(dims):
        return False
    padded: Dims = (*(((),) * (len(dims) - len(share))), *share)
    return all(
        [a for a in x if not a.broadcast] == [a for a in y if a in queries]
        and {a in queries for a in y} != {True, False}
        for x, y in zip(shares.own(padded), shares.own(dims), strict=True)
    )


def _is_read_by(mirror: Mirror, inside: set[fx.Node], readers: set[fx.Node]) -> bool:
    """Whether nothing else reads elements of these nodes."""
    return all(x in readers or not views.reads_elements(x, node) for node in inside for x in mirror.readers(node))


def _hold(mirror: Mirror, inside: set[fx.Node], readers: set[fx.Node]) -> bool:
    """Whether nothing writes into one of these nodes before one of the readers reads it."""
    pairs = ((node, user) for node in inside for user in node.users if user in readers)
    return all(mutation.written_between(mirror, node, node, user) is None for node, user in pairs)
