"""What each op does with the axis of positions: `place` gives where its result holds the sequence, or why it has no place.

RULES has a line for each op, and arguments.py one for what it may be given. Pointwise ops are told by PyTorch's tag, views by
passes/graph/views.py.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from attn_compiler.passes.context_parallel import arguments, lookups
from attn_compiler.passes.context_parallel.places import GIVE_POSITIONS, Mixes, Place, Rule, alike, has, place_of
from attn_compiler.passes.graph import axes, views
from attn_compiler.passes.graph.axes import Dim, Dims

if TYPE_CHECKING:
    from attn_compiler.passes.context_parallel.following import Following

aten = torch.ops.aten


def place(context: Following, node: fx.Node) -> Place | Mixes:
    """The place of a node, whose inputs have one. Raises AxisError where a view splits the sequence."""
    given = [x for x in node.all_input_nodes if isinstance(x.meta.get("val"), (torch.Tensor, tuple, list))]
    # What is written into later, by whatever way, may hold a number for each position.
    is_written = (
        bool(context.mirror.writers_into(node).nodes) if isinstance(node.meta.get("val"), torch.Tensor) else False
    )
    if node.target in _UNIFORM:
        return _of_value(node, is_uniform=not is_written)
    if node.target in _LIKE:
        like = place_of(context, views.source(node))
        return dataclasses.replace(like, is_uniform=like.is_uniform and not is_written, is_share=False)
    if any(place_of(context, x).is_share for x in given):
        return _of_share(context, node, given)
    if not any(context.holds(x) or _holds_several(context, x) for x in given):
        is_uniform = bool(given) and not is_written and all(place_of(context, x).is_uniform for x in given)
        return _of_value(node, is_uniform=is_uniform and _keeps_uniform(node))
    counted = next((x for x in given if context.is_counted(x)), None)
    if counted is not None:
        return Mixes(at=node, why=f"{counted.name} was made of how many positions the rank has", remedy=GIVE_POSITIONS)
    rule = RULES.get(node.target)
    if rule is None and isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags:
        rule = _written if node.target._schema.is_mutable else _pointwise
    if rule is None and views.is_view(node):
        rule = _view
    if rule is None:
        return Mixes(at=node, why="nothing is known of what it does with positions")
    if rule not in (_same, _view, _getitem) and (unknown := arguments.unknown(node)) is not None:
        return unknown
    found = rule(context, node)
    counted = next((x for x in given if context.is_counted(x)), None)
    if counted is not None and isinstance(found, Place):
        return Mixes(at=node, why=f"{counted.name} was made of how many positions the rank has", remedy=GIVE_POSITIONS)
    return found


def _holds_several(context: Following, node: fx.Node) -> bool:
    found = place_of(context, node).several
    return found is not None and any(has(context, dim) for dims in found for dim in dims)


def _of_value(node: fx.Node, *, is_uniform: bool = False) -> Place:
    x = node.meta.get("val")
    if isinstance(x, (tuple, list)):
        several = tuple(axes.fresh(axes.shape_exprs(y)) if isinstance(y, torch.Tensor) else () for y in x)
        return Place(dims=(), several=several, is_uniform=is_uniform)
    dims = axes.fresh(axes.shape_exprs(x)) if isinstance(x, torch.Tensor) else ()
    return Place(dims=dims, is_uniform=is_uniform)


def _of_share(context: Following, node: fx.Node, given: Sequence[fx.Node]) -> Place | Mixes:
    """A share of a sum stays one where the sum over all ranks comes out in the end: under a factor, and beside other shares."""
    shares = [x for x in given if place_of(context, x).is_share]
    others = [x for x in given if x not in shares]
    is_first = node.args and node.args[0] in shares
    is_scaled = node.target in SCALES and len(shares) == 1 and is_first
    is_added = node.target in _ADDS and len(shares) == 2
    is_same = node.target in _SAME - {aten.dropout.default} or views.is_view(node)
    if (is_scaled or is_added or is_same) and not any(context.holds(x) for x in others):
        return dataclasses.replace(_of_value(node), is_share=True)
    return Mixes(
        at=node,
        why="it reads a sum over the rank's own positions, of which every rank has another share",
        remedy="compute the loss of the logits by ContextParallel.mean",
    )


def repeats(node: fx.Node, is_of_repeated: bool) -> bool:
    """Whether a result has the same numbers for each of the rank's positions. is_of_repeated: its operands have, or some of them."""
    return _keeps_uniform(node) if is_of_repeated else node.target in (aten.expand.default, aten.broadcast_to.default)


def _keeps_uniform(node: fx.Node) -> bool:
    if node.target is aten.dropout.default:
        return False
    if isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags:
        return True
    return views.is_view(node) or node.target in _SAME


# ---- rules ---------------------------------------------------------------------------------------------------------------


def _joined(context: Following, node: fx.Node, operands: Sequence[fx.Node], rank: int) -> Dims | Mixes:
    """The axes of what broadcasts these operands."""
    result: list[Dim] = []
    for at in range(rank):
        found: list[tuple[fx.Node, Dim]] = []
        for x in operands:
            known = place_of(context, x)
            own = at - rank + len(known.dims)
            if own >= 0 and not known.is_uniform and not axes.is_unit(known.dims[own]):
                found.append((x, axes.resolve(known.dims[own])))
        tagged = [dim for _, dim in found if has(context, dim)]
        if tagged:
            for x, dim in found:
                if place_of(context, x).is_repeated:
                    continue
                if not has(context, dim):
                    return Mixes(
                        at=node,
                        why=f"{x.name} has numbers for positions that are not those of the sequence",
                        remedy=GIVE_POSITIONS,
                    )
                if not alike(context, dim, tagged[0]):
                    return Mixes(at=node, why="operands meet that hold the sequence in two ways")
        result.append(tagged[0] if tagged else found[0][1] if found else ())
    return tuple(result)


def _pointwise(context: Following, node: fx.Node) -> Place | Mixes:
    operands = [x for x in node.all_input_nodes if isinstance(x.meta.get("val"), torch.Tensor)]
    dims = _joined(context, node, operands, views.value(node).dim())
    if isinstance(dims, Mixes):
        return dims
    held = [atom for dim in dims for atom in axes.resolve(dim) if atom in context.atoms]
    if len(held) != len(set(held)):
        return Mixes(at=node, why="it pairs positions with each other", remedy=None)
    return Place(dims=dims)


def _written(context: Following, node: fx.Node) -> Place | Mixes:
    """A pointwise op in place, on a tensor that holds the sequence already."""
    found = _pointwise(context, node)
    x = views.source(node)
    if isinstance(found, Place) and not context.holds(x):
        return Mixes(at=node, why="it writes positions into a tensor that has none")
    return found


def _same(context: Following, node: fx.Node) -> Place | Mixes:
    return place_of(context, views.source(node))


def _view(context: Following, node: fx.Node) -> Place | Mixes:
    found = views.forward_whole(node, place_of(context, views.source(node)).dims, context.atoms)
    return Mixes(at=node, why="it splits the sequence") if found is None else Place(dims=found)


def _slice(context: Following, node: fx.Node) -> Place | Mixes:
    x = views.source(node)
    if axes.shape_exprs(views.value(x)) == axes.shape_exprs(views.value(node)):
        return place_of(context, x)
    found = _along_dim(context, node)
    if isinstance(found, Mixes):
        return Mixes(
            at=node,
            why="it takes a part of the rank's positions",
            remedy="labels are shifted by ContextParallel.shard: pass shift_labels; and ask for all logits",
        )
    return found


def _along_dim(context: Following, node: fx.Node) -> Place | Mixes:
    """An op along axes that it names: none of them may hold the sequence."""
    place = place_of(context, views.source(node))
    rank = len(place.dims)
    which = views.named_axes(node, rank, "dims" if node.target is aten.flip.default else "dim")
    if any(has(context, place.dims[i]) for i in which):
        return Mixes(at=node, why="it works along the sequence")
    result: Any = node.meta["val"]
    if isinstance(result, (tuple, list)):
        return Place(dims=place.dims, several=tuple(views.kept_axes(place.dims, y, which, rank) for y in result))
    return Place(dims=views.kept_axes(place.dims, result, which, rank))


def _getitem(context: Following, node: fx.Node) -> Place | Mixes:
    x, at = node.args
    if not isinstance(x, fx.Node) or not isinstance(at, int):
        return Mixes(at=node, why="it takes no result of several")
    several = place_of(context, x).several
    return Mixes(at=node, why="it takes no result of several") if several is None else Place(dims=several[at])


def _product(left: int, right: int) -> Rule:
    """A matrix product of two arguments; others are added to it."""

    def rule(context: Following, node: fx.Node) -> Place | Mixes:
        a, b = node.args[left], node.args[right]
        if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
            return Mixes(at=node, why="it is no product of two tensors")
        x, y = place_of(context, a).dims, place_of(context, b).dims
        if len(x) < 2 or len(y) < 2:
            return _with_vector(context, node, x, y)
        if has(context, x[-1]) or has(context, y[-2]):
            return Mixes(at=node, why="it sums over the sequence")
        rows, columns = x[-2], y[-1]
        if has(context, rows) and has(context, columns):
            return Mixes(at=node, why="it pairs positions with each other, and is no attention that was recognised")
        batch = _batch(context, node, x[:-2], y[:-2])
        if isinstance(batch, Mixes):
            return batch
        others = [z for z in node.all_input_nodes if z not in (a, b) and context.holds(z)]
        return Mixes(at=node, why="what is added holds the sequence") if others else Place(dims=(*batch, rows, columns))

    return rule


def _with_vector(context: Following, node: fx.Node, x: Dims, y: Dims) -> Place | Mixes:
    summed = (x[-1], y[-1] if len(y) == 1 else y[-2])
    if any(has(context, dim) for dim in summed):
        return Mixes(at=node, why="it sums over the sequence")
    return Place(dims=x[:-1] if len(y) == 1 else (*y[:-2], y[-1]))


def _batch(context: Following, node: fx.Node, x: Dims, y: Dims) -> Dims | Mixes:
    rank = max(len(x), len(y))
    result: list[Dim] = []
    for at in range(rank):
        found = [dims[at - rank + len(dims)] for dims in (x, y) if at - rank + len(dims) >= 0]
        long = [axes.resolve(dim) for dim in found if not axes.is_unit(dim)]
        tagged = [dim for dim in long if has(context, dim)]
        if tagged and not all(has(context, dim) and alike(context, dim, tagged[0]) for dim in long):
            return Mixes(at=node, why="operands meet that hold the sequence in two ways")
        result.append(tagged[0] if tagged else long[0] if long else ())
    return tuple(result)


def _linear(context: Following, node: fx.Node) -> Place | Mixes:
    x = views.source(node)
    dims = place_of(context, x).dims
    if has(context, dims[-1]):
        return Mixes(at=node, why="it sums over the sequence")
    if any(context.holds(y) for y in node.all_input_nodes if y is not x):
        return Mixes(at=node, why="its weight holds the sequence")
    return Place(dims=(*dims[:-1], *axes.fresh(axes.shape_exprs(views.value(node))[-1:])))


def _normalised(context: Following, node: fx.Node) -> Place | Mixes:
    dims = place_of(context, views.source(node)).dims
    shape: Any = views.argument(node, "normalized_shape")
    if any(has(context, dim) for dim in dims[len(dims) - len(shape) :]):
        return Mixes(at=node, why="it works along the sequence")
    return Place(dims=dims)


def _embedding(context: Following, node: fx.Node) -> Place | Mixes:
    table, ids = node.args[0], node.args[1]
    if not isinstance(table, fx.Node) or not isinstance(ids, fx.Node) or context.holds(table):
        return Mixes(at=node, why="its table holds the sequence")
    last = axes.fresh(axes.shape_exprs(views.value(node))[-1:])
    return Place(dims=(*place_of(context, ids).dims, *last))


def _joined_along(context: Following, node: fx.Node) -> Place | Mixes:
    """cat and stack."""
    parts: Any = node.args[0]
    rank = views.value(node).dim()
    at = int(views.argument(node, "dim", 0) or 0) % rank  # type: ignore[call-overload]
    is_new = node.target is aten.stack.default
    all_dims: list[Dims] = []
    for part in parts:
        dims = place_of(context, part).dims
        if not is_new and (len(dims) != rank or has(context, dims[at])):
            return Mixes(
                at=node, why="it joins tensors along the sequence", remedy="call the model with use_cache=False"
            )
        all_dims.append(dims if is_new else (*dims[:at], *dims[at + 1 :]))
    result: list[Dim] = []
    for group in zip(*all_dims, strict=True):
        tagged = [axes.resolve(dim) for dim in group if has(context, dim)]
        if tagged and not all(has(context, dim) and alike(context, axes.resolve(dim), tagged[0]) for dim in group):
            return Mixes(at=node, why="operands meet that hold the sequence in two ways", remedy=GIVE_POSITIONS)
        result.append(tagged[0] if tagged else group[0])
    result.insert(at, axes.fresh(axes.shape_exprs(views.value(node)))[at])
    return Place(dims=tuple(result))


def _cross_entropy(context: Following, node: fx.Node) -> Place | Mixes:
    """A sum over the rank's positions is its part of the sum over all; a mean is the mean of nothing that is asked for."""
    logits, labels = node.args[0], node.args[1]
    if not isinstance(logits, fx.Node) or not isinstance(labels, fx.Node):
        return Mixes(at=node, why="it reads no tensors")
    classes, of_labels = place_of(context, logits).dims, place_of(context, labels).dims
    if (
        len(classes) != 2
        or has(context, classes[1])
        or not alike(context, axes.resolve(classes[0]), axes.resolve(of_labels[0]))
    ):
        return Mixes(at=node, why="its labels are not those of the positions of its logits")
    if any(context.holds(x) for x in node.all_input_nodes if x not in (logits, labels)):
        return Mixes(at=node, why="its weights hold the sequence")
    reduction = views.argument(node, "reduction", 1)
    if reduction == 0:
        return Place(dims=classes[:1])
    if reduction == 1:
        return Mixes(
            at=node,
            why="it takes the mean over the rank's own positions, of which ranks have different numbers that count",
            remedy="give the number of all tokens (num_items_in_batch in models of transformers), or compute the loss of the logits by "
            "ContextParallel.mean",
        )
    return Place(dims=(), is_share=True)


_UNIFORM = frozenset(
    {aten.full.default, aten.zeros.default, aten.ones.default, aten.scalar_tensor.default, aten.new_zeros.default}
    | {aten.new_ones.default, aten.new_full.default}
)
_LIKE = frozenset({aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default})
_SAME = frozenset(
    {aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.to.other, aten.type_as.default, aten._to_copy.default}
    | {aten.detach.default, aten.alias.default, aten.clone.default, aten.contiguous.default, aten.lift_fresh.default}
    | {aten.dropout.default}
)

#: what multiplies all elements by a number that is the same on all ranks; the other argument may not be a share
SCALES = frozenset({aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default})
_ADDS = frozenset({aten.add.Tensor, aten.sub.Tensor})

RULES: dict[object, Rule] = {
    **dict.fromkeys(_SAME, _same),
    **dict.fromkeys(
        (
            *(aten.softmax.int, aten.log_softmax.int, aten.sum.dim_IntList, aten.mean.dim, aten.amax.default),
            *(aten.amin.default, aten.argmax.default, aten.select.int, aten.split.Tensor, aten.chunk.default),
            *(aten.split_with_sizes.default, aten.unbind.int, aten.glu.default, aten.linalg_vector_norm.default),
            *(aten.norm.ScalarOpt_dim, aten.var.correction, aten.cumsum.default, aten.std.correction),
            *(aten.topk.default, aten.sort.default, aten.narrow.default, aten.max.dim),
            *(aten.min.dim, aten.flip.default, aten.var_mean.correction, aten.var_mean.dim),
        ),
        _along_dim,
    ),
    **dict.fromkeys(
        (aten.masked_fill_.Scalar, aten.masked_fill_.Tensor, aten.fill_.Scalar, aten.copy_.default), _written
    ),
    aten.floor_divide.default: _pointwise,
    aten.bucketize.Tensor: lookups.bucketized,
    aten.index.Tensor: lookups.looked_up,
    aten.index_select.default: lookups.selected,
    aten.gather.default: lookups.gathered,
    aten.einsum.default: lookups.einsum,
    aten.slice.Tensor: _slice,
    aten.embedding.default: _embedding,
    aten.linear.default: _linear,
    aten.matmul.default: _product(0, 1),
    aten.mm.default: _product(0, 1),
    aten.bmm.default: _product(0, 1),
    aten.addmm.default: _product(1, 2),
    aten.baddbmm.default: _product(1, 2),
    aten.layer_norm.default: _normalised,
    aten.rms_norm.default: _normalised,
    aten.cat.default: _joined_along,
    aten.stack.default: _joined_along,
    aten.cross_entropy_loss.default: _cross_entropy,
    operator.getitem: _getitem,
}
