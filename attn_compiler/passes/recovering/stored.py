"""K and V as an FP8 cache stores them, above the casts and the one multiplication that restore the model's numbers.

transformers' QuantizedCache computes `(cache.float() * scale).to(dtype)`. A cache without a scale computes `cache.to(dtype)`.
A kernel that reads FP8 itself skips both, and half of the memory traffic. This is exact: every FP8 number is also a bfloat16 and
a float16 number, and the scale is applied to the scores and the output in float32.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from attn_compiler.passes.graph import axes, gradients, mutation, views
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.site import Match, Operand, Stored

aten = torch.ops.aten

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def find(mirror: Mirror, match: Match) -> tuple[Stored, Stored] | None:
    """Return K and V in FP8 if both are stored so, else None."""
    k, v = (_stored(mirror, operand, match.out) for operand in (match.k, match.v))
    return None if k is None or v is None else (k, v)


def _stored(mirror: Mirror, operand: Operand, until: fx.Node) -> Stored | None:
    node, scale, reader = operand.root, None, operand.root
    while views.value(node).dtype not in FP8:
        above = _above(node)
        if above is None or (above[1] is not None and scale is not None):
            return None
        # The model may still write in place to a tensor that it computes from the cache.
        if mutation.written_between(mirror, node, node, until) is not None:
            return None
        reader, node, scale = node, above[0], scale or above[1]
    needed = [node] if scale is None else [node, scale]
    if any(not _is_readable(mirror, x, reader, until) for x in needed):
        return None
    return Stored(operand=dataclasses.replace(operand, root=node, kept=None), scale=scale)


def _above(node: fx.Node) -> tuple[fx.Node, fx.Node | None] | None:
    """Return (source, scale) of a cast of floats (no scale), or of floats times a scalar tensor, if the shape stays; else None."""
    if node.target in views.CASTS and _keeps_shape(node, source := views.source(node)):
        return source, None
    if node.target is not aten.mul.Tensor:
        return None
    left, right = node.args
    for many, one in ((left, right), (right, left)):
        if isinstance(many, fx.Node) and isinstance(one, fx.Node) and _is_number(one) and _keeps_shape(node, many):
            return many, one
    return None


def _keeps_shape(node: fx.Node, source: fx.Node) -> bool:
    before, after = views.value(source), views.value(node)
    floating = before.is_floating_point() and after.is_floating_point()
    return floating and axes.shape_exprs(before) == axes.shape_exprs(after)


def _is_number(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()


def _is_readable(mirror: Mirror, node: fx.Node, reader: fx.Node, until: fx.Node) -> bool:
    """True if the kernel, at `until`, finds the value that the model reads at `reader`, and no gradient is lost."""
    if mirror.dynamo_node(node) is None or gradients.carries(mirror, node):
        return False
    return mutation.written_between(mirror, node, reader, until) is None
