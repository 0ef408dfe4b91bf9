"""The effect of each op on the axis of positions: `place` tells where its result holds the sequence, or why it has no place.

axis_rules.py has a line for each op, and TAKEN one for its arguments. This file adds the questions of ranks: values that are the
same number everywhere, shares of a sum, and writes in place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from attn_compiler.lowerings.graph_ops.linear_call import linear_call
from attn_compiler.passes.context_parallel.places import GIVE_POSITIONS, Mixes, Place, Places, Sequences, has, place_of
from attn_compiler.passes.graph import axes, axis_rules, views

aten = torch.ops.aten


# ---- arguments that a rule takes -------------------------------------------------------------------------------------


_ALONG = frozenset({"self", "dim", "dims", "keepdim", "dtype"})

#: op -> names of its arguments
TAKEN: Mapping[object, frozenset[str]] = {
    **dict.fromkeys((aten.softmax.int, aten.log_softmax.int, aten.cumsum.default), _ALONG),
    **dict.fromkeys((aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default), _ALONG),
    **dict.fromkeys((aten.argmax.default, aten.max.dim, aten.min.dim, aten.flip.default, aten.glu.default), _ALONG),
    **dict.fromkeys((aten.var.correction, aten.std.correction), _ALONG | {"correction"}),
    aten.var_mean.correction: _ALONG | {"correction"},
    **dict.fromkeys((aten.var_mean.dim, aten.var.dim, aten.std.dim), _ALONG | {"unbiased"}),
    aten.linalg_vector_norm.default: _ALONG | {"ord"},
    aten.norm.ScalarOpt_dim: _ALONG | {"p"},
    aten.select.int: frozenset({"self", "dim", "index"}),
    aten.narrow.default: frozenset({"self", "dim", "start", "length"}),
    aten.slice.Tensor: frozenset({"self", "dim", "start", "end", "step"}),
    aten.split.Tensor: frozenset({"self", "split_size", "dim"}),
    aten.split_with_sizes.default: frozenset({"self", "split_sizes", "dim"}),
    aten.chunk.default: frozenset({"self", "chunks", "dim"}),
    aten.unbind.int: frozenset({"self", "dim"}),
    aten.topk.default: frozenset({"self", "k", "dim", "largest", "sorted"}),
    aten.sort.default: frozenset({"self", "dim", "descending"}),
    aten.masked_fill_.Scalar: frozenset({"self", "mask", "value"}),
    aten.masked_fill_.Tensor: frozenset({"self", "mask", "value"}),
    aten.fill_.Scalar: frozenset({"self", "value"}),
    aten.copy_.default: frozenset({"self", "src", "non_blocking"}),
    aten.floor_divide.default: frozenset({"self", "other"}),
    **dict.fromkeys(
        (aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar), frozenset({"condition", "self", "other"})
    ),
    aten.bucketize.Tensor: frozenset({"self", "boundaries", "out_int32", "right"}),
    aten.index.Tensor: frozenset({"self", "indices"}),
    aten.index_select.default: frozenset({"self", "dim", "index"}),
    aten.gather.default: frozenset({"self", "dim", "index", "sparse_grad"}),
    aten.einsum.default: frozenset({"equation", "tensors"}),
    # scale_grad_by_freq is refused: it would count the tokens of one rank.
    aten.embedding.default: frozenset({"weight", "indices", "padding_idx", "sparse"}),
    aten.linear.default: frozenset({"input", "weight", "bias"}),
    aten.matmul.default: frozenset({"self", "other"}),
    **dict.fromkeys((aten.mm.default, aten._int_mm.default, aten.bmm.default), frozenset({"self", "mat2"})),
    aten._weight_int8pack_mm.default: frozenset({"self", "mat2", "scales"}),
    aten.addmm.default: frozenset({"self", "mat1", "mat2", "beta", "alpha"}),
    aten.baddbmm.default: frozenset({"self", "batch1", "batch2", "beta", "alpha"}),
    aten.layer_norm.default: frozenset({"input", "normalized_shape", "weight", "bias", "eps", "cudnn_enable"}),
    aten.rms_norm.default: frozenset({"input", "normalized_shape", "weight", "eps"}),
    **dict.fromkeys((aten.cat.default, aten.concatenate.default, aten.concat.default), frozenset({"tensors", "dim"})),
    aten.stack.default: frozenset({"tensors", "dim"}),
    # `weight` has one number for each class.
    aten.cross_entropy_loss.default: frozenset(
        {"self", "target", "weight", "reduction", "ignore_index", "label_smoothing"}
    ),
}

#: types of arguments that do not make a pointwise op mix elements
_OF_ELEMENTS = ("Tensor", "number", "float", "int", "bool", "str", "ScalarType", "MemoryFormat", "Device", "Layout")


def unknown(node: fx.Node) -> Mixes | None:
    """Return the first argument of an op that is not known to leave each position to itself."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return None
    taken = TAKEN.get(node.target)
    for at, argument in enumerate(schema.arguments):
        given: Any = node.args[at] if at < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
        is_default = argument.has_default_value() and given == argument.default_value
        if not is_default and not (_is_of_elements(argument) if taken is None else argument.name in taken):
            return Mixes(at=node, why=f"nothing is known of what {argument.name}={given} does with positions")
    return None


def _is_of_elements(argument: Any) -> bool:
    return str(argument.type).removeprefix("Optional[").removesuffix("]").removesuffix("?") in _OF_ELEMENTS


def place(context: Places, node: fx.Node) -> Place | Mixes:
    """Return the place of a node, whose inputs have one. Raises AxisError where a view splits the sequence."""
    given = [x for x in node.all_input_nodes if isinstance(x.meta.get("val"), (torch.Tensor, tuple, list))]
    # A tensor that is written into later may hold a number for each position.
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
    if node.target is linear_call:
        return Mixes(at=node, why="the state of linear attention sums up the positions of the ranks before")
    line = axis_rules.line_of(node)
    if line is None:
        return Mixes(at=node, why="nothing is known of what it does with positions")
    if line.rule not in TAKES_ANY and (other := unknown(node)) is not None:
        return other
    found = _ruled(context, node, line.rule)
    counted = next((x for x in given if context.is_counted(x)), None)
    if counted is not None and isinstance(found, Place):
        return Mixes(at=node, why=f"{counted.name} was made of how many positions the rank has", remedy=GIVE_POSITIONS)
    return found


def _holds_several(context: Places, node: fx.Node) -> bool:
    found = place_of(context, node).several
    return found is not None and any(has(context, dim) for dims in found for dim in dims)


def _of_value(node: fx.Node, *, is_uniform: bool = False) -> Place:
    x = node.meta.get("val")
    if isinstance(x, (tuple, list)):
        several = tuple(axes.fresh(axes.shape_exprs(y)) if isinstance(y, torch.Tensor) else () for y in x)
        return Place(dims=(), several=several, is_uniform=is_uniform)
    dims = axes.fresh(axes.shape_exprs(x)) if isinstance(x, torch.Tensor) else ()
    return Place(dims=dims, is_uniform=is_uniform)


def _of_share(context: Places, node: fx.Node, given: Sequence[fx.Node]) -> Place | Mixes:
    """Keep a share of a sum one where the sum over all ranks will be right: under a factor, and beside other shares."""
    shares = [x for x in given if place_of(context, x).is_share]
    others = [x for x in given if x not in shares]
    is_first = node.args and node.args[0] in shares
    is_scaled = node.target in SCALES and len(shares) == 1 and is_first
    is_added = node.target in _ADDS and len(shares) == 2
    is_same = (_is_same(node) and node.target is not aten.dropout.default) or views.is_view(node)
    if (is_scaled or is_added or is_same) and not any(context.holds(x) for x in others):
        return dataclasses.replace(_of_value(node), is_share=True)
    return Mixes(
        at=node,
        why="it reads a sum over the rank's own positions, of which every rank has another share",
        remedy="compute the loss of the logits by ContextParallel.mean",
    )


def repeats(node: fx.Node, is_of_repeated: bool) -> bool:
    """Return whether a result has the same numbers for each of the rank's positions. is_of_repeated: some of its operands have."""
    return _keeps_uniform(node) if is_of_repeated else node.target in (aten.expand.default, aten.broadcast_to.default)


def _keeps_uniform(node: fx.Node) -> bool:
    if node.target is aten.dropout.default:
        return False
    if isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags:
        return True
    return views.is_view(node) or _is_same(node)


def _is_same(node: fx.Node) -> bool:
    line = axis_rules.RULES.get(node.target)
    return line is not None and line.rule is axis_rules.same


def _ruled(context: Places, node: fx.Node, rule: axis_rules.Rule) -> Place | Mixes:
    found = rule(Sequences(context), node)
    if isinstance(found, axis_rules.Mixed):
        if node.target is aten.slice.Tensor:
            return Mixes(at=node, why="it takes a part of the rank's positions", remedy=_SHIFTED)
        return Mixes(at=node, why=found.why, remedy=found.remedy)
    is_mutable = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    if is_mutable and not context.holds(views.source(node)):
        return Mixes(at=node, why="it writes positions into a tensor that has none")
    if node.target is aten.cross_entropy_loss.default:
        return _added_up(node, Place(dims=found.dims))
    return Place(dims=found.dims, several=found.several)


def _added_up(node: fx.Node, losses: Place) -> Place | Mixes:
    """Place a loss: the sum over the rank's positions is a share of the whole sum. A mean over them is refused."""
    reduction = views.argument(node, "reduction", 1)
    if reduction == 1:
        return Mixes(
            at=node,
            why="it takes the mean over the rank's own positions, of which ranks have different numbers that count",
            remedy="give the number of all tokens (num_items_in_batch in models of transformers), or compute the loss of the logits by "
            "ContextParallel.mean",
        )
    return losses if reduction == 0 else Place(dims=(), is_share=True)


_SHIFTED = "labels are shifted by ContextParallel.shard: pass shift_labels; and ask for all logits"
#: rules of ops whose arguments all leave each position to itself
TAKES_ANY = (axis_rules.same, axis_rules.view, axis_rules.getitem)
_UNIFORM = frozenset(
    {aten.full.default, aten.zeros.default, aten.ones.default, aten.scalar_tensor.default, aten.new_zeros.default}
    | {aten.new_ones.default, aten.new_full.default}
)
_LIKE = frozenset({aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default})
#: ops that scale all elements by a number that is the same on all ranks; the other argument may not be a share
SCALES = frozenset({aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default})
_ADDS = frozenset({aten.add.Tensor, aten.sub.Tensor})
