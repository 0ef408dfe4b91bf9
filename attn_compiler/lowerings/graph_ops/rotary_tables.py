"""Tables of cosines and sines that several kernels read, computed once.

Inductor recomputes pointwise values in each kernel that reads them. Of rotary embeddings it computes cosine and sine of every angle for
every head of q and k, in each layer and again in the backward, from angles with positions as the last axis. On an H200 that kernel of a
Llama-like model took 124 µs a layer, and 175 in the backward (16 heads of 128, 2 x 8192 tokens); with tables 71 and 73.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from attn_compiler.torch_private import symbols as torch_symbols
from attn_compiler.torch_private.op_library import NAMESPACE, register_helper

aten, prims = torch.ops.aten, torch.ops.prims

_FUNCTIONS = (aten.cos.default, aten.sin.default)
#: ops that may follow before the table is read: other factors and dtypes
_STEPS = (aten.mul.Tensor, prims.convert_element_type.default, aten._to_copy.default)


#: fewest elements computed from a table that are worth another op and its launch: about 1 µs for each 2**20
_WORTH_IT = 2**24


def keep_tables(graph: fx.Graph) -> None:
    """Store each cosine and sine of a traced graph that several larger tensors are computed from, by an op of its own."""
    for node in list(graph.nodes):
        if node.target in _FUNCTIONS:
            table = _last_step(node)
            sizes = _sizes_of_larger_readers(table)
            if len(sizes) > 1 and torch_symbols.statically_known(sum(sizes) >= _WORTH_IT):
                _keep(graph, table)


def _last_step(node: fx.Node) -> fx.Node:
    while len(node.users) == 1:
        (reader,) = node.users
        if reader.target not in _STEPS or len(reader.all_input_nodes) > 1:
            break
        node = reader
    return node


def _sizes_of_larger_readers(table: fx.Node) -> list[Any]:
    """Return sizes of larger pointwise readers, which recompute the table; none if a reader depends on the table's strides."""
    found, waiting = [], list(table.users)
    while waiting:
        reader = waiting.pop()
        if reader.op == "output" or reader.target is aten.as_strided.default:
            return []
        if getattr(reader.target, "is_view", False):
            waiting.extend(reader.users)
        elif torch.Tag.pointwise in getattr(reader.target, "tags", ()):
            size = _size(reader)
            if size is not None and torch_symbols.statically_known(size > _size(table)):
                found.append(size)
    return found


def _size(node: fx.Node) -> Any:
    """Return the number of elements; None if it is no tensor."""
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else None


def _keep(graph: fx.Graph, table: fx.Node) -> None:
    # This may fail, so it comes before the graph is changed.
    value = _table(table.meta["val"])
    with graph.inserting_after(table):
        kept = graph.call_function(getattr(torch.ops, NAMESPACE).table.default, (table,))
    kept.meta.update(table.meta)
    kept.meta["val"] = value
    table.replace_all_uses_with(kept, lambda reader: reader is not kept)


def _table(x: torch.Tensor) -> torch.Tensor:
    """Copy a table to contiguous memory, in which it is read. Angles are products whose strides have positions last."""
    return x.clone(memory_format=torch.contiguous_format)


register_helper("table", "(Tensor x) -> Tensor", function=_table)
