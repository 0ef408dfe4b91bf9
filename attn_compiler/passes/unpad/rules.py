"""What is known to commute with packing, op by op: packed(op(x)) = op'(packed(x)). RULES is the table, with a line for each op.

A rule says what the axes of the result are, and how the op is done on packed operands; or it raises KeepsPadding. It claims nothing of
what a tensor means: any input of (rows, positions, ...) may be seen as one of positions, and the rules alone decide.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from attn_compiler.passes.graph import axes, views
from attn_compiler.passes.graph.axes import AxisError, Dim, Dims
from attn_compiler.passes.unpad import drawing
from attn_compiler.passes.unpad.forms import Context, call, has_both, is_tagged, operand_form, refused, tags
from attn_compiler.passes.unpad.refusing import KeepsPadding
from attn_compiler.passes.unpad.values import Form, FormRecipe, Need
from attn_compiler.reasons.codes import Code

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class Result:
    """dims: of the op's result. packed: how it is made for real tokens; None if nothing of it is by position. several: the axes of
    each result of an op that has several. zero: 0 at padding."""

    dims: Dims
    packed: FormRecipe | None = None
    several: tuple[Dims, ...] | None = None
    zero: bool = False


Rule = Callable[[Context, fx.Node], Result]


def rule_of(node: fx.Node) -> Rule:
    """The line of the table; pointwise ops are told by PyTorch's tags. Raises KeepsPadding where there is no rule."""
    found = RULES.get(node.target)
    if found is not None:
        return found
    if drawing.draws(node):
        # Drawn for real tokens alone, its numbers would be others than those that the model reads of all positions.
        raise KeepsPadding(
            Code.PADDING_DRAWN,
            drawing.ONCE,
            f"{node.target} draws them for padding, too",
            at=node,
            remedy=drawing.REMEDY,
        )
    if not isinstance(node.meta.get("val"), torch.Tensor):
        raise refused(node, "it has several results, or one that is no tensor")
    if torch.Tag.pointwise not in getattr(node.target, "tags", ()) or node.target._schema.is_mutable:  # type: ignore[union-attr]
        raise refused(node, "nothing is known of it that lets padding be left out")
    return pointwise


# ---- the rules -----------------------------------------------------------------------------------------------------------


def _joined(context: Context, node: fx.Node, operands: Sequence[fx.Node]) -> Dims:
    """The axes of what broadcasts these operands."""
    rank = views.value(node).dim()
    result: list[Dim] = []
    for at in range(rank):
        found: list[Dim] = []
        for x in operands:
            dims = context.value(x).dims
            own = at - rank + len(dims)
            if own >= 0 and (not axes.is_unit(dims[own]) or is_tagged(context, dims[own])):
                found.append(axes.resolve(dims[own]))
        tagged = [dim for dim in found if is_tagged(context, dim)]
        if len({tags(context, dim) for dim in tagged}) > 1:
            raise refused(node, "operands meet that have rows or positions at different axes")
        result.append(tagged[0] if tagged else found[0] if found else ())
    return tuple(result)


def pointwise(context: Context, node: fx.Node) -> Result:
    operands = [x for x in node.all_input_nodes if isinstance(x.meta.get("val"), torch.Tensor)]
    dims = _joined(context, node, operands)
    known = [atom for dim in dims for atom in axes.resolve(dim)]
    if known.count(context.batch) > 1 or known.count(context.seq) > 1:
        raise refused(node, "the result has two axes of rows or of positions")
    zero = node.target is aten.mul.Tensor and any(context.value(x).zero for x in operands)
    if not has_both(context, dims):
        return Result(dims=dims, zero=zero)
    forms = {x: operand_form(context, node, x, dims) for x in operands}
    return Result(dims=dims, packed=call(node, forms), zero=zero)


def _packed(context: Context, node: fx.Node, x: fx.Node, dims: Dims, **changed: Any) -> FormRecipe | None:
    """The op itself on packed x."""
    value = context.value(x)
    if value.packed is None or not has_both(context, dims):
        return None
    _require_untagged(context, node, [y for y in node.all_input_nodes if y is not x])
    return call(node, {x: "packed"}, **changed)


def _require_untagged(context: Context, node: fx.Node, others: Sequence[fx.Node]) -> None:
    for other in others:
        value = context.value(other)
        if not value.is_exact or any(is_tagged(context, dim) for dim in value.dims):
            raise refused(node, f"{other.name}, which is no first operand, has rows or positions")


def same(context: Context, node: fx.Node) -> Result:
    x = views.source(node)
    value = context.value(x)
    return Result(dims=value.dims, packed=_packed(context, node, x, value.dims), zero=value.zero)


def cast_like(context: Context, node: fx.Node) -> Result:
    """To the dtype of another tensor, of which no element is read."""
    x, dtype = views.source(node), views.value(node).dtype
    value = context.value(x)
    if views.value(node).device != views.value(x).device:
        raise refused(node, "it moves a tensor to another device")
    if value.packed is None or not has_both(context, value.dims):
        return Result(dims=value.dims, zero=value.zero)

    def make(maker: Any, given: tuple[fx.Node, ...]) -> fx.Node:
        made: fx.Node = maker.call(aten.to.dtype, given[0], dtype)
        return made

    return Result(dims=value.dims, packed=FormRecipe(needs=(Need(x, "packed"),), make=make), zero=value.zero)


def view(context: Context, node: fx.Node) -> Result:
    """The rule of all ops that views.py knows. A view that would split rows or positions is refused."""
    x = views.source(node)
    value = context.value(x)
    own = _forward(context, node, value.dims)
    # A squeeze, too: the packed axis of rows has size one.
    reshapes = node.target in (*views.RESHAPES, *views.EXPANDS, *views.SQUEEZES)
    if not has_both(context, own):
        return Result(dims=own, zero=value.zero)
    if not reshapes:
        return Result(dims=own, packed=_packed(context, node, x, own), zero=value.zero)
    if value.packed is None:
        return Result(dims=own, zero=value.zero)
    target = aten.expand.default if node.target in views.EXPANDS else aten.reshape.default

    def make(maker: Any, given: tuple[fx.Node, ...]) -> fx.Node:
        made: fx.Node = maker.call(target, given[0], maker.sizes(own))
        return made

    return Result(dims=own, packed=FormRecipe(needs=(Need(x, "packed"),), make=make), zero=value.zero)


def _forward(context: Context, node: fx.Node, dims: Dims) -> Dims:
    found = views.forward_whole(node, dims, (context.batch, context.seq))
    if found is None:
        raise AxisError(f"{node.target} splits rows or positions")
    return found


def slice_(context: Context, node: fx.Node) -> Result:
    x = views.source(node)
    if axes.shape_exprs(views.value(x)) == axes.shape_exprs(views.value(node)):
        value = context.value(x)
        alias = None if value.packed is None else FormRecipe(needs=(Need(x, "packed"),), make=lambda _, given: given[0])
        return Result(dims=value.dims, packed=alias, zero=value.zero)
    return along_dim(context, node)


def embedding(context: Context, node: fx.Node) -> Result:
    table, ids = node.args[0], node.args[1]
    if not isinstance(table, fx.Node) or not isinstance(ids, fx.Node):
        raise refused(node, "no tensors")
    if views.argument(node, "scale_grad_by_freq"):
        raise refused(node, "gradients are scaled by how often a token occurs, at padding, too")
    value = context.value(ids)
    _require_untagged(context, node, [table])
    dims = (*value.dims, *axes.fresh(axes.shape_exprs(views.value(node))[-1:]))
    if value.packed is None or not has_both(context, dims):
        return Result(dims=dims)
    return Result(dims=dims, packed=call(node, {ids: "packed"}))


def _mixing_last(count: Callable[[fx.Node], int]) -> Rule:
    """An op that mixes its operand's last axes, with weights that all positions share."""

    def rule(context: Context, node: fx.Node) -> Result:
        x = views.source(node)
        value, k = context.value(x), count(node)
        if any(is_tagged(context, dim) for dim in value.dims[len(value.dims) - k :]):
            raise refused(node, "it mixes positions")
        dims = (*value.dims[:-k], *axes.fresh(axes.shape_exprs(views.value(node))[-k:]))
        return Result(dims=dims, packed=_packed(context, node, x, dims))

    return rule


def _normalised(node: fx.Node) -> int:
    shape: Any = views.argument(node, "normalized_shape")
    return len(shape)


def matmul(context: Context, node: fx.Node) -> Result:
    """A product with a matrix that all positions share."""
    x, weight = node.args[0], node.args[1]
    if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node) or views.value(weight).dim() != 2:
        raise refused(node, "it is a product of two tensors of positions")
    return _mixing_last(lambda _: 1)(context, node)


def addmm(context: Context, node: fx.Node) -> Result:
    """bias + x @ weight, as GPT-2's layers have it."""
    bias, x, weight = node.args[0], node.args[1], node.args[2]
    if not isinstance(x, fx.Node) or not isinstance(bias, fx.Node) or not isinstance(weight, fx.Node):
        raise refused(node, "no tensors")
    value = context.value(x)
    if is_tagged(context, value.dims[1]) or views.value(bias).dim() != 1:
        raise refused(node, "it mixes positions")
    dims = (value.dims[0], *axes.fresh(axes.shape_exprs(views.value(node))[-1:]))
    return Result(dims=dims, packed=_packed(context, node, x, dims))


def along_dim(context: Context, node: fx.Node) -> Result:
    """An op along axes that it names: none of them may hold rows or positions."""
    x = views.source(node)
    value = context.value(x)
    rank = len(value.dims)
    which = views.named_axes(node, rank)
    if any(is_tagged(context, value.dims[i]) for i in which):
        raise refused(node, "it works along rows or positions")
    result: Any = node.meta["val"]
    if isinstance(result, (tuple, list)):
        several = tuple(views.kept_axes(value.dims, y, which, rank) for y in result)
        packed = _packed(context, node, x, value.dims)
        return Result(dims=value.dims, packed=packed, several=several, zero=value.zero)
    dims = views.kept_axes(value.dims, result, which, rank)
    zero = value.zero and node.target is aten.slice.Tensor
    return Result(dims=dims, packed=_packed(context, node, x, dims), zero=zero)


def getitem(context: Context, node: fx.Node) -> Result:
    x, place = node.args
    if not isinstance(x, fx.Node) or not isinstance(place, int):
        raise refused(node, "no tensor of several")
    value = context.value(x)
    if value.several is None:
        raise refused(node, "no tensor of several")
    dims = value.several[place]
    has = value.packed is not None and has_both(context, dims)
    return Result(dims=dims, packed=call(node, {x: "packed"}) if has else None, zero=value.zero)


def cat(context: Context, node: fx.Node) -> Result:
    """Tensors of the same positions one beside the other."""
    parts: Any = node.args[0]
    rank = views.value(node).dim()
    at = int(views.argument(node, "dim", 0) or 0) % rank  # type: ignore[call-overload]
    if any(len(context.value(part).dims) != rank for part in parts):
        raise refused(node, "tensors of another rank are joined")
    trimmed = [tuple(() if i == at else dim for i, dim in enumerate(context.value(part).dims)) for part in parts]
    if any(is_tagged(context, context.value(part).dims[at]) for part in parts):
        raise refused(node, "it joins tensors along rows or positions", "call the model with use_cache=False")
    dims = list(_common(context, node, trimmed))
    dims[at] = axes.fresh(axes.shape_exprs(views.value(node)))[at]
    result = tuple(dims)
    if not has_both(context, result):
        return Result(dims=result)
    forms = {part: operand_form(context, node, part, result) for part in parts}
    return Result(dims=result, packed=call(node, forms))


def _common(context: Context, node: fx.Node, all_dims: Sequence[Dims]) -> Dims:
    result = []
    for group in zip(*all_dims, strict=True):
        tagged = [dim for dim in group if is_tagged(context, dim)]
        if len({tags(context, dim) for dim in tagged}) > 1:
            raise refused(node, "operands meet that have rows or positions at different axes")
        result.append(tagged[0] if tagged else group[0])
    return tuple(result)


def row_losses(context: Context, node: fx.Node) -> Result:
    """A loss of each position by itself (`reduction="none"`)."""
    logits, labels = node.args[0], node.args[1]
    if views.argument(node, "reduction") != 0:
        raise refused(node, "it sums over positions")
    if not isinstance(logits, fx.Node) or not isinstance(labels, fx.Node):
        raise refused(node, "no tensors")
    value = context.value(logits)
    if len(value.dims) != 2 or is_tagged(context, value.dims[1]) or views.value(labels).dim() != 1:
        raise refused(node, "classes are not the second of two axes")
    dims = value.dims[:1]
    if value.packed is None or not has_both(context, dims):
        return Result(dims=dims)
    forms: dict[fx.Node, Form] = {logits: "packed", labels: operand_form(context, node, labels, dims)}
    return Result(dims=dims, packed=call(node, forms))


_last_one = _mixing_last(lambda _: 1)
_last_normalised = _mixing_last(_normalised)

RULES: dict[object, Rule] = {
    **dict.fromkeys(
        (
            *(*views.PERMUTES, *views.RESHAPES, *views.SQUEEZES, *views.EXPANDS),
            *(aten.unsqueeze.default, aten.repeat_interleave.self_int),
        ),
        view,
    ),
    **dict.fromkeys(
        (
            *(aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten._to_copy.default, aten.detach.default),
            *(aten.alias.default, aten.clone.default, aten.contiguous.default, aten.lift_fresh.default),
            aten.dropout.default,
        ),
        same,
    ),
    **dict.fromkeys(
        (
            *(aten.softmax.int, aten.log_softmax.int, aten.sum.dim_IntList, aten.mean.dim, aten.amax.default),
            *(aten.amin.default, aten.argmax.default, aten.select.int, aten.split.Tensor, aten.chunk.default),
            *(aten.split_with_sizes.default, aten.unbind.int, aten.glu.default, aten.linalg_vector_norm.default),
            *(aten.norm.ScalarOpt_dim, aten.var.correction, aten.cumsum.default, aten.std.correction),
        ),
        along_dim,
    ),
    aten.type_as.default: cast_like,
    aten.to.other: cast_like,
    aten.slice.Tensor: slice_,
    aten.embedding.default: embedding,
    aten.linear.default: _last_one,
    aten.matmul.default: matmul,
    aten.addmm.default: addmm,
    aten.layer_norm.default: _last_normalised,
    aten.rms_norm.default: _last_normalised,
    aten.cat.default: cat,
    aten.cross_entropy_loss.default: row_losses,
    operator.getitem: getitem,
}
