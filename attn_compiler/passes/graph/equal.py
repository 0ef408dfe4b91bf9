"""Nodes of a mirror that hold equal elements because the same ops make them: a mask that a model writes a second time."""

from __future__ import annotations

import operator

import torch
from torch import fx

from attn_compiler.passes.graph import constants
from attn_compiler.passes.graph.mirror import Mirror

#: the most levels of inputs that are compared
_DEEPEST = 40


def are_equal(mirror: Mirror, one: fx.Node, other: fx.Node, deepest: int = _DEEPEST) -> bool:
    """Return whether the same ops make both nodes from the same inputs, and nobody writes to anything in between or after.

    Tensors of one number are equal by that: each `torch.tensor(False)` is a constant of its own.
    """
    if _is_written(mirror, one) or _is_written(mirror, other):
        return False
    if one is other or _are_one_number(mirror, one, other):
        return True
    if deepest == 0 or one.target != other.target or not _is_determined(one):
        return False
    return _are_alike(mirror, one.args, other.args, deepest - 1) and _are_alike(
        mirror, dict(one.kwargs), dict(other.kwargs), deepest - 1
    )


def _are_one_number(mirror: Mirror, one: fx.Node, other: fx.Node) -> bool:
    a, b = one.meta.get("val"), other.meta.get("val")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or (a.dtype, a.device) != (b.dtype, b.device):
        return False
    known = constants.number(mirror, one)
    # Integers beyond are not told apart as floats.
    is_exact = known is not None and abs(known) < 2**53
    return is_exact and a.shape == b.shape and known == constants.number(mirror, other)


def _is_written(mirror: Mirror, node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor) and bool(mirror.writers_into(node).nodes)


def _is_determined(node: fx.Node) -> bool:
    """Return whether a node's result depends on its arguments alone: an ATen op that draws no random numbers and writes nothing."""
    if node.target is operator.getitem:
        return True
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags and not target._schema.is_mutable


def _are_alike(mirror: Mirror, one: object, other: object, deepest: int) -> bool:
    if isinstance(one, fx.Node) and isinstance(other, fx.Node):
        return are_equal(mirror, one, other, deepest)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(
            _are_alike(mirror, a, b, deepest) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_alike(mirror, one[key], other[key], deepest) for key in one)
    return type(one) is type(other) and one == other
