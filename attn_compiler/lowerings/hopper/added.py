"""The forward's operand of tensors added to the scores, in the layout that the copy engine (TMA) reads: a bias, or biases by distance.
Imports no Triton.

Biases by distance become (1, Hq|1, 64, columns): one copy for each query of a warpgroup, each shifted by one column. A tile of 64 queries
then begins at the column of the distance between its first key and its first query. That column is a multiple of a vector, so the tile is
read like one of a dense bias. The operand has 64 · (Sq + Skv) elements a head.
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

#: name of the operand
NAME = "added"
#: the copy engine reads strides that are multiples of this many bytes
VECTOR = 16
#: the number of columns is a multiple of this
_WHOLE = 8
#: the last block reaches beyond the last query by at most this many times 64 queries
_BEYOND = 2

Size = int | fx.Node


def is_there(plan: Plan) -> bool:
    """Return whether the leaf op has the operand."""
    return plan.bias or plan.distances


def begins_between_vectors(plan: Plan, operands: Sequence[torch.Tensor]) -> bool:
    """Return whether the last operand, which is added, begins at an address that the copy engine can't read. Strides don't tell."""
    return is_there(plan) and operands[-1].data_ptr() % VECTOR != 0


def with_copy(operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the operands with the last one replaced by a contiguous copy."""
    *others, last = operands
    return [*others, last.clone(memory_format=torch.contiguous_format)]


def zero(seqlen_q: int) -> int:
    """Return the column of distance 0 in the first of the 64 rows. No tile begins before column 0."""
    return (-(-seqlen_q // ROWS) + _BEYOND) * ROWS


def emit(emitter: Emitter, plan: Plan, made: dict[str, fx.Node], lengths: tuple[Size, Size]) -> fx.Node:
    """Emit the operand. made: the plan's operands, by name. lengths: of queries and of keys."""
    if plan.bias:
        return readable_bias(emitter, made["bias"])
    distances = made["distances"]
    key = ("hopper distances", distances, *lengths)
    return emitter.once(key, lambda: shifted_distances(emitter, distances, *lengths))


def readable_bias(emitter: Emitter, bias: fx.Node) -> fx.Node:
    """Return the bias, (B|1, Hq|1, Sq, Skv), or a contiguous copy where the copy engine can't read its strides."""
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
    """Return whether keys are contiguous and all other strides are whole vectors. The tensor's own address is not known here."""
    step = VECTOR // bias.element_size()
    *others, last = zip(bias.shape, bias.stride(), strict=True)
    apart = [stride for size, stride in others if not statically_known(size == 1)]
    return statically_known(last[1] == 1) and all(
        statically_known(stride % step == 0) and statically_known(stride != 0) for stride in apart
    )


def shifted_distances(emitter: Emitter, distances: fx.Node, seqlen_q: Size, seqlen_kv: Size) -> fx.Node:
    """Build the operand: element [0, h, r, x] is added where k - q equals x - r - zero(Sq), if such a pair exists."""

    def number(function: Callable[..., Any], a: Size, b: Size) -> Size:
        return function(a, b) if isinstance(a, int) and isinstance(b, int) else emitter.call(function, a, b)

    def rounded(x: Size, to: int) -> Size:
        return number(operator.mul, number(operator.floordiv, number(operator.add, x, to - 1), to), to)

    origin = number(operator.add, rounded(seqlen_q, ROWS), _BEYOND * ROWS)
    columns = rounded(number(operator.add, origin, seqlen_kv), _WHOLE)
    device = emitter.value(distances).device
    along = emitter.call(torch.arange, columns, device=device)
    rows = emitter.call(torch.unsqueeze, emitter.call(torch.arange, ROWS, device=device), 1)
    # The plan's first copy begins with the distance 1 - Sq.
    first = number(operator.sub, number(operator.sub, seqlen_q, 1), origin)
    at = emitter.call(torch.add, emitter.call(torch.sub, along, rows), first)
    last = number(operator.sub, number(operator.add, seqlen_q, seqlen_kv), 2)
    at = emitter.call(torch.clamp, at, min=0, max=last)
    values = emitter.call(aten.select.int, distances, 1, 0)
    return emitter.call(torch.unsqueeze, emitter.call(aten.index.Tensor, values, [None, at]), 0)
