"""Sizes of packed values that the model asks for: it gets those of the padded batch."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from attn_compiler.passes.graph import axes
from attn_compiler.passes.graph.calls import target_name
from attn_compiler.passes.unpad.forms import KeepsPadding, Kind
from attn_compiler.passes.unpad.making import Maker
from attn_compiler.reasons.codes import Code

#: calls that read no element
_ASKING = frozenset({"size", "sym_size", "getattr", "numel"})

Number = int | fx.Node


def insert_sizes(graph: fx.Graph, maker: Maker) -> None:
    """Replace calls that ask packed values for sizes by sizes of the padded batch. Raises KeepsPadding for any other size."""
    for node in graph.nodes:
        asks = target_name(node) in _ASKING and node.op in ("call_function", "call_method")
        if asks and any(maker.kind_of(x) is Kind.PACKED for x in node.all_input_nodes):
            copy = maker.copies[node]
            with maker.graph.inserting_before(copy):
                _replace(copy, _numbers(maker, node))
            maker.drop(node)


def _numbers(maker: Maker, node: fx.Node) -> Number | tuple[Number, ...]:
    value: Any = node.meta.get("example_value")
    if isinstance(value, (tuple, list)):
        return tuple(_number(maker, size) for size in value)
    if not isinstance(value, (int, torch.SymInt)):
        raise KeepsPadding(Code.PADDING_SIZES, "a packed value is asked for nothing but sizes", node.name)
    return _number(maker, value)


def _number(maker: Maker, size: int | torch.SymInt) -> Number:
    expr = axes.size_expr(size)
    if expr.is_Integer:
        return int(expr)
    for axis, own in enumerate(maker.analysis.sizes):
        if axes.same_size(expr, own):
            return maker.whole_size(axis)
    if axes.same_size(expr, axes.product(maker.analysis.sizes)):
        return maker.whole_number()
    raise KeepsPadding(Code.PADDING_SIZES, "sizes besides those of the batch are known", str(expr))


def _replace(copy: fx.Node, value: Number | tuple[Number, ...]) -> None:
    for user in list(copy.users):
        if isinstance(value, tuple) and user.target is operator.getitem:
            place: Any = user.args[1]
            picked: Any = value[place]
            _replace(user, picked)
            continue
        user.args, user.kwargs = fx.map_arg((user.args, dict(user.kwargs)), lambda x: value if x is copy else x)
