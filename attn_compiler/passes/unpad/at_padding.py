"""The known number that a value holds at padding, followed op by op from the mask's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from attn_compiler.passes.graph import axis_rules, constants, views
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.unpad.forms import Context

aten = torch.ops.aten
Number = bool | int | float

_LIKE = (aten.zeros_like.default, aten.ones_like.default, aten.full_like.default)
_PRODUCTS = (aten.mul.Tensor, aten.logical_and.default, aten.bitwise_and.Tensor)
_FILLS = (aten.masked_fill.Scalar, aten.masked_fill.Tensor)
_CHOICES = (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
_MOVES = (axis_rules.same, axis_rules.view, axis_rules.slice_, axis_rules.getitem)


def number_at_padding(context: Context, node: fx.Node, rule: axis_rules.Rule) -> Number | None:
    """Return the number that a result holds at padding; None if it is not known. rule: of the op, for each position by itself."""
    if node.target in _LIKE:
        return of_constant(context.mirror, node)
    if rule in _MOVES or isinstance(node.meta.get("val"), (tuple, list)):
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
    numbers = {x: context.value(x).at_padding for x in tensors}
    is_random = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
    others = [x for x in node.all_input_nodes if x not in numbers]
    if not tensors or others or is_random or None in numbers.values() or not callable(node.target):
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: torch.tensor(numbers[x], dtype=x.meta["val"].dtype))
    found = node.target(*args, **kwargs)
    return found.item() if isinstance(found, torch.Tensor) and found.dtype == node.meta["val"].dtype else None


def _tensors(node: fx.Node) -> Sequence[fx.Node]:
    return [x for x in node.all_input_nodes if isinstance(x.meta.get("val"), torch.Tensor)]


def _number(context: Context, x: Any) -> Number | None:
    if isinstance(x, fx.Node):
        return context.value(x).at_padding if isinstance(x.meta.get("val"), torch.Tensor) else None
    return x if isinstance(x, (bool, int, float)) else None


def _cast(number: Number | None, node: fx.Node) -> Number | None:
    """Convert the number to the dtype of a result."""
    x = node.meta.get("val")
    if number is None or not isinstance(x, torch.Tensor) or x.dtype.is_complex:
        return None
    found: Number = torch.tensor(number, device="cpu").to(x.dtype).item()
    return found
