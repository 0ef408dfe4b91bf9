"""What is added to the scores, as the copy engine reads it for the forward: a further operand of the leaf op, made from the plan's bias or
numbers by distance. Imports no Triton.

Numbers by distance become (1, Hq|1, 64, columns): once for each query of a warpgroup, each time moved on by one. A tile of 64 queries and
any keys then begins at the column of its first key's distance from its first query, which is a multiple of a vector, and is read like one
of a dense bias. They take 64 · (Sq + Skv) elements a head.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from attn_compiler.lowerings.base import Emitter
from attn_compiler.lowerings.hopper.plan import ROWS
from attn_compiler.lowerings.shared.parts.kernel_plan import Plan
from attn_compiler.torch_private.symbols import statically_known

aten = torch.ops.aten

#: what the operand is called
NAME = "added"
#: bytes that the strides of what the copy engine reads are multiples of
VECTOR = 16
#: elements that columns are a multiple of
_WHOLE = 8
#: queries of a block beyond the last one, at most, in units of 64
_BEYOND = 2

Size = int | fx.Node


def is_there(plan: Plan) -> bool:
    """Whether the leaf op has the operand."""
    return plan.bias or plan.distances


def begins_between_vectors(plan: Plan, operands: Sequence[torch.Tensor]) -> bool:
    """Whether what is added, the last operand, begins where the copy engine can't read. Its strides don't tell."""
    return is_there(plan) and operands[-1].data_ptr() % VECTOR != 0


def with_copy(operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The operands, of which the last one is a copy."""
    *others, last = operands
    return [*others, last.clone(memory_format=torch.contiguous_format)]


def zero(seqlen_q: int) -> int:
    """The column of distance 0, in the first of the 64 rows. No tile begins before column 0."""
    return (-(-seqlen_q // ROWS) + _BEYOND) * ROWS


def emit(emitter: Emitter, plan: Plan, made: dict[str, fx.Node], lengths: tuple[Size, Size]) -> fx.Node:
    """The operand. made: those of the plan, by name. lengths: of queries and of keys."""
    if plan.bias:
        return of_bias(emitter, made["bias"])
    distances = made["distances"]
    key = ("hopper distances", distances, *lengths)
    return emitter.once(key, lambda: of_distances(emitter, distances, *lengths))


def of_bias(emitter: Emitter, bias: fx.Node) -> fx.Node:
    """bias, (B|1, Hq|1, Sq, Skv), or a copy where its elements are not where the copy engine reads them."""
    for axis in range(2):
        value = emitter.value(bias)
        if value.shape[axis] != 1 and statically_known(value.stride(axis) == 0):
            bias = emitter.call(aten.slice.Tensor, bias, axis, 0, 1)
    if is_readable(emitter.value(bias)):
        return bias
    of = bias
    return emitter.once(
        ("hopper bias", of), lambda: emitter.call(torch.clone, of, memory_format=torch.contiguous_format)
    )


def is_readable(bias: torch.Tensor) -> bool:
    """Whether keys are neighbours, and everything else begins at a vector. Where the tensor itself does is not known here."""
    step = VECTOR // bias.element_size()
    *others, last = zip(bias.shape, bias.stride(), strict=True)
    apart = [stride for size, stride in others if not statically_known(size == 1)]
    return statically_known(last[1] == 1) and all(
        statically_known(stride % step == 0) and statically_known(stride != 0) for stride in apart
    )


def of_distances(emitter: Emitter, distances: fx.Node, seqlen_q: Size, seqlen_kv: Size) -> fx.Node:
    """Element [0, h, r, x] is what is added where k - q is x - r - zero(Sq), if there is such a pair."""

    def number(function: Callable[..., Any], a: Size, b: Size) -> Size:
        return function(a, b) if isinstance(a, int) and isinstance(b, int) else emitter.call(function, a, b)

    def rounded(x: Size, to: int) -> Size:
        return number(operator.mul, number(operator.floordiv, number(operator.add, x, to - 1), to), to)

    origin = number(operator.add, rounded(seqlen_q, ROWS), _BEYOND * ROWS)
    columns = rounded(number(operator.add, origin, seqlen_kv), _WHOLE)
    device = emitter.value(distances).device
    along = emitter.call(torch.arange, columns, device=device)
    rows = emitter.call(torch.unsqueeze, emitter.call(torch.arange, ROWS, device=device), 1)
    # Of the plan's first copy, whose element 0 is the distance 1 - Sq.
    first = number(operator.sub, number(operator.sub, seqlen_q, 1), origin)
    at = emitter.call(torch.add, emitter.call(torch.sub, along, rows), first)
    last = number(operator.sub, number(operator.add, seqlen_q, seqlen_kv), 2)
    at = emitter.call(torch.clamp, at, min=0, max=last)
    values = emitter.call(aten.select.int, distances, 1, 0)
    return emitter.call(torch.unsqueeze, emitter.call(aten.index.Tensor, values, [None, at]), 0)
