"""Ops that read a table by the numbers of a tensor, and einsum: what each does with the axis of positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx

from attn_compiler.passes.context_parallel.places import Mixes, Place, alike, has, place_of
from attn_compiler.passes.graph import axes, views
from attn_compiler.passes.graph.axes import Dim

if TYPE_CHECKING:
    from attn_compiler.passes.context_parallel.following import Following


def bucketized(context: Following, node: fx.Node) -> Place | Mixes:
    x, bounds = node.args[:2]
    if not isinstance(x, fx.Node) or not isinstance(bounds, fx.Node) or context.holds(bounds):
        return Mixes(at=node, why="its boundaries hold the sequence")
    return place_of(context, x)


def looked_up(context: Following, node: fx.Node) -> Place | Mixes:
    """table[ids], with one tensor of indices."""
    table, indices = node.args[0], node.args[1]
    given = [(i, x) for i, x in enumerate(indices) if x is not None] if isinstance(indices, (list, tuple)) else []
    if not isinstance(table, fx.Node) or len(given) != 1 or not isinstance(given[0][1], fx.Node):
        return Mixes(at=node, why="it reads by several indices")
    at, ids = given[0]
    if views.value(ids).dtype in (torch.bool, torch.uint8):
        return Mixes(at=node, why="it reads where a mask is true")
    return _read(context, node, table, at, ids)


def _read(context: Following, node: fx.Node, table: fx.Node, at: int, ids: fx.Node) -> Place | Mixes:
    """The axes of ids take the place of one axis of the table, which is none of positions."""
    dims = place_of(context, table).dims
    if has(context, dims[at]) or (context.holds(table) and context.holds(ids)):
        return Mixes(at=node, why="it reads some positions of the sequence")
    return Place(dims=(*dims[:at], *place_of(context, ids).dims, *dims[at + 1 :]))


def selected(context: Following, node: fx.Node) -> Place | Mixes:
    """table.index_select(dim, ids)"""
    table, at, ids = node.args
    if not isinstance(table, fx.Node) or not isinstance(ids, fx.Node) or not isinstance(at, int):
        return Mixes(at=node, why="it reads no table")
    return _read(context, node, table, at % len(place_of(context, table).dims), ids)


def gathered(context: Following, node: fx.Node) -> Place | Mixes:
    """table.gather(dim, ids): along the other axes, ids stand beside the table's elements."""
    table, at, ids = node.args[:3]
    if not isinstance(table, fx.Node) or not isinstance(ids, fx.Node) or not isinstance(at, int):
        return Mixes(at=node, why="it reads no table")
    dims = place_of(context, ids).dims
    others = [dim for i, dim in enumerate(dims) if i != at % len(dims)]
    if context.holds(table) or any(has(context, dim) for dim in others):
        return Mixes(at=node, why="it reads some positions of the sequence")
    return Place(dims=dims)


def einsum(context: Following, node: fx.Node) -> Place | Mixes:
    """A letter that holds the sequence stands in the result, and is the sequence in each operand that has it."""
    equation, operands = node.args[0], node.args[1]
    if not isinstance(equation, str) or not isinstance(operands, (list, tuple)) or "." in equation:
        return Mixes(at=node, why="its equation is not read")
    left, arrow, result = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow or len(terms) != len(operands) or any(len(set(term)) != len(term) for term in (*terms, result)):
        return Mixes(at=node, why="its equation is not read")
    known: dict[str, Dim] = {}
    for term, x in zip(terms, operands, strict=True):
        dims = place_of(context, x).dims
        for letter, dim in zip(term, dims, strict=True):
            if axes.is_unit(dim):
                continue
            other = known.setdefault(letter, axes.resolve(dim))
            if (has(context, other) or has(context, dim)) and not alike(context, axes.resolve(dim), other):
                return Mixes(at=node, why="operands meet that hold the sequence in two ways")
    held = [letter for letter, dim in known.items() if has(context, dim)]
    if any(letter not in result for letter in held):
        return Mixes(at=node, why="it sums over the sequence")
    atoms = [atom for letter in held for atom in known[letter] if atom in context.atoms]
    if len(atoms) != len(set(atoms)):
        return Mixes(at=node, why="it pairs positions with each other, and is no attention that was recognised")
    fresh = axes.fresh(axes.shape_exprs(views.value(node)))
    return Place(
        dims=tuple(known[letter] if letter in held else dim for letter, dim in zip(result, fresh, strict=True))
    )
