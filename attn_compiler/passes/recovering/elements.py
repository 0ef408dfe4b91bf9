"""Indices of the element for score (b, h, q, k) in a mask or bias, whatever axes its dimensions are made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Expr, Index, Linear, Ranges
from attn_compiler.passes.graph import axes
from attn_compiler.passes.graph.axes import Atom, Dim, Dims
from attn_compiler.passes.graph.site import Match, Operand
from attn_compiler.passes.recovering import reading
from attn_compiler.passes.recovering.reading import Unreadable


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Adjacent axes of the site, and the index that runs along them."""

    atoms: Dim
    index: Expr


def indices(match: Match, dims: Dims) -> tuple[Expr, ...]:
    """Return an index over (b, h, q, k) for each dimension of a tensor. dims: the site's axes that each dimension is made of.

    Raises Unreadable if a dimension of several axes contains a size that `reading.size` can't express.
    """
    groups = [(Index(name), _long(group)) for name, group in _groups(match)]
    # Whole groups come first, then their parts: b itself, then b // windows and b % windows.
    whole = [_Place(atoms=atoms, index=index) for index, atoms in groups if atoms]
    places = whole + [part for index, atoms in groups if len(atoms) > 1 for part in _parts(index, atoms)]
    return tuple(_index(axes.resolve(dim), places) for dim in dims)


def ranges(match: Match, longer: Mapping[int, int]) -> Ranges:
    """Return the largest value of each index whose size can be expressed. longer: as in `Readers.longer`."""
    found: dict[str, Linear] = {}
    for name, group in _groups(match):
        size = reading.size(axes.dim_size(group))
        if isinstance(size, ix.Const) and isinstance(size.value, int):
            size = ix.Const(longer.get(size.value, size.value))
        if size is not None:
            found[name] = ix.combine(ix.linear(size), Linear((), 1), -1)
    return found


def varies_along(match: Match, operand: Operand) -> str:
    """Return the letters, of "bhqk", of the indices that select another element of the operand."""
    return "".join(name for name, group in _groups(match) if any(map(operand.varies_along, _long(group))))


def shape(match: Match, along: str) -> tuple[int | str, ...]:
    """Return (B, Hq, Sq, Skv), with 1 for each index whose letter is not in `along`."""
    sizes = ((name, axes.dim_size(group)) for name, group in _groups(match))
    return tuple(1 if name not in along else int(size) if size.is_Integer else str(size) for name, size in sizes)


def _groups(match: Match) -> tuple[tuple[str, Dim], ...]:
    return (("b", match.axes.batch), ("h", match.axes.heads), ("q", match.axes.query), ("k", match.axes.key))


def _long(dim: Dim) -> Dim:
    """Return the atoms of a dimension that are longer than one."""
    return tuple(atom for atom in axes.resolve(dim) if atom.size != axes.ONE)


def _parts(index: Expr, atoms: Dim) -> Iterable[_Place]:
    inner: Expr | None = ix.ONE
    for position in reversed(range(len(atoms))):
        size = reading.size(atoms[position].size)
        if inner is None:
            return
        own = ix.apply("floordiv", index, inner)
        if position == 0:
            yield _Place(atoms=atoms[:1], index=own)
        elif size is not None:
            yield _Place(atoms=(atoms[position],), index=ix.apply("mod", own, size))
        inner = None if size is None else ix.mul(inner, size)


def _index(atoms: Dim, places: list[_Place]) -> Expr:
    rest: tuple[Atom, ...] = tuple(atom for atom in atoms if atom.size != axes.ONE)
    total: Expr = ix.ZERO
    while rest:
        place = next((p for p in places if rest[: len(p.atoms)] == p.atoms), None)
        size = None if place is None else reading.size(axes.product(atom.size for atom in place.atoms))
        if place is None or (total != ix.ZERO and size is None):
            raise Unreadable(
                "a dimension of the mask is a part of the batch or of the heads, of a size that is no plain one"
            )
        total = place.index if size is None else ix.add(ix.mul(total, size), place.index)
        rest = rest[len(place.atoms) :]
    return total
