"""Ops that are known to commute with packing: packed(op(x)) = op'(packed(x)).

axis_rules.py says for each op, in one line, which axes of a result hold rows and positions. This file says how an op is done on packed
operands. A rule claims nothing of what a tensor means: any input of (rows, positions, ...) may be seen as one of positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from attn_compiler.lowerings.graph_ops.linear_call import linear_call
from attn_compiler.passes.graph import axes, axis_rules, constants, views
from attn_compiler.passes.graph.axes import Atom, Dim, Dims
from attn_compiler.passes.graph.axis_rules import Mixed
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.unpad.forms import (
    Context,
    Form,
    FormRecipe,
    KeepsPadding,
    Kind,
    Need,
    Value,
    call,
    has_both,
    is_tagged,
    operand_form,
    refused,
    tags,
)
from attn_compiler.reasons.codes import Code

aten = torch.ops.aten


# ---- what stands at padding ------------------------------------------------------------------------------------------


Number = bool | int | float

_LIKE = (aten.zeros_like.default, aten.ones_like.default, aten.full_like.default)
_PRODUCTS = (aten.mul.Tensor, aten.logical_and.default, aten.bitwise_and.Tensor)
_FILLS = (aten.masked_fill.Scalar, aten.masked_fill.Tensor)
_CHOICES = (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
_MOVES = (axis_rules.same, axis_rules.view, axis_rules.slice_, axis_rules.getitem)
#: ops whose result is 0 where the first operand is: a sum of products without a bias, or a number times others
_OF_ZERO = (aten.linear.default, aten.mm.default, aten.matmul.default, aten.dropout.default)


def number_at_padding(context: Context, node: fx.Node, rule: axis_rules.Rule) -> Number | None:
    """Return the number that a result holds at padding; None if it is not known. rule: of the op, for each position by itself."""
    if node.target in _LIKE:
        return of_constant(context.mirror, node)
    if node.target in _OF_ZERO:
        is_zero = context.value(views.source(node)).at_padding == 0 and views.argument(node, "bias") is None
        return _cast(0, node) if is_zero else None
    if rule is axis_rules.joined:
        numbers = {context.value(x).at_padding for x in _tensors(node)}
        return _cast(numbers.pop(), node) if len(numbers) == 1 else None
    if isinstance(node.meta.get("val"), (tuple, list)):
        return context.value(views.source(node)).at_padding
    if rule in _MOVES:
        return _cast(context.value(views.source(node)).at_padding, node)
    if node.target in _PRODUCTS:
        factors = [context.value(x).at_padding for x in _tensors(node)]
        # Padding is taken to hold finite numbers, as everywhere here.
        return _cast(0, node) if 0 in factors else _folded(context, node)
    if node.target in _CHOICES:
        return _chosen(context, node, node.args[0], node.args[1], node.args[2])
    if node.target in _FILLS:
        return _chosen(context, node, node.args[1], node.args[2], node.args[0])
    return _folded(context, node) if rule is axis_rules.pointwise else None


def of_constant(mirror: Mirror, node: fx.Node) -> Number | None:
    """Return the number that all elements of a constant tensor are."""
    return _cast(constants.everywhere(mirror, node), node) if isinstance(node.meta.get("val"), torch.Tensor) else None


def _chosen(context: Context, node: fx.Node, condition: Any, if_true: Any, if_false: Any) -> Number | None:
    met = _number(context, condition)
    return None if met is None else _cast(_number(context, if_true if met else if_false), node)


def _folded(context: Context, node: fx.Node) -> Number | None:
    """Apply the op to the numbers that its operands hold."""
    tensors = _tensors(node)
    numbers = [context.value(x).at_padding for x in tensors]
    are_all = len(tensors) == len(node.all_input_nodes) and all(x is not None and x == x for x in numbers)
    if not tensors or not are_all or draws(node) or not callable(node.target):
        return None
    found = []
    for zero in (0.0, -0.0):
        of = {x: torch.tensor(own or zero, dtype=x.meta["val"].dtype) for x, own in zip(tensors, numbers, strict=True)}
        args, kwargs = fx.map_arg((node.args, node.kwargs), of.__getitem__)
        found.append(node.target(*args, **kwargs))
    are_alike = all(isinstance(x, torch.Tensor) and x.dtype == node.meta["val"].dtype for x in found)
    return (found[0].item() if torch.equal(*found) else math.nan) if are_alike else None


def _tensors(node: fx.Node) -> Sequence[fx.Node]:
    return [x for x in node.all_input_nodes if isinstance(x.meta.get("val"), torch.Tensor)]


def _number(context: Context, x: Any) -> Number | None:
    if isinstance(x, fx.Node):
        return context.value(x).at_padding if isinstance(x.meta.get("val"), torch.Tensor) else None
    return x if isinstance(x, (bool, int, float)) else None


def _cast(number: Number | None, node: fx.Node) -> Number | None:
    """Convert the number to the dtype of a result."""
    x = node.meta.get("val")
    if number is None or number != number or not isinstance(x, torch.Tensor) or x.dtype.is_complex:
        return None
    found: Number = torch.tensor(number, device="cpu").to(x.dtype).item()
    return found


# ---- random numbers: each is drawn once, for real tokens or for all positions ----------------------------------------


_ONCE = "random numbers are drawn once"
_REMEDY = "call the model in eval mode, or do not read in training what is drawn (output_hidden_states=False)"

#: arguments by which an op is told to draw nothing: `F.dropout(x, 0.1, training=False)`
_SWITCHES = ("train", "training", "dropout_p", "p")


def draws(node: fx.Node) -> bool:
    """Return whether a mirror node draws random numbers, with the arguments that it has."""
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    names = {argument.name for argument in node.target._schema.arguments}
    return not any(name in names and views.argument(node, name) in (False, 0) for name in _SWITCHES)


def is_drawn(made: Iterable[Need], context: Context, mirror: Mirror) -> bool:
    """Return whether random numbers are drawn for tokens: other numbers than the model's, from the same distribution."""
    return any(_runs(need, context, mirror) for need in made)


def check_once(made: Collection[Need], context: Context, mirror: Mirror, erased: Collection[fx.Node]) -> None:
    """Raise KeepsPadding if numbers are drawn for real tokens, and again because the model reads all positions.

    made: the forms that were made. erased: nodes of the model's own that are gone.
    """
    for need in made:
        node = need.node
        if not _runs(need, context, mirror):
            continue
        is_gone = mirror.owner(node) in erased
        is_read_twice = need.form == "packed" and Need(node, "plain") in made
        if is_read_twice or not is_gone:
            raise KeepsPadding(
                Code.PADDING_DRAWN, _ONCE, f"{node.name} is read at padding, too", at=node, remedy=_REMEDY
            )


def _runs(need: Need, context: Context, mirror: Mirror) -> bool:
    """Return whether this form of an op that draws is made by running the op, and not from the result of the model's own call."""
    if not draws(need.node):
        return False
    packed = context.value(need.node).packed
    if need.form == "packed" and packed is not None:
        return all(read.node is not need.node for read in packed.needs)
    return need.form == "plain" and mirror.dynamo_node(need.node) is None


@dataclass(frozen=True)
class _Followed:
    """Rows and positions, for the table of all ops."""

    context: Context

    words = "rows or positions"

    @property
    def atoms(self) -> frozenset[Atom]:
        return frozenset((self.context.batch, self.context.seq))

    def axes_of(self, node: fx.Node) -> Value:
        return self.context.value(node)

    def cannot_meet(self, operands: Sequence[tuple[fx.Node, Dim]], *, whole: bool) -> Mixed | None:
        """Refuse operands with rows or positions at different axes. An operand without any is taken at the tokens."""
        known = {tags(self.context, dim) for _, dim in operands if is_tagged(self.context, dim)}
        return Mixed(why="operands meet that have rows or positions at different axes") if len(known) > 1 else None


def packed_result(context: Context, node: fx.Node) -> Value:
    """Return the result of an op. Raises KeepsPadding where it can't be done on packed operands, and AxisError."""
    line = axis_rules.line_of(node)
    if node.target not in axis_rules.RULES and draws(node):
        # The model reads numbers of all positions, which would differ from numbers drawn for real tokens alone.
        raise KeepsPadding(
            Code.PADDING_DRAWN, _ONCE, f"{node.target} draws them for padding, too", at=node, remedy=_REMEDY
        )
    if node.target is linear_call:
        raise refused(node, "the state of linear attention sums up positions, and decays at padding, too")
    if line is None or not line.packs:
        raise refused(node, "nothing is known of it that lets padding be left out")
    if line.rule is axis_rules.pointwise and not isinstance(node.meta.get("val"), torch.Tensor):
        raise refused(node, "it has several results, or one that is no tensor")
    _require(context, node)
    found = line.rule(_Followed(context), node)
    if isinstance(found, Mixed):
        raise refused(node, found.why, found.remedy)
    recipe = _RECIPES_OF_OPS.get(node.target) or _RECIPES.get(line.rule, _of_first)
    packed = recipe(context, node, found.dims) if found.several or has_both(context, found.dims) else None
    number = number_at_padding(context, node, line.rule)
    return Value(kind=Kind.PACKED, dims=found.dims, packed=packed, several=found.several, at_padding=number)


def _require(context: Context, node: fx.Node) -> None:
    """Raise KeepsPadding for arguments with which an op does not work on each position by itself, or that it has no packed form for."""
    target = node.target
    tensors = [x for x in node.args if isinstance(x, fx.Node)]
    if target is aten.embedding.default and views.argument(node, "scale_grad_by_freq"):
        raise refused(node, "gradients are scaled by how often a token occurs, at padding, too")
    if target is aten.matmul.default and views.value(tensors[1]).dim() != 2:
        raise refused(node, "it is a product of two tensors of positions")
    if target is aten.addmm.default and views.value(tensors[0]).dim() != 1:
        raise refused(node, "it adds a tensor of positions")
    if target is aten._int_mm.default and views.value(node).device.type != "cpu":
        raise refused(node, "a product of int8 numbers takes more than 16 rows on a GPU")
    if target is aten.cross_entropy_loss.default:
        if views.argument(node, "reduction") != 0:
            raise refused(node, "it sums over positions")
        if views.value(tensors[1]).dim() != 1:
            raise refused(node, "its labels are no classes")
    moves = target in (aten.type_as.default, aten.to.other)
    if moves and views.value(node).device != views.value(views.source(node)).device:
        raise refused(node, "it moves a tensor to another device")


# ---- ops on packed operands ------------------------------------------------------------------------------------------------

_Recipe = Callable[[Context, fx.Node, Dims], FormRecipe | None]


def _op_on(context: Context, node: fx.Node, x: fx.Node) -> FormRecipe | None:
    """Return the op on one packed operand. No other operand may have rows or positions."""
    if context.value(x).packed is None:
        return None
    for other in node.all_input_nodes:
        value = context.value(other)
        if other is not x and (not value.is_exact or any(is_tagged(context, dim) for dim in value.dims)):
            raise refused(node, f"{other.name}, which is not packed with the others, has rows or positions")
    return call(node, {x: "packed"})


def _of_first(context: Context, node: fx.Node, dims: Dims) -> FormRecipe | None:
    return _op_on(context, node, views.source(node))


def _of_second(context: Context, node: fx.Node, dims: Dims) -> FormRecipe | None:
    return _op_on(context, node, node.all_input_nodes[1])


def _of_all(context: Context, node: fx.Node, dims: Dims) -> FormRecipe | None:
    """Return the op on operands in the forms that the result needs."""
    tensors = [x for x in node.all_input_nodes if isinstance(x.meta.get("val"), torch.Tensor)]
    return call(node, {x: operand_form(context, node, x, dims) for x in tensors})


def _of_stacked(context: Context, node: fx.Node, dims: Dims) -> FormRecipe | None:
    """Return the op on operands that have all axes of the result but the new one."""
    at = int(views.argument(node, "dim", 0) or 0) % len(dims)  # type: ignore[call-overload]
    return _of_all(context, node, (*dims[:at], *dims[at + 1 :]))


def _of_losses(context: Context, node: fx.Node, dims: Dims) -> FormRecipe | None:
    logits, labels = node.all_input_nodes[:2]
    if context.value(logits).packed is None:
        return None
    forms: dict[fx.Node, Form] = {logits: "packed", labels: operand_form(context, node, labels, dims)}
    return call(node, forms)


def _made(context: Context, node: fx.Node, make: Callable[[Any, fx.Node], fx.Node]) -> FormRecipe | None:
    x = views.source(node)
    if context.value(x).packed is None:
        return None
    return FormRecipe(needs=(Need(x, "packed"),), make=lambda maker, given: make(maker, given[0]))


def _of_view(context: Context, node: fx.Node, dims: Dims) -> FormRecipe | None:
    """Return the view with the result's sizes, also for a squeeze: the packed axis of rows has size one."""
    if node.target not in (*views.RESHAPES, *views.EXPANDS, *views.SQUEEZES):
        return _of_first(context, node, dims)
    target = aten.expand.default if node.target in views.EXPANDS else aten.reshape.default
    return _made(context, node, lambda maker, x: maker.call(target, x, maker.sizes(dims)))


def _of_slice(context: Context, node: fx.Node, dims: Dims) -> FormRecipe | None:
    if axes.shape_exprs(views.value(views.source(node))) != axes.shape_exprs(views.value(node)):
        return _of_first(context, node, dims)
    return _made(context, node, lambda maker, x: x)


def _of_cast(context: Context, node: fx.Node, dims: Dims) -> FormRecipe | None:
    """Return the cast to another tensor's dtype, of which no element is read."""
    dtype = views.value(node).dtype
    return _made(context, node, lambda maker, x: maker.call(aten.to.dtype, x, dtype))


_RECIPES: dict[axis_rules.Rule, _Recipe] = {
    axis_rules.pointwise: _of_all,
    axis_rules.joined: _of_all,
    axis_rules.view: _of_view,
    axis_rules.slice_: _of_slice,
    axis_rules.embedding: _of_second,
    axis_rules.losses: _of_losses,
}
_RECIPES_OF_OPS: dict[object, _Recipe] = {
    aten.type_as.default: _of_cast,
    aten.to.other: _of_cast,
    aten.addmm.default: _of_second,
    aten.stack.default: _of_stacked,
}
