"""Sinks after the softmax: weights or an output times the share that one more number in the denominator leaves.

Models write the share as sigmoid(lse - sink), exp(lse - logaddexp(lse, sink)), softmax of the two joined, 1 / (1 + exp(sink - lse)), and so
on. shares.py reads the share. This file finds its product, and checks that no other node reads or writes the nodes of the share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from attn_compiler.passes.graph import axes, mutation, views
from attn_compiler.passes.graph.axes import AxisError, Dims
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.matching.patterns import shares
from attn_compiler.passes.matching.patterns.denominators import Sums
from attn_compiler.passes.matching.patterns.paths import is_passed, moved
from attn_compiler.passes.matching.patterns.score_chain import Joined
from attn_compiler.passes.matching.patterns.shares import ONE, QueryNumbers

aten = torch.ops.aten
_PRODUCTS = frozenset({aten.mul.Tensor, aten.mul_.Tensor})
_QUOTIENTS = frozenset({aten.div.Tensor, aten.div_.Tensor})


@dataclass(frozen=True, kw_only=True)
class Sunk:
    """node: the weights or the output with sinks, which has `dims`. nodes: all nodes that compute it.

    logits: of the sinks; None: exponentials were divided by their own sum.
    """

    node: fx.Node
    dims: Dims
    logits: Joined | float | None
    nodes: frozenset[fx.Node]


def behind(
    mirror: Mirror, start: fx.Node, dims: Dims, sums: Sums, own: frozenset[fx.Node], *, keeps_dtype: bool = False
) -> Sunk | None:
    """Return the sinks in a product or a quotient below `start`, which has `dims`; None if there are none.

    Exponentials are divided by their sum there, with sinks or without. own: other nodes that may read these numbers.
    keeps_dtype: the result with sinks has the dtype of `start`.
    """
    path, below = [start], shares.below(sums.known)
    while True:
        readers = [reader for reader in mirror.readers(path[-1]) if reader not in own]
        if len(readers) != 1:
            return None
        reader = readers[0]
        if reader.target in _PRODUCTS | _QUOTIENTS and any(x in below for x in reader.args[:2]):
            break
        if reader.args[0] is not path[-1] or not is_passed(reader):
            return None
        path.append(reader)
    other = _factor(path[-1], reader)
    reading = shares.Reading(mirror, sums.known, sums.above)
    share = None if other is None else reading.value(other)
    if share is None or share.power is not None or share.axis is not None:
        return None
    factor = 1 / share.of[0] if reader.target in _QUOTIENTS else share.of[0]
    logits = reading.sinks_of(factor * sums.of_weights)
    end = _in_dtype_of(mirror, start, reader) if keeps_dtype else [reader]
    if logits is None or end is None or (logits == -math.inf and sums.of_weights == ONE):
        return None
    try:
        dims = moved(path[1:], dims)
        if not _is_one_a_query(share.dims, dims, sums.known):
            return None
        dims = moved(end[1:], dims)
    except AxisError:
        return None
    inside = {*path, *reading.nodes, *end[:-1]}
    if not _is_read_by(mirror, inside, {*inside, *own, end[-1]}) or not _hold(mirror, inside, {*inside, end[-1]}):
        return None
    logits = None if logits == -math.inf else logits
    return Sunk(node=end[-1], dims=dims, logits=logits, nodes=frozenset({*inside, end[-1]}))


def _factor(carried: fx.Node, node: fx.Node) -> fx.Node | None:
    """Return the other operand of a product, or the divisor of a quotient. The result must have the shape of the carried operand."""
    left, right = node.args[:2]
    if left is not carried and (node.target in _QUOTIENTS or mutation.writes(node)):
        return None
    other = right if left is carried else left
    is_same = axes.shape_exprs(views.value(node)) == axes.shape_exprs(views.value(carried))
    return other if isinstance(other, fx.Node) and other is not carried and is_same else None


def _in_dtype_of(mirror: Mirror, start: fx.Node, node: fx.Node) -> list[fx.Node] | None:
    """Return the product and the nodes to its cast back to `start`'s dtype; only the product if it has that dtype."""
    path = [node]
    while views.value(path[-1]).dtype != views.value(start).dtype:
        readers = mirror.readers(path[-1])
        if len(readers) != 1 or readers[0].args[0] is not path[-1] or not is_passed(readers[0]):
            return None
        path.append(readers[0])
    return path


def _is_one_a_query(share: Dims, dims: Dims, known: Mapping[fx.Node, QueryNumbers]) -> bool:
    """Return whether each number multiplies all elements of its own query, and no others."""
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
    """Return whether no other node reads elements of these nodes."""
    return all(x in readers or not views.reads_elements(x, node) for node in inside for x in mirror.readers(node))


def _hold(mirror: Mirror, inside: set[fx.Node], readers: set[fx.Node]) -> bool:
    """Return whether no write to one of these nodes comes before one of its readers."""
    pairs = ((node, user) for node in inside for user in node.users if user in readers)
    return all(mutation.written_between(mirror, node, node, user) is None for node, user in pairs)
