"""Softmax in any spelling: PyTorch's own, exp(x) / sum(exp(x)), exp(log_softmax(x)), exp(x - logsumexp(x)).

A written-out softmax is the same function. Subtracting the row's maximum first is optional: one number for each row changes no weight. If a
row has no weight left, or an exponential is infinite, the model gives NaN.
"""

from __future__ import annotations

from collections.abc import Iterable
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
_DIVISIONS = frozenset({aten.div.Tensor, aten.true_divide.Tensor})

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
    if not isinstance(scores, fx.Node) or not isinstance(total, fx.Node):
        return None
    path = _row(mirror, total, less, aten.logsumexp.default, scores, is_shared=True)
    return (
        None
        if path is None
        else Softmax(node=exp, scores=scores, dim=path.dim, nodes=frozenset({exp, less, *path.nodes}))
    )


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
    weights = node.args[0] if node.args else None
    if not isinstance(weights, fx.Node) or node.target not in _DIVISIONS:
        return None
    divisor, reader = _divisor(node, weights)
    if divisor is None:
        return None
    path = _row(mirror, divisor, reader, SUM, weights)
    if path is not None:
        return Normalised(weights=weights, dim=path.dim)
    path = _floored(mirror, divisor, reader, weights)
    return None if path is None else Normalised(weights=weights, dim=path.dim, floored=True)


def _floored(mirror: Mirror, node: fx.Node, reader: fx.Node, weights: fx.Node) -> _Row | None:
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
    return _row(mirror, total, node, op, weights)


def _divisor(weights: fx.Node, exp: fx.Node) -> tuple[fx.Node | None, fx.Node]:
    """Return (divisor of the exponentials, its reader) if `weights` are their quotient."""
    left, right = weights.args[:2] if len(weights.args) > 1 else (None, None)
    if weights.target in _DIVISIONS and left is exp and isinstance(right, fx.Node) and right is not exp:
        return right, weights
    other = right if left is exp else left
    if weights.target is aten.mul.Tensor and isinstance(other, fx.Node) and other.target is aten.reciprocal.default:
        return views.source(other), other
    return None, weights


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One number for each row of a tensor. nodes: from the node that is read down to the op on the tensor, which is last."""

    dim: int
    nodes: tuple[fx.Node, ...]


def _row(
    mirror: Mirror,
    node: fx.Node,
    reader: fx.Node,
    op: object,
    of: fx.Node,
    *,
    is_shared: bool = False,
) -> _Row | None:
    """Read `node` as `op` on `of` over one axis, which is kept or put back. Unless shared, only `reader` may read it."""
    path = [node]
    put_back: int | None = None
    below = reader
    while path[-1].target is not op:
        top = path[-1]
        if not _is_read_by(mirror, top, {below, *(top.users if is_shared else ())}):
            return None
        if top.target is aten.unsqueeze.default and put_back is None:
            put_back = int(argument(top, "dim")) % value(top).dim()  # type: ignore[call-overload]
        else:
            return None
        below = top
        path.append(views.source(top))
    top = path[-1]
    rank = value(of).dim()
    dims = argument(top, "dim")
    listed = [dims] if isinstance(dims, int) else list(dims) if isinstance(dims, Iterable) else []
    if top.args[0] is not of or len(listed) != 1:
        return None
    if not _is_read_by(mirror, top, {below, *(top.users if is_shared else ())}):
        return None
    dim = int(listed[0]) % rank
    is_kept = bool(argument(top, "keepdim"))
    if is_kept == (put_back is not None) or (put_back is not None and put_back != dim):
        return None
    return _Row(dim=dim, nodes=tuple(path))


def _is_read_by(mirror: Mirror, node: fx.Node, readers: set[fx.Node]) -> bool:
    """Return whether no other node reads its elements, and none writes to them."""
    if mutation.is_written_later(mirror, node):
        return False
    return all(user in readers or not views.reads_elements(user, node) for user in mirror.readers(node))
