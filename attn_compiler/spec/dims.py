"""Facts of a size without a guard: an int is exact, a name is a symbol of Dynamo's, an expression is bounded.

Dynamo makes a size symbolic only once it is neither 0 nor 1, so its own symbols ("s0") are at least 2; an unbacked one ("u0") may be
anything from 0 up.
"""

from __future__ import annotations

import ast
import math
import re

from attn_compiler.spec.attention import AttentionSpec, Dim

_BACKED = re.compile(r"s\d+")


def same(a: Dim, b: Dim) -> bool:
    """Return True if the two sizes are known to be equal. False also when nothing is known."""
    return a == b


def at_least(dim: Dim) -> int:
    """Return the largest known lower bound of a size; 0 when nothing is known."""
    if isinstance(dim, int):
        return dim
    bound = _lower_bound(ast.parse(dim, mode="eval").body)
    return 0 if bound is None else max(0, bound)


def range_of(spec: AttentionSpec, dim: Dim) -> tuple[int, int | None]:
    """Return the least and the most that a size of a spec can be, by its name and by guards; None: no end."""
    if isinstance(dim, int):
        return dim, dim
    found = next((one for one in spec.ranges if one.size == dim), None)
    return (at_least(dim), None) if found is None else (max(found.least, at_least(dim)), found.most)


def is_multiple(dim: Dim, of: int) -> bool:
    """Return True if the size or stride is known to be a multiple: "64*s0" is one of 8, whatever s0 is."""
    return (dim if isinstance(dim, int) else _divisor(ast.parse(dim, mode="eval").body)) % of == 0


def can_have_remainder(dim: Dim, *, modulus: int, remainder: int) -> bool:
    """Return True if dim % modulus == remainder is possible, as for every symbolic size."""
    return not isinstance(dim, int) or dim % modulus == remainder


def broadcasts(shape: tuple[Dim, ...], to: tuple[Dim, ...]) -> bool:
    """Return True if `shape` is known to broadcast to `to`, aligned at the last axis."""
    if len(shape) > len(to):
        return False
    return all(own == 1 or same(own, wanted) for own, wanted in zip(reversed(shape), reversed(to), strict=False))


def _lower_bound(node: ast.expr) -> int | None:
    """Return a lower bound of the expression; None if there is none or it is unknown."""
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name):
            return 2 if _BACKED.fullmatch(name) else 0
        case ast.BinOp(left=left, op=ast.Sub(), right=ast.Constant(value=int(value))):
            bound = _lower_bound(left)
            return None if bound is None else bound - value
        case ast.BinOp(left=left, op=ast.FloorDiv(), right=ast.Constant(value=int(value))) if value > 0:
            bound = _lower_bound(left)
            return None if bound is None else bound // value
        case ast.BinOp(left=left, op=operator, right=right):
            return _combined(_lower_bound(left), operator, _lower_bound(right))
    return None


def _combined(left: int | None, operator: ast.operator, right: int | None) -> int | None:
    if left is None or right is None:
        return None
    if isinstance(operator, ast.Add):
        return left + right
    if isinstance(operator, ast.Mult) and left >= 0 and right >= 0:
        return left * right
    return None


def _divisor(node: ast.expr) -> int:
    """Return a number that the expression is always a multiple of."""
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _divisor(operand)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _divisor(left) * _divisor(right)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
            return math.gcd(_divisor(left), _divisor(right))
    return 1
