"""Nodes downstream of a rewritten node that depend on its old strides, and the copy that restores them.

A model's `view` only works on the strides that it was written for, and code after a graph break sees a graph's outputs. So the nodes
downstream are run on fake values with the new strides, until the recorded strides come back (after a contiguous, a linear, ...). A node
relies on the old strides if it fails, or if it would hand other strides out of the graph.

A reshape or a contiguous relies on them, too, if it becomes a view, or no longer is one, and one of the two tensors may be written in
place later. The writer may be the graph, or whoever gets the tensor from it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

from attn_compiler.passes.graph import axes, closed, mutation
from attn_compiler.passes.graph.calls import run, target_name
from attn_compiler.passes.graph.emit import GraphBuilder
from attn_compiler.passes.graph.mirror import Mirror, is_opaque
from attn_compiler.torch_private import symbols as torch_symbols, tracing as torch_tracing

_MOST_NODES = 64
_LARGE = 1009


def relies_on(mirror: Mirror, out: fx.Node, old: fx.Node, new: torch.Tensor, mode: FakeTensorMode) -> str | None:
    """Return the name of the first node downstream of `old` that can't work with `new` in its place; None if all can.

    out: the mirror node of `old`.
    """
    if same(new, old.meta["example_value"]):
        return None
    values: dict[fx.Node, Any] = {old: new}
    queue = list(old.users)
    for _ in range(_MOST_NODES):
        if not queue:
            return None
        node = queue.pop(0)
        if node in values:
            continue
        if node.op == "output" or is_opaque(node) or closed.is_closed(node) or "example_value" not in node.meta:
            return str(node.name)
        value = None if target_name(node).startswith("as_strided") else _run(node, values, mode)
        if value is None or _aliases_otherwise(mirror, out, node, value, values):
            return str(node.name)
        if not _all_same(value, node.meta["example_value"]):
            values[node] = value
            queue.extend(node.users)
    return str(queue[0].name) if queue else None


def _run(node: fx.Node, values: dict[fx.Node, Any], mode: FakeTensorMode) -> Any:
    """Return the node's value with the new strides above it; None if it can't be computed with them."""
    with torch_tracing.running_in(mode), torch.no_grad():
        try:
            return run(node, lambda n: values.get(n, n.meta.get("example_value")))
        except (RuntimeError, ValueError, TypeError):
            return None


def _aliases_otherwise(mirror: Mirror, out: fx.Node, node: fx.Node, value: Any, values: dict[fx.Node, Any]) -> bool:
    """Return whether the node's result shares memory with its inputs where it did not before, or the reverse, in a visible way."""
    inputs = [n for n in node.all_input_nodes if n in values]
    old_inputs = mutation.storages_of([n.meta["example_value"] for n in inputs])
    before = mutation.storages_of(node.meta["example_value"]) & old_inputs
    now = mutation.storages_of(value) & mutation.storages_of([values[n] for n in inputs])
    if bool(before) == bool(now):
        return False
    of_both = [m for n in (node, *inputs) for m in mirror.owned(n)]
    is_written = mutation.written_after(mirror, set().union(*map(mutation.storages, of_both)), out) is not None
    return is_written or _shows_outside(node, inputs)


def _shows_outside(node: fx.Node, inputs: list[fx.Node]) -> bool:
    """Return whether a user who writes to the graph's results sees if a node's result shares memory with its inputs.

    The result is returned, and so is an input; or the backward reads the input: a kernel saves its output.
    """
    (output,) = node.graph.find_nodes(op="output")
    returned = mutation.storages_of([n.meta.get("example_value") for n in output.all_input_nodes])
    values = [n.meta["example_value"] for n in inputs]
    if not mutation.storages_of(node.meta["example_value"]) & returned:
        return False
    saved = any(x.requires_grad for x in pytree.tree_leaves(values) if isinstance(x, torch.Tensor))
    return saved or bool(mutation.storages_of(values) & returned)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same sizes, and the same strides along axes longer than one."""
    sizes = zip(a.stride(), b.stride(), a.shape, strict=True)
    return a.shape == b.shape and all(_known_equal(x, y) for x, y, size in sizes if not _known_equal(size, 1))


def _known_equal(a: Any, b: Any) -> bool:
    return torch_symbols.statically_known(a == b)


def _all_same(a: Any, b: Any) -> bool:
    left, right = pytree.tree_leaves(a), pytree.tree_leaves(b)
    if len(left) != len(right):
        return False
    tensors = [(x, y) for x, y in zip(left, right, strict=True) if isinstance(x, torch.Tensor)]
    return all(isinstance(y, torch.Tensor) and same(x, y) for x, y in tensors)


def restride(builder: GraphBuilder, node: fx.Node, wanted: torch.Tensor) -> fx.Node:
    """Copy `node` into the memory order of `wanted` (dense, but for size-one axes)."""
    own = order(wanted)
    if own == tuple(range(wanted.dim())):
        return builder.call(torch.Tensor.contiguous, node)
    back = [own.index(i) for i in range(len(own))]
    permuted = builder.call(torch.permute, node, own)
    return builder.call(torch.permute, builder.call(torch.Tensor.contiguous, permuted), tuple(back))


def order(x: torch.Tensor) -> tuple[int, ...]:
    """Return the axes of a tensor in their order in memory."""
    return tuple(sorted(range(x.dim()), key=lambda axis: _rank(x, axis)))


def _rank(wanted: torch.Tensor, axis: int) -> tuple[int, int]:
    """Order axes by largest stride, equal strides in axis order. A symbolic stride counts as if every size in it were large."""
    stride = axes.size_expr(wanted.stride(axis))
    return (-int(stride.subs(dict.fromkeys(stride.free_symbols, _LARGE))), axis)
