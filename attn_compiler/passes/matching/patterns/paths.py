"""Paths along which numbers are only moved or cast."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import fx

from attn_compiler.passes.graph import axes, views
from attn_compiler.passes.graph.axes import AxisError, Dim, Dims
from attn_compiler.passes.graph.mirror import Mirror

aten = torch.ops.aten
_CASTS = (*views.CASTS, aten.type_as.default)


def is_passed(node: fx.Node) -> bool:
    """Return whether a node only moves or casts numbers."""
    return views.is_view(node) or _is_cast(node)


def moved(path: Sequence[fx.Node], dims: Dims) -> Dims:
    """Return the dims after nodes that move or cast numbers. Raises AxisError."""
    for node in path:
        dims = views.forward(node, dims) if views.is_view(node) else dims
    return dims


def paths_to(mirror: Mirror, path: list[fx.Node], ops: Collection[object]) -> Iterator[list[fx.Node]]:
    """Yield the paths that go on from `path` to one of the ops, through nodes that only move or cast the numbers."""
    for user in mirror.readers(path[-1]):
        if user.target in ops:
            yield [*path, user]
        elif user.args[:1] == (path[-1],) and is_passed(user):
            yield from paths_to(mirror, [*path, user], ops)


def along(path: Sequence[fx.Node], dims: Dims) -> tuple[Dim, Dims] | None:
    """Return (axis, dims of the result) of a reduction at the end of a path that begins with `dims`; None if it is over several axes."""
    node = path[-1]
    try:
        dims = moved(path[1:-1], dims)
    except AxisError:
        return None
    given = views.named_axes(node, len(dims))
    if len(given) != 1:
        return None
    axis = given.pop()
    kept: Dims = ((),) if views.argument(node, "keepdim") else ()
    return axes.resolve(dims[axis]), (*dims[:axis], *kept, *dims[axis + 1 :])


def _is_cast(node: fx.Node) -> bool:
    source = node.args[0] if node.args else None
    if node.target not in _CASTS or not isinstance(source, fx.Node):
        return False
    before, after = views.value(source), views.value(node)
    return before.is_floating_point() and after.is_floating_point() and before.device == after.device
