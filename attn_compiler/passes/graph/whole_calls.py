"""Dynamo's calls that are one ATen op each, with the arguments that tracing would write: they need no trace.

PyTorch traces these slowest where sizes are symbolic. It decomposes an attention or a product, and asks of each pair of sizes whether they
broadcast. Dynamo has done all of that, and has the value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensor

from attn_compiler.passes.graph.calls import target_name
from attn_compiler.torch_private import symbols as torch_symbols, tracing as torch_tracing

aten = torch.ops.aten

#: name of a function, operator or method -> its op
_OPS: Mapping[str, torch._ops.OpOverload] = {
    "scaled_dot_product_attention": aten.scaled_dot_product_attention.default,
    "matmul": aten.matmul.default,
    "add": aten.add.Tensor,
    "sub": aten.sub.Tensor,
    "mul": aten.mul.Tensor,
    "and_": aten.bitwise_and.Tensor,
    "or_": aten.bitwise_or.Tensor,
    "eq": aten.eq.Tensor,
    "ne": aten.ne.Tensor,
    "le": aten.le.Tensor,
    "lt": aten.lt.Tensor,
    "ge": aten.ge.Tensor,
    "gt": aten.gt.Tensor,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeCall:
    """An op with its arguments; tensors are the Dynamo nodes that they come from."""

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def read(node: fx.Node, values: Mapping[fx.Node, Any]) -> WholeCall | None:
    """Return the op that a call of PyTorch's is; None if it is not known here. values: of the call's arguments."""
    op = _OPS.get(target_name(node))
    is_of_library = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace != "aten"
    # Under autocast, some of these ops get casts of their inputs.
    if op is None or is_of_library or torch_tracing.is_in_autocast():
        return None
    return _bound(op, node, values)


def _bound(op: torch._ops.OpOverload, node: fx.Node, values: Mapping[fx.Node, Any]) -> WholeCall | None:
    arguments = op._schema.arguments
    given: dict[str, Any] = dict(zip((a.name for a in arguments), node.args, strict=False))
    if len(node.args) > len(arguments) or given.keys() & node.kwargs.keys():
        return None
    given |= node.kwargs
    if given.keys() - {a.name for a in arguments}:
        return None
    by_place: list[Any] = []
    by_name: dict[str, Any] = {}
    last = 0
    for argument in arguments:
        value = given.get(argument.name, argument.default_value)
        if isinstance(value, fx.Node) and isinstance(values[value], torch.SymFloat):
            # PyTorch's own functions specialise an argument that may not be symbolic.
            value = torch_symbols.constant(values[value])
            if value is None:
                return None
        if not _is_plain(argument, value, values):
            return None
        is_default = value is None or (not isinstance(value, fx.Node) and value == argument.default_value)
        if not argument.kwarg_only:
            by_place.append(value)
            last = last if is_default else len(by_place)
        elif not is_default:
            by_name[argument.name] = value
    return WholeCall(op=op, args=tuple(by_place[:last]), kwargs=by_name)


def _is_plain(argument: torch._C.Argument, value: Any, values: Mapping[fx.Node, Any]) -> bool:
    """Return whether an argument is a tensor where the op takes one, else a number of its type or nothing."""
    kind = str(argument.type)
    if isinstance(value, fx.Node):
        return kind in ("Tensor", "Optional[Tensor]") and isinstance(values[value], FakeTensor)
    if value is None:
        return kind.startswith("Optional")
    return kind in _TYPES and type(value) is _TYPES[kind]


_TYPES: Mapping[str, type] = {"float": float, "Optional[float]": float, "bool": bool, "number": int}
