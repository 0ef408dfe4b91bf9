"""Scores masked by arithmetic, as in GPT-1: w · b + fill · (1 - b).

This is a mask if every b is 0 or 1. This file reads only its form. The code that reads masks proves that b has no other value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from attn_compiler.passes.graph import constants, mutation
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.views import argument
from attn_compiler.passes.matching import operands

aten = torch.ops.aten
_PRODUCTS = frozenset({aten.mul.Tensor, aten.mul_.Tensor})


@dataclass(frozen=True, kw_only=True)
class Blend:
    """scores · numbers + fill · (1 - numbers). product: the node that multiplies the scores by the numbers."""

    scores: fx.Node
    numbers: fx.Node
    fill: float
    product: fx.Node


def read(mirror: Mirror, product: object, rest: object, weight: float) -> list[Blend]:
    """Return each reading of product + weight · rest as a blend, one for each choice of b. Both uses of b must see one version."""
    if not isinstance(product, fx.Node) or not isinstance(rest, fx.Node) or product.target not in _PRODUCTS:
        return []
    scaled = operands.scale_of(mirror, rest)
    inside, factor = scaled if scaled is not None else (rest, 1.0)
    found = _left_of_one(mirror, inside)
    left, right = product.args[:2]
    if found is None or not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
        return []
    numbers, sign = found
    if _version(mirror, numbers, inside) != _version(mirror, numbers, product):
        return []
    fill = weight * factor * sign
    ways = ((left, right), (right, left)) if not mutation.writes(product) else ((left, right),)
    return [Blend(scores=x, numbers=b, fill=fill, product=product) for x, b in ways if b is numbers]


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


def _version(mirror: Mirror, node: fx.Node, reader: fx.Node) -> mutation.Version:
    return mutation.version(mirror, node, mirror.order(reader))
