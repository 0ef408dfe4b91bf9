"""Steps between the softmax and the product with v: which ones may stand there, and which leave a kernel's result equal.

Allowed: views, casts, dropout, the part without the sink column, a product with 1, and a mask that zeroes weights that were 0 anyway. Also
allowed: 0 in place of NaN, which a row without keys gives, and a division by the weights' own sum. A mask before that division is equal to
a mask of the scores.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

import torch
from torch import fx

from attn_compiler.passes.graph import axes, constants, equal, mutation, views
from attn_compiler.passes.graph.axes import AxisError, Dim, Dims
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.mutation import Version
from attn_compiler.passes.graph.site import Refused
from attn_compiler.passes.matching import contraction, operands
from attn_compiler.passes.matching.contraction import Contraction
from attn_compiler.passes.matching.patterns import softmaxes
from attn_compiler.passes.matching.patterns.score_chain import Joined, Scores
from attn_compiler.reasons.codes import Code

aten = torch.ops.aten
_CASTS = (*views.CASTS, aten.type_as.default)
_SPLITS = frozenset({aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default, aten.chunk.default})
_SLICES = frozenset({aten.slice.Tensor, aten.narrow.default})
_NOT = frozenset({aten.bitwise_not.default, aten.logical_not.default})
_SCALE_OUTPUT = "multiply the output by this factor, in place of the weights"
_SCALE_V = "multiply v by this factor if all queries share it; otherwise nothing can be done, and Inductor compiles the attention"
_MASK_SCORES = "mask the scores, too, before the softmax (scores.masked_fill(~mask, float('-inf'))): the other weights then sum to 1"


@dataclass(frozen=True, kw_only=True)
class Way:
    """nodes: the steps between the softmax and the product with v. product: that product. is_read: the weights have another reader."""

    nodes: tuple[fx.Node, ...]
    product: Contraction
    is_read: bool


@dataclass(frozen=True, kw_only=True)
class Zeroed:
    """Weights set to zero where `condition` does not hold (or, inverted, holds). weights: the masked weights."""

    weights: fx.Node
    condition: fx.Node
    inverted: bool


def to_values(mirror: Mirror, anchor: fx.Node, own: Collection[fx.Node] = ()) -> Way:
    """Walk down from the softmax to the product with v. own: nodes of the softmax. Raises Refused if there is no way."""
    furthest = anchor
    paths: list[list[fx.Node]] = [[anchor]]
    while paths:
        path = paths.pop(0)
        furthest = path[-1]
        for user in mirror.readers(path[-1]):
            product = contraction.parse(user)
            if (
                product is not None
                and path[-1] in (product.lhs, product.rhs)
                and (product.addend, product.alpha) == (None, 1.0)
            ):
                return Way(nodes=tuple(path[1:]), product=product, is_read=_has_other_readers(mirror, path, user, own))
            if _carried(mirror, user) is path[-1]:
                paths.append([*path, user])
    rule = "the softmax is followed by a product with v, after views, casts, dropout and the scores' own mask only"
    observed = f"{furthest.name} is used by {', '.join(u.name for u in furthest.users) or 'nothing'}"
    raise Refused(Code.AFTER_SOFTMAX, rule, observed, at=furthest, progress=3, remedy=_remedy(furthest))


def _remedy(weights: fx.Node) -> str | None:
    """Return the advice for a product of the weights with another factor before v."""
    products = [user for user in weights.users if user.target in (aten.mul.Tensor, aten.mul_.Tensor)]
    factors = [x for product in products for x in product.args[:2] if x is not weights]
    last = [axes.shape_exprs(views.value(x))[-1:] for x in factors if isinstance(x, fx.Node)]
    return None if not factors else _SCALE_V if any(size not in ((), (axes.ONE,)) for size in last) else _SCALE_OUTPUT


def _has_other_readers(mirror: Mirror, path: list[fx.Node], product: fx.Node, own: Collection[fx.Node]) -> bool:
    expected = {
        *path,
        *own,
        product,
        *(x for node in path for x in node.all_input_nodes if x.target is aten.isnan.default),
    }
    expected |= {user for node in path for user in node.users if _sums(mirror, user, node, path)}
    readers = ((user, node) for node in path for user in mirror.readers(node) if user not in expected)
    return any(views.reads_elements(user, node) for user, node in readers)


def _sums(mirror: Mirror, user: fx.Node, weights: fx.Node, path: list[fx.Node]) -> bool:
    """Return whether `user` computes the sum by which a node of the path divides these weights."""
    found = (softmaxes.normalised(mirror, node) for node in path)
    is_sum = user.target in (softmaxes.SUM, softmaxes.NORM)
    return is_sum and any(one is not None and one.weights is weights for one in found)


def carries_weights(mirror: Mirror, node: fx.Node, anchor: fx.Node) -> bool:
    """Return whether a factor of the product with v is computed from the softmax."""
    current: fx.Node | None = node
    while current is not None and current is not anchor:
        current = _carried(mirror, current)
    return current is anchor


def _carried(mirror: Mirror, node: fx.Node) -> fx.Node | None:
    """Return the node that the weights come from, if `node` is an allowed step."""
    if not node.all_input_nodes:
        return None
    first = node.all_input_nodes[0]
    if node.target in _CASTS:
        return first if views.value(node).is_floating_point() else None
    if views.is_view(node) or node.target is aten.dropout.default or node.target in _SPLITS or _is_part(node):
        return first
    scaled = operands.scale_of(mirror, node)
    if scaled is not None and scaled[1] == 1.0 and not mutation.writes(node):
        return scaled[0]
    cleared = _cleared(mirror, node)
    if cleared is not None:
        return cleared
    normalised = softmaxes.normalised(mirror, node)
    if normalised is not None:
        return normalised.weights
    zeroed = _zeroed(mirror, node)
    return zeroed.weights if zeroed is not None else None


def dropout(way: Way) -> float:
    """Return the dropout probability of the weights. Raises AxisError for two dropouts."""
    rates = [p for n in way.nodes if n.target is aten.dropout.default and (p := views.dropout_probability(n))]
    if len(rates) > 1:
        raise AxisError("two dropouts on the weights")
    return rates[0] if rates else 0.0


def follow(mirror: Mirror, anchor: fx.Node, way: Way, scores: Scores, key: Dim, *, is_one: bool = True) -> Dims:
    """Return the dims of the weights at the product. Raises AxisError or Refused for steps whose effect a kernel's result would lack.

    key: the softmax axis. is_one: the weights sum to 1, before a mask.
    The scores get the masks of whole rows, and the masks of weights that are divided by their sum.
    """
    dims = scores.dims
    column = scores.sinks is not None
    pending: list[tuple[fx.Node, Zeroed, Dims]] = []
    for i, node in enumerate(way.nodes):
        part, zeroed, normalised = _part(node), _zeroed(mirror, node), softmaxes.normalised(mirror, node)
        if column and part is not None:
            _check_column_dropped(node, part, scores)
            column = False
        elif views.is_view(node):
            if column:
                raise AxisError(f"{node.name} moves the weights before the sink column is dropped")
            dims = views.forward(node, dims)
        elif _is_part(node):
            raise AxisError(f"{node.name} takes a part of the weights")
        elif zeroed is not None:
            if column:
                raise AxisError(f"{node.name} masks the weights before the sink column is dropped")
            pending.append((node, zeroed, dims))
        elif normalised is not None:
            _check_sum(node, is_one, axes.resolve(dims[normalised.dim]), key, way.nodes[:i], scores)
            if normalised.floored:
                # Weights have to sum to 1 in each row with a key left. The floor has no effect then.
                if not all(_again(mirror, *one, scores, key) for one in pending):
                    what = (
                        "divides by a sum that is kept from 0, of weights that are masked and sum to any number below 1"
                    )
                    raise _other_mask(node, what)
                continue
            scores.keeps += [_kept(*one) for one in pending]
            pending = []
    rows: list[Joined] = []
    for one in pending:
        again = _again(mirror, *one, scores, key)
        if again:
            # Rows that a mask leaves without keys are zero in the model then, as from every kernel; meaning.py looks at the others.
            scores.keeps = [replace(kept, again=True) if kept in again else kept for kept in scores.keeps]
        elif way.is_read or not _is_of_rows(one[1], one[2], key):
            raise _other_mask(one[0], "sets weights to zero by another mask than that of the scores")
        else:
            rows.append(_kept(*one))
    scores.keeps += rows
    if column:
        rule = "the sink column is dropped again"
        observed = f"weights of the column in {anchor.name} reach the values"
        raise Refused(Code.SINK_COLUMN, rule, observed, at=anchor, progress=4)
    return dims


# ---- a sum of weights ---------------------------------------------------------------------------------------------


def _check_sum(node: fx.Node, is_one: bool, along: Dim, key: Dim, before: Iterable[fx.Node], scores: Scores) -> None:
    """Require that the sum is of a softmax, or of the part that a mask left. Raises AxisError."""
    if list(along) != list(axes.resolve(key)):
        raise AxisError(f"{node.name} divides the weights by their sum along another axis than the softmax")
    if scores.sinks is not None or not is_one:
        raise AxisError(f"{node.name} divides by their sum weights that do not sum to 1, or are read elsewhere, too")
    if any(n.target is aten.dropout.default and views.dropout_probability(n) for n in before):
        raise AxisError(f"{node.name} divides the weights that dropout left by their sum")


def _kept(node: fx.Node, zeroed: Zeroed, dims: Dims) -> Joined:
    """Turn a mask of the weights into one of the scores. A masked softmax over its own sum equals a softmax over the kept keys."""
    numbers = not _is_bool(zeroed.condition)
    return Joined(
        node=zeroed.condition, dims=dims, used=node, inverted=zeroed.inverted, replaces=True, by_numbers=numbers
    )


# ---- the column of sinks ------------------------------------------------------------------------------------------


def _is_part(node: fx.Node) -> bool:
    """Return whether a node is a slice, a narrow or an item of a split."""
    source = node.args[0] if node.args else None
    is_item = node.target is operator.getitem and isinstance(source, fx.Node) and source.target in _SPLITS
    return is_item or node.target in _SLICES


def _part(node: fx.Node) -> tuple[fx.Node, axes.Size] | None:
    """Return (whole tensor, start) for a part of the last axis; None for any other node."""
    if not _is_part(node):
        return None
    top = views.source(node) if node.target is operator.getitem else node
    whole = views.source(top)
    start = _start_of_slice(node) if top is node else _start_of_item(top, node.args[1])
    return (whole, start) if start is not None and _is_last(top, whole) else None


def _start_of_slice(node: fx.Node) -> axes.Size | None:
    start = views.argument(node, "start")
    start = 0 if start is None else start
    return axes.size_expr(start) if isinstance(start, (int, torch.SymInt)) else None


def _start_of_item(split: fx.Node, position: object) -> axes.Size | None:
    if not isinstance(position, int) or position < 0:
        return None
    return sum((axes.size_expr(x.shape[-1]) for x in split.meta["val"][:position]), axes.size_expr(0))


def _is_last(node: fx.Node, whole: fx.Node) -> bool:
    dim, rank = views.argument(node, "dim", 0), views.value(whole).dim()
    return isinstance(dim, int) and dim % rank == rank - 1


def _check_column_dropped(node: fx.Node, part: tuple[fx.Node, axes.Size], scores: Scores) -> None:
    whole, start = part
    before, after = views.value(whole).shape, views.value(node).shape
    begins = start == (axes.ONE if scores.sinks_first else axes.size_expr(0))
    if not begins or before[:-1] != after[:-1] or axes.size_expr(before[-1]) - axes.size_expr(after[-1]) != 1:
        raise AxisError(f"{node.name} drops something else than the sink column")


# ---- a mask on the weights ----------------------------------------------------------------------------------------


def _zeroed(mirror: Mirror, node: fx.Node) -> Zeroed | None:
    reader = _MASKS.get(node.target)
    return None if reader is None or _cleared(mirror, node) is not None else reader(mirror, node)


def _cleared(mirror: Mirror, node: fx.Node) -> fx.Node | None:
    """Return the weights if a node replaces their NaN with 0. Weights are never infinite."""
    if node.target is aten.nan_to_num.default:
        nan = views.argument(node, "nan")
        return views.source(node) if nan is None or constants.number(mirror, nan) == 0.0 else None
    reader = _MASKS.get(node.target)
    found = None if reader is None or mutation.writes(node) else reader(mirror, node)
    condition = None if found is None else found.condition
    if found is None or condition is None or condition.target is not aten.isnan.default or not found.inverted:
        return None
    return found.weights if condition.args[0] is found.weights else None


def _masked_fill(mirror: Mirror, node: fx.Node) -> Zeroed | None:
    weights, condition = node.args[:2]
    if not isinstance(weights, fx.Node) or not isinstance(condition, fx.Node):
        return None
    is_zero = constants.everywhere(mirror, node.args[2]) == 0.0
    return Zeroed(weights=weights, condition=condition, inverted=True) if is_zero else None


def _where(mirror: Mirror, node: fx.Node) -> Zeroed | None:
    condition, yes, no = node.args[:3]
    for weights, other, inverted in ((yes, no, False), (no, yes, True)):
        is_zero = constants.everywhere(mirror, other) == 0.0
        if is_zero and isinstance(weights, fx.Node) and isinstance(condition, fx.Node):
            return Zeroed(weights=weights, condition=condition, inverted=inverted)
    return None


def _times(mirror: Mirror, node: fx.Node) -> Zeroed | None:
    """Read weights times bools, or times bools cast to numbers."""
    left, right = node.args[:2]
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
        return None
    for weights, other in ((left, right), (right, left)):
        condition = other
        while condition.target in _CASTS and not _is_bool(condition):
            condition = views.source(condition)
        if _is_bool(condition):
            return Zeroed(weights=weights, condition=other, inverted=False)
    return None


_MASKS: dict[object, Callable[[Mirror, fx.Node], Zeroed | None]] = {
    **dict.fromkeys((aten.masked_fill.Scalar, aten.masked_fill.Tensor), _masked_fill),
    **dict.fromkeys((aten.masked_fill_.Scalar, aten.masked_fill_.Tensor), _masked_fill),
    **dict.fromkeys((aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf), _where),
    **dict.fromkeys((aten.mul.Tensor, aten.mul_.Tensor), _times),
}


def _other_mask(node: fx.Node, what: str) -> Refused:
    """Error for weights masked in another way than their scores. what: the observed action of the node."""
    return Refused(
        code=Code.AXES,
        rule="every axis and every step of the scores can be followed",
        observed=f"{node.name} {what}",
        at=node,
        progress=4,
        remedy=_MASK_SCORES,
    )


def _again(mirror: Mirror, node: fx.Node, zeroed: Zeroed, dims: Dims, scores: Scores, key: Dim) -> list[Joined]:
    """Return the masks of the scores by which weights are set to zero, or the only mask, in rows that it leaves without keys."""
    wanted = _bare(mirror, zeroed.condition, zeroed.inverted, node)
    is_only = len(scores.keeps) == 1 and not scores.additive
    if is_only and wanted is not None and wanted[0].node.target is (aten.all.dim if wanted[1] else aten.any.dim):
        wanted = _of_keys(mirror, *wanted, dims, key) or wanted
    return [
        kept
        for kept in scores.keeps
        if _is_same(mirror, _bare(mirror, kept.node, kept.inverted, kept.used), wanted)
        and [*map(axes.resolve, kept.dims)] == [*map(axes.resolve, dims)]
    ]


def _of_keys(mirror: Mirror, rows: Version, inverted: bool, dims: Dims, key: Dim) -> tuple[Version, bool] | None:
    """Return the condition of which `rows` tells whether any key of a row has it, or (inverted) whether all have it."""
    node, condition = rows.node, views.source(rows.node)
    axis = views.named_axes(node, views.value(condition).dim()).pop() - views.value(condition).dim()
    is_of_keys = views.argument(node, "keepdim") and axes.resolve(dims[axis]) == axes.resolve(key)
    return (
        _bare(mirror, condition, inverted, node) if is_of_keys and _is_bool(condition) and rows.since is None else None
    )


def _bare(mirror: Mirror, condition: fx.Node, inverted: bool, reader: fx.Node) -> tuple[Version, bool] | None:
    """Return a condition without negations and casts, as read for `reader`. None if one of these was written to before its read."""
    while (condition.target in _NOT and _is_bool(condition)) or (
        condition.target in _CASTS and _is_bool(views.source(condition))
    ):
        if mutation.version(mirror, condition, mirror.order(reader)).since is not None:
            return None
        inverted ^= condition.target in _NOT
        condition, reader = views.source(condition), condition
    return mutation.version(mirror, condition, mirror.order(reader)), inverted


def _is_same(mirror: Mirror, one: tuple[Version, bool] | None, other: tuple[Version, bool] | None) -> bool:
    if one is None or other is None or one[1] != other[1]:
        return False
    return one[0] == other[0] or equal.are_equal(mirror, one[0].node, other[0].node)


def _is_of_rows(zeroed: Zeroed, dims: Dims, key: Dim) -> bool:
    """Return whether a condition is equal for all keys. A row that it zeroes has all its keys masked."""
    keys, shape = set(axes.resolve(key)), axes.shape_exprs(views.value(zeroed.condition))
    own = dims[len(dims) - len(shape) :] if shape else ()
    return all(size == axes.ONE for dim, size in zip(own, shape, strict=True) if not keys.isdisjoint(axes.resolve(dim)))


def _is_bool(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool
