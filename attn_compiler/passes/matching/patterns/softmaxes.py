"""Softmax in any spelling: PyTorch's own, exp(x) / sum(exp(x)), exp(log_softmax(x)), exp(x - logsumexp(x)).

A written-out softmax is the same function. Subtracting the row's maximum first is optional: one number for each row changes no weight. If a
row has no weight left, or an exponential is infinite, the model gives NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from attn_compiler.passes.graph import axes, constants, mutation, views
from attn_compiler.passes.graph.axes import Atom, Dims
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.views import argument, value
from attn_compiler.passes.matching.patterns import paths, shares

aten = torch.ops.aten

CALLS = frozenset({aten.softmax.int, aten._softmax.default, aten._safe_softmax.default, aten.special_softmax.default})
WRITTEN_OUT = frozenset({aten.exp.default})
_LOG_SOFTMAX = frozenset({aten.log_softmax.int, aten._log_softmax.default, aten.special_log_softmax.default})
_DIVISIONS = frozenset({aten.div.Tensor})

#: ops that sum the weights, none of which is below 0
SUM, NORM = aten.sum.dim_IntList, aten.linalg_vector_norm.default
_CLAMPS = frozenset({aten.clamp.default, aten.clamp_min.default})


@dataclass(frozen=True, kw_only=True)
class Softmax:
    """node: the weights. scores: the input. dim: its softmax axis. nodes: all of its nodes.

    is_divided: the weights sum to 1. Otherwise they are exponentials, which are divided by their sum later, or the product with v is.
    """

    node: fx.Node
    scores: fx.Node
    dim: int
    nodes: frozenset[fx.Node]
    is_divided: bool = True


def read(mirror: Mirror, anchor: fx.Node) -> Softmax | None:
    """Return the softmax of an anchor; None for an exponential outside any softmax."""
    if anchor.target in CALLS:
        dim = argument(anchor, "dim")
        if not isinstance(dim, int):
            return None
        return Softmax(node=anchor, scores=views.source(anchor), dim=dim, nodes=frozenset({anchor}))
    found = (reader(mirror, anchor) for reader in (_of_log_softmax, _less_logsumexp, _summed))
    return next((softmax for softmax in found if softmax is not None), None)


def _of_log_softmax(mirror: Mirror, exp: fx.Node) -> Softmax | None:
    log = views.source(exp)
    dim = argument(log, "dim") if log.target in _LOG_SOFTMAX else None
    if not isinstance(dim, int) or not _is_read_by(mirror, log, {exp}):
        return None
    return Softmax(node=exp, scores=views.source(log), dim=dim, nodes=frozenset({exp, log}))


def _less_logsumexp(mirror: Mirror, exp: fx.Node) -> Softmax | None:
    less = views.source(exp)
    if less.target is not aten.sub.Tensor or argument(less, "alpha") != 1 or not _is_read_by(mirror, less, {exp}):
        return None
    scores, total = less.args[:2]
    found = _reduced(mirror, total, aten.logsumexp.default, scores)
    if found is None or not isinstance(scores, fx.Node):
        return None
    return Softmax(node=exp, scores=scores, dim=found[0], nodes=frozenset({exp, less, *found[1]}))


def _summed(mirror: Mirror, exp: fx.Node) -> Softmax | None:
    """Read an exponential that is summed along one of its axes."""
    dims: Dims = tuple((Atom(size),) for size in axes.shape_exprs(value(exp)))
    for path in paths.paths_to(mirror, [exp], {SUM}):
        along = paths.along(path, dims)
        found = [dim for dim, own in enumerate(dims) if along is not None and axes.resolve(own) == along[0]]
        if found and not any(mutation.is_written_later(mirror, node) for node in path):
            nodes = frozenset(path)
            return Softmax(node=exp, scores=views.source(exp), dim=found[0], nodes=nodes, is_divided=False)
    return None


@dataclass(frozen=True, kw_only=True)
class Normalised:
    """Weights divided by their sum along one axis. floored: the sum is kept above 0 by a step that changes no sum of 1."""

    weights: fx.Node
    dim: int
    floored: bool = False


def normalised(mirror: Mirror, node: fx.Node) -> Normalised | None:
    """Read a node as a division of weights by their sum along one axis; None if it is no such division."""
    weights, total = node.args[:2] if node.target in _DIVISIONS else (None, None)
    if not isinstance(weights, fx.Node) or not isinstance(total, fx.Node):
        return None
    found, floored = _reduced(mirror, total, SUM, weights), False
    if found is None:
        found, floored = _floored(mirror, total, node, weights), True
    return None if found is None else Normalised(weights=weights, dim=found[0], floored=floored)


def _floored(mirror: Mirror, node: fx.Node, reader: fx.Node, weights: fx.Node) -> tuple[int, list[fx.Node]] | None:
    """Read a sum of weights that is clamped below 1, or has an addend lost in a sum of 1, also as in F.normalize(p=1)."""
    if node.target in (aten.expand_as.default, aten.expand.default) and _is_read_by(mirror, node, {reader}):
        node, reader = views.source(node), node
    if not _is_read_by(mirror, node, {reader}) or not isinstance(node.args[0], fx.Node):
        return None
    if node.target is aten.add.Tensor:
        number = constants.number(mirror, node.args[1]) if argument(node, "alpha") == 1 else None
        is_idle = number is not None and 0 <= number <= shares.unseen(node)
    elif node.target in _CLAMPS and argument(node, "max", None) is None:
        number = constants.number(mirror, argument(node, "min"))
        is_idle = number is not None and number <= shares.MOST_CLAMPED
    else:
        return None
    total = node.args[0]
    op = NORM if total.target is NORM else SUM
    if not is_idle or (op is NORM and argument(total, "ord") != 1):
        return None
    return _reduced(mirror, total, op, weights)


def _reduced(mirror: Mirror, node: object, op: object, of: object) -> tuple[int, list[fx.Node]] | None:
    """Return (axis, nodes) if `node` is `op` of a tensor along one of its axes, which is kept or put back; None otherwise."""
    if not isinstance(node, fx.Node) or not isinstance(of, fx.Node):
        return None
    path = [node]
    while path[-1].target is not op and path[-1].target is aten.unsqueeze.default:
        path.append(views.source(path[-1]))
    if path[-1].target is not op or path[-1].args[0] is not of:
        return None
    dims: Dims = tuple((Atom(size),) for size in axes.shape_exprs(value(of)))
    found = paths.along([of, path[-1]], dims)
    if found is None or any(mutation.is_written_later(mirror, x) for x in path):
        return None
    after = paths.moved(path[-2::-1], found[1])
    axis = views.named_axes(path[-1], len(dims)).pop()
    wanted = [() if i == axis else axes.resolve(dim) for i, dim in enumerate(dims)]
    return (axis, path) if [axes.resolve(dim) for dim in after] == wanted else None


def _is_read_by(mirror: Mirror, node: fx.Node, readers: set[fx.Node]) -> bool:
    """Return whether no other node reads its elements, and none writes to them."""
    if mutation.is_written_later(mirror, node):
        return False
    return all(user in readers or not views.reads_elements(user, node) for user in mirror.readers(node))
