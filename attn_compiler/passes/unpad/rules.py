"""Ops that are known to commute with packing: packed(op(x)) = op'(packed(x)).

axis_rules.py says for each op, in one line, which axes of a result hold rows and positions. This file says how an op is done on packed
operands. A rule claims nothing of what a tensor means: any input of (rows, positions, ...) may be seen as one of positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from attn_compiler.lowerings.graph_ops.linear_call import linear_call
from attn_compiler.passes.graph import axes, axis_rules, views
from attn_compiler.passes.graph.axes import Atom, Dim, Dims
from attn_compiler.passes.graph.axis_rules import Mixed
from attn_compiler.passes.unpad import at_padding, drawing
from attn_compiler.passes.unpad.forms import Context, call, has_both, is_tagged, operand_form, refused, tags
from attn_compiler.passes.unpad.refusing import KeepsPadding
from attn_compiler.passes.unpad.values import Form, FormRecipe, Need, Value
from attn_compiler.reasons.codes import Code

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class Result:
    """The packed result of an op. dims: its axes. packed: its recipe for real tokens; None if nothing of it is by position.

    several: the axes of each result of an op that has several. at_padding: as in `Value`.
    """

    dims: Dims
    packed: FormRecipe | None = None
    several: tuple[Dims, ...] | None = None
    at_padding: bool | int | float | None = None


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


def packed_result(context: Context, node: fx.Node) -> Result:
    """Return the result of an op. Raises KeepsPadding where it can't be done on packed operands, and AxisError."""
    line = axis_rules.line_of(node)
    if node.target not in axis_rules.RULES and drawing.draws(node):
        # The model reads numbers of all positions, which would differ from numbers drawn for real tokens alone.
        raise KeepsPadding(
            Code.PADDING_DRAWN,
            drawing.ONCE,
            f"{node.target} draws them for padding, too",
            at=node,
            remedy=drawing.REMEDY,
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
    number = at_padding.number_at_padding(context, node, line.rule)
    return Result(dims=found.dims, packed=packed, several=found.several, at_padding=number)


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
}
