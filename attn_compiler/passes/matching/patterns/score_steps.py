"""Ops allowed between q kᵀ and the softmax: one small reader for each op, in one table.

A reader takes one mirror node, and returns the input that carries the scores and the change to them. Several results mean several possible
paths upward. No result means that the op is not understood here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import fx

from attn_compiler.passes.graph import axes, constants, mutation, views
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.views import argument, value
from attn_compiler.passes.matching import operands
from attn_compiler.passes.matching.patterns.steps import (
    Add,
    Cast,
    Change,
    Clamp,
    Keep,
    Offset,
    RuntimeScale,
    Scale,
    Shift,
    SinkColumn,
    Step,
    View,
)
from attn_compiler.spec.scores import Softcap

aten = torch.ops.aten

#: An added number counts as a mask from float16's lowest number down. Above it, the score still matters beside the number.
MASKED_BELOW = -65504.0

#: A score replaced by a number above this keeps a weight beside a score of 0. Below it, the other numbers decide if it masks (fills.py).
MAY_MASK_BELOW = -110.0

#: Masked scores must stay below this after later scales: 1 / sqrt(1024) is allowed
STILL_MASKED_BELOW = MASKED_BELOW / 32


#: An added number up to this keeps a score's significant digits in float32, and keeps a mask a mask
_MOST_ADDED = 1024.0

MAXIMA = frozenset({aten.maximum.default, aten.max.other})
Reader = Callable[[Mirror, fx.Node], list[Step]]


def read(mirror: Mirror, node: fx.Node) -> list[Step]:
    """Return every reading of `node` as a step on the scores; empty if there is none."""
    if views.is_view(node):
        return [View(node=node, source=views.source(node))]
    reader = READERS.get(node.target)
    steps = reader(mirror, node) if reader is not None else []
    return [s for s in steps if isinstance(s, SinkColumn) or _carries_scores(s)]


def _scale(mirror: Mirror, node: fx.Node) -> list[Step]:
    known = operands.scale_of(mirror, node)
    if known is not None:
        return [Scale(node=node, source=known[0], factor=known[1])]
    left, right = node.args[:2]
    divide = operands.SCALES[node.target]
    steps: list[Step] = []
    if isinstance(left, fx.Node) and isinstance(right, fx.Node):
        steps.append(RuntimeScale(node=node, source=left, by=right, divide=divide))
        if not divide and not mutation.writes(node):
            steps.append(RuntimeScale(node=node, source=right, by=left, divide=False))
    return steps


def _negated(mirror: Mirror, node: fx.Node) -> list[Step]:
    return [Scale(node=node, source=views.source(node), factor=-1.0)]


def _add(mirror: Mirror, node: fx.Node) -> list[Step]:
    left, right = node.args[:2]
    alpha = constants.number(mirror, argument(node, "alpha"))
    if alpha is None or not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
        return _offset(node, alpha)
    steps: list[Step] = [*_blended(mirror, node, alpha), Add(node=node, source=left, term=right, weight=alpha)]
    if alpha == 1.0 and not str(node.target).startswith("aten.add_"):
        steps.append(Add(node=node, source=right, term=left))
    return steps


def _sub(mirror: Mirror, node: fx.Node) -> list[Step]:
    left, right = node.args[:2]
    alpha = constants.number(mirror, argument(node, "alpha"))
    if alpha is None or not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
        return _offset(node, alpha)
    maximum = _row_maximum(right, left)
    if maximum is not None and alpha == 1.0:
        return [
            Shift(
                node=node,
                source=left,
                subtracted=right,
                uses=maximum,
                is_above=any(x.target in MAXIMA for x in maximum),
            )
        ]
    steps: list[Step] = [*_blended(mirror, node, -alpha), Add(node=node, source=left, term=right, weight=-alpha)]
    if alpha == 1.0 and not mutation.writes(node):
        steps.append(Add(node=node, source=right, term=left, negates=True))
    return steps


def _blended(mirror: Mirror, node: fx.Node, weight: float) -> list[Step]:
    """Read left + weight · right as scores masked by arithmetic, as in GPT-1: w · b + fill · (1 - b), once for each choice of b.

    This is a mask if every b is 0 or 1. The code that reads masks proves that b has no other value.
    """
    left, right = node.args[:2]
    found = _blends(mirror, node, left, right, weight)
    return [*found, *_blends(mirror, node, right, left, 1.0)] if weight == 1.0 else found


def _blends(mirror: Mirror, node: fx.Node, product: object, rest: object, weight: float) -> list[Step]:
    """Read product + weight · rest. Both uses of b must see one version."""
    if not isinstance(product, fx.Node) or not isinstance(rest, fx.Node):
        return []
    if product.target not in (aten.mul.Tensor, aten.mul_.Tensor):
        return []
    inside, factor = operands.scale_of(mirror, rest) or (rest, 1.0)
    found = _left_of_one(mirror, inside)
    left, right = product.args[:2]
    if found is None or not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
        return []
    numbers, sign = found
    versions = {mutation.version(mirror, numbers, mirror.order(reader)) for reader in (inside, product)}
    fill = _masking(mirror, weight * factor * sign, node)
    if len(versions) > 1 or fill is None:
        return []
    ways = ((left, right), (right, left)) if not mutation.writes(product) else ((left, right),)
    keep = functools.partial(Keep, node=node, inverted=False, fill=fill, by_numbers=True, uses=(product,))
    return [keep(source=x, condition=b) for x, b in ways if b is numbers]


def _left_of_one(mirror: Mirror, node: fx.Node) -> tuple[fx.Node, float] | None:
    """Return (b, 1) for 1 - b, and (b, -1) for b - 1."""
    if len(node.args) < 2 or constants.number(mirror, argument(node, "alpha", 1)) != 1.0:
        return None
    left, right = node.args[:2]
    if node.target in (aten.rsub.Scalar, aten.rsub.Tensor):
        left, right = right, left
    elif node.target is not aten.sub.Tensor:
        return None
    if isinstance(right, fx.Node) and constants.everywhere(mirror, left) == 1.0:
        return right, 1.0
    if isinstance(left, fx.Node) and constants.everywhere(mirror, right) == 1.0:
        return left, -1.0
    return None


def _offset(node: fx.Node, alpha: float | None) -> list[Step]:
    """Read the addition or subtraction of a number times `alpha`."""
    source, number = node.args[:2]
    if alpha is None or not isinstance(source, fx.Node) or not isinstance(number, int | float):
        return []
    return [Offset(node=node, source=source)] if abs(alpha * number) <= _MOST_ADDED else []


def _rsub(mirror: Mirror, node: fx.Node) -> list[Step]:
    """Read other - alpha × scores, or scores and other swapped."""
    left, right = node.args[:2]
    alpha = constants.number(mirror, argument(node, "alpha"))
    if alpha != 1.0 or not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
        return []
    return [Add(node=node, source=left, term=right, negates=True), Add(node=node, source=right, term=left, weight=-1.0)]


def _carries_scores(step: Step) -> bool:
    """Return whether `source` is a tensor of the result's full shape. A broadcast operand is not the scores, nor is a symbolic number."""
    source, whole = step.source.meta.get("val"), value(step.node)
    # Comparing tuples of different lengths also compares their elements, which would guard on symbolic sizes.
    return isinstance(source, torch.Tensor) and source.dim() == whole.dim() and source.shape == whole.shape


def _row_maximum(node: fx.Node, scores: fx.Node) -> tuple[fx.Node, ...] | None:
    """Return the nodes that compute `scores`' maximum over the last axis, kept or put back, or the larger one of that and of one more
    number for each row; None if `node` is neither."""
    if node.target in MAXIMA:
        pairs = (node.args[:2], node.args[1::-1])
        inner = (_row_maximum(x, scores) for x, y in pairs if isinstance(x, fx.Node) and _is_one_a_row(y))
        return next(((node, *found) for found in inner if found is not None), None)
    path = [node]
    unsqueezed = False
    while True:
        top = path[-1]
        if top.target is aten.unsqueeze.default and not unsqueezed:
            unsqueezed = argument(top, "dim") in (-1, value(top).dim() - 1)
            if not unsqueezed:
                return None
        elif top.target not in (aten.detach.default, aten.alias.default) and not _is_first_item(top):
            break
        path.append(views.source(top))
    if top.target not in (aten.amax.default, aten.max.dim) or top.args[0] is not scores:
        return None
    dim = argument(top, "dim")
    dims = [dim] if isinstance(dim, int) else list(dim)  # type: ignore[call-overload]
    last = value(scores).dim() - 1
    keeps = bool(argument(top, "keepdim"))
    return tuple(path) if keeps != unsqueezed and [d % (last + 1) for d in dims] == [last] else None


def _is_one_a_row(x: object) -> bool:
    return isinstance(x, fx.Node) and (value(x).dim() == 0 or axes.shape_exprs(value(x))[-1] == axes.ONE)


def _is_first_item(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem" and bool(node.args[1] == 0)


def _where(mirror: Mirror, node: fx.Node) -> list[Step]:
    condition, yes, no = node.args[:3]
    if not isinstance(condition, fx.Node):
        return []
    steps: list[Step] = []
    for scores, other, inverted in ((yes, no, False), (no, yes, True)):
        fill = _masking(mirror, other, node)
        if fill is not None and isinstance(scores, fx.Node):
            steps.append(Keep(node=node, source=scores, condition=condition, inverted=inverted, fill=fill))
    return steps


def _masked_fill(mirror: Mirror, node: fx.Node) -> list[Step]:
    scores, condition = node.args[:2]
    fill = _masking(mirror, node.args[2], node)
    if not isinstance(scores, fx.Node) or not isinstance(condition, fx.Node) or fill is None:
        return []
    return [Keep(node=node, source=scores, condition=condition, inverted=True, fill=fill)]


def _masking(mirror: Mirror, fill: object, node: fx.Node) -> float | None:
    """Return `fill` in the dtype of `node`'s scores, if a score with this value may be masked.

    It is rounded because other added numbers are compared with it: -1e9 is -998244352 in bfloat16.
    """
    number = constants.everywhere(mirror, fill)
    if number is None:
        return None
    number = rounded(number, node)
    return number if number < MAY_MASK_BELOW else None


def rounded(number: float, *nodes: fx.Node) -> float:
    """Round a number to the dtype of each node in turn."""
    for node in nodes:
        if value(node).is_floating_point():
            number = float(torch.tensor(number, dtype=torch.float64).to(value(node).dtype))
    return number


def _floor(mirror: Mirror, node: fx.Node) -> list[Step]:
    """Read max(scores, lowest): OPT and others keep -inf out of the softmax this way."""
    left, right = node.args[:2]
    for scores, bound in ((left, right), (right, left)):
        lowest = _masking(mirror, bound, node)
        if isinstance(scores, fx.Node) and lowest is not None and lowest <= MASKED_BELOW:
            return [_clamped(node, scores, lowest, math.inf)]
    return []


def _clamp(mirror: Mirror, node: fx.Node) -> list[Step]:
    low, high = argument(node, "min"), argument(node, "max")
    source = node.args[0]
    lowest = -math.inf if low is None else _masking(mirror, low, node)
    highest = math.inf if high is None else constants.number(mirror, high)
    if not isinstance(source, fx.Node) or lowest is None or highest is None:
        return []
    if lowest > MASKED_BELOW or highest < -MASKED_BELOW:
        return []
    return [_clamped(node, source, lowest, highest)]


def _finite(mirror: Mirror, node: fx.Node) -> list[Step]:
    """Read nan_to_num: -inf and inf become the ends of the dtype, as by a clamp. Masking makes no score NaN."""
    low, high = argument(node, "neginf"), argument(node, "posinf")
    ends = torch.finfo(value(node).dtype)
    lowest = ends.min if low is None else constants.number(mirror, low)
    highest = ends.max if high is None else constants.number(mirror, high)
    source = node.args[0]
    if not isinstance(source, fx.Node) or lowest is None or highest is None or lowest > ends.min or highest < ends.max:
        return []
    return [_clamped(node, source, lowest, highest)]


def _clamped(node: fx.Node, source: fx.Node, low: float, high: float) -> Clamp:
    ends = torch.finfo(value(source).dtype) if value(source).is_floating_point() else None
    of_dtype = ends is not None and low <= ends.min and ends.max <= high
    return Clamp(node=node, source=source, low=low, high=high, of_dtype=of_dtype)


def _cast(mirror: Mirror, node: fx.Node) -> list[Step]:
    source = node.args[0]
    if not isinstance(source, fx.Node) or value(source).device != value(node).device:
        return []
    floats = value(source).is_floating_point() and value(node).is_floating_point()
    return [Cast(node=node, source=source)] if floats else []


def _tanh(mirror: Mirror, node: fx.Node) -> list[Step]:
    return [Change(node=node, source=views.source(node), name="tanh", change=Softcap(cap=1.0))]


def _sink_column(mirror: Mirror, node: fx.Node) -> list[Step]:
    parts, dim = node.args[0], argument(node, "dim")
    if not isinstance(parts, (list, tuple)) or len(parts) != 2 or not isinstance(dim, int):
        return []
    left, right = parts
    is_last = dim % value(node).dim() == value(node).dim() - 1
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node) or not is_last:
        return []
    found = [(left, right, False)] if value(right).shape[-1] == 1 else []
    found += [(right, left, True)] if value(left).shape[-1] == 1 else []
    columns = ((scores, _logits(mirror, column), first) for scores, column, first in found)
    return [SinkColumn(node=node, source=scores, sinks=x, first=first) for scores, x, first in columns if _is_real(x)]


def _logits(mirror: Mirror, column: fx.Node) -> fx.Node | float:
    number = constants.everywhere(mirror, column)
    return column if number is None else number


def _is_real(logits: fx.Node | float) -> bool:
    """Return whether a column may be one of sinks. A sink as low as a mask has weight only beside masked keys."""
    return isinstance(logits, fx.Node) or MASKED_BELOW < logits < math.inf


def _padded(mirror: Mirror, node: fx.Node) -> list[Step]:
    """Read padding with one column of one number: a softmax plus one."""
    source, pad = node.args[:2]
    fill = argument(node, "value")
    number = 0.0 if fill is None else constants.number(mirror, fill)
    if not isinstance(source, fx.Node) or not isinstance(pad, (list, tuple)) or number is None or not _is_real(number):
        return []
    if argument(node, "mode", "constant") != "constant" or any(n != 0 for n in pad[2:]):
        return []
    if tuple(pad[:2]) not in ((0, 1), (1, 0)):
        return []
    return [SinkColumn(node=node, source=source, sinks=number, first=tuple(pad[:2]) == (1, 0))]


#: The op in the mirror -> its reader. For a new step add one reader, one line here and one test.
READERS: dict[object, Reader] = {
    **dict.fromkeys(operands.SCALES, _scale),
    **dict.fromkeys((aten.add.Tensor, aten.add_.Tensor), _add),
    **dict.fromkeys((aten.sub.Tensor, aten.sub_.Tensor), _sub),
    aten.rsub.Tensor: _rsub,
    **dict.fromkeys((aten.neg.default, aten.neg_.default, aten.negative.default), _negated),
    **dict.fromkeys((aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf), _where),
    **dict.fromkeys((aten.masked_fill.Scalar, aten.masked_fill.Tensor), _masked_fill),
    **dict.fromkeys((aten.masked_fill_.Scalar, aten.masked_fill_.Tensor), _masked_fill),
    **dict.fromkeys((*MAXIMA, aten.clamp_min.default), _floor),
    aten.clamp.default: _clamp,
    aten.nan_to_num.default: _finite,
    **dict.fromkeys((*views.CASTS, aten.type_as.default), _cast),
    aten.tanh.default: _tanh,
    **dict.fromkeys((aten.cat.default, aten.concat.default, aten.concatenate.default), _sink_column),
    **dict.fromkeys((aten.pad.default, aten.constant_pad_nd.default), _padded),
}
