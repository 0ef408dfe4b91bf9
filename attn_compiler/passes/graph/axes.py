"""Axes of tensors as products of atoms, followed forward through views.

A dimension is a tuple of `Atom`s in row-major order. Views reorder, merge and split atoms and never move an element. So two tensors whose
dimensions share atoms agree on what an axis means, however it is spelled. A split is recorded in the atom itself, so everything that held
the atom sees its parts. Sizes are sympy expressions, compared without adding guards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import sympy
import torch

from attn_compiler.torch_private import symbols as torch_symbols

Size: TypeAlias = sympy.Expr
ONE = sympy.Integer(1)


class AxisError(Exception):
    """A view that can't be followed; the text says where. Internal: match turns it into a Reason."""


class Atom:
    """One axis that is moved as a whole, until it is found to be a product. `broadcast`: every index reads the same element."""

    __slots__ = ("size", "broadcast", "parts")

    def __init__(self, size: Size, *, broadcast: bool = False) -> None:
        self.size = size
        self.broadcast = broadcast
        self.parts: tuple[Atom, Atom] | None = None

    def split(self, outer: Size) -> None:
        """Replace this atom by (outer, size / outer), outer first in row-major order."""
        inner = exact_quotient(self.size, outer)
        if inner is None:
            raise AxisError(f"an axis of size {self.size} is split at {outer}")
        self.parts = (Atom(outer, broadcast=self.broadcast), Atom(inner, broadcast=self.broadcast))

    def __repr__(self) -> str:
        return f"{self.size}{'*' if self.broadcast else ''}"


Dim = tuple[Atom, ...]
Dims = tuple[Dim, ...]


def size_expr(size: int | torch.SymInt) -> Size:
    """Return a size as a sympy expression; a symbolic one is never specialised."""
    return torch_symbols.expr_of(size) if isinstance(size, torch.SymInt) else sympy.Integer(size)


def shape_exprs(value: torch.Tensor) -> tuple[Size, ...]:
    return tuple(size_expr(s) for s in value.shape)


def unify(a: int | torch.SymInt, b: int | torch.SymInt) -> None:
    """Make two symbolic sizes equal by a guard, for an op that can only run if they are equal.

    Most ops add that guard themselves. Sizes that are known, that differ now, or that only the device knows stay as they are.
    """
    if not isinstance(a, torch.SymInt) or not isinstance(b, torch.SymInt):
        return
    if not same_size(size_expr(a), size_expr(b)) and a.node.has_hint() and b.node.has_hint():
        bool(a == b)


def same_size(a: Size, b: Size) -> bool:
    return bool(a == b or sympy.expand(a - b) == 0)


def exact_quotient(a: Size, b: Size) -> Size | None:
    """Return a / b where it is provably whole, else None."""
    if b.is_Integer and a.is_Integer:
        return sympy.Integer(int(a) // int(b)) if int(b) != 0 and int(a) % int(b) == 0 else None
    quotient = sympy.cancel(a / b)
    numerator, denominator = quotient.as_numer_denom()
    return quotient if denominator == 1 and not numerator.has(sympy.Rational(1, 2)) else None


def ratio(a: Size, b: Size) -> sympy.Rational | None:
    """Return a / b where it is one number for all values of the symbols, else None."""
    found = sympy.cancel(a / b) if b != 0 and a.free_symbols == b.free_symbols else None
    return found if found is not None and found.is_Rational and found > 0 else None


def product(sizes: Iterable[Size]) -> Size:
    result: Size = ONE
    for size in sizes:
        result = result * size
    return sympy.expand(result)


def resolve(dim: Iterable[Atom]) -> Dim:
    """Return the atoms of a dimension with every split carried out."""
    out: list[Atom] = []
    for atom in dim:
        out.extend(resolve(atom.parts) if atom.parts is not None else (atom,))
    return tuple(out)


def flat(dims: Iterable[Dim]) -> Dim:
    return resolve(atom for dim in dims for atom in dim)


def dim_size(dim: Dim) -> Size:
    return product(atom.size for atom in resolve(dim))


def fresh(sizes: Sequence[Size]) -> Dims:
    """Make one new atom a dimension."""
    return tuple((Atom(size),) for size in sizes)


def is_unit(dim: Dim) -> bool:
    return bool(dim_size(dim) == ONE)


def regroup(dims: Dims, sizes: Sequence[Size]) -> Dims:
    """Return the dimensions after a reshape to `sizes`: atoms keep their order, and split where a boundary falls inside one."""
    queue = list(flat(dims))
    out: list[Dim] = []
    for position, size in enumerate(sizes):
        out.append(_take(queue, size, next_is_unit=position + 1 < len(sizes) and sizes[position + 1] == ONE))
    if any(atom.size != ONE for atom in queue):
        raise AxisError(f"a reshape to {list(sizes)} leaves {queue} over")
    return tuple(out)


def _take(queue: list[Atom], size: Size, *, next_is_unit: bool) -> Dim:
    if size == ONE:
        return (queue.pop(0),) if queue and queue[0].size == ONE else ()
    taken: list[Atom] = []
    have: Size = ONE
    while not same_size(have, size):
        if not queue:
            raise AxisError(f"no axes left for a dimension of size {size}")
        atom = queue.pop(0)
        needed = exact_quotient(size, have)
        if needed is None:
            raise AxisError(f"a dimension of size {size} can't be built from axes that start with {have}")
        if exact_quotient(needed, atom.size) is None:
            atom.split(needed)
            first, rest = resolve((atom,))
            queue.insert(0, rest)
            atom = first
        taken.append(atom)
        have = product((have, atom.size))
    while queue and queue[0].size == ONE and not next_is_unit:
        taken.append(queue.pop(0))
    return tuple(taken)


def expand(dims: Dims, sizes: Sequence[Size]) -> Dims:
    """Return the dimensions after Tensor.expand: new leading axes and grown unit axes are broadcast atoms."""
    padded: list[Dim] = [()] * (len(sizes) - len(dims)) + list(dims)
    grown = []
    for dim, size in zip(padded, sizes, strict=True):
        same = same_size(dim_size(dim), size)
        grown.append(dim if same else (Atom(size, broadcast=True),))
    return tuple(grown)


def align(mine: Dim, theirs: Dim) -> list[tuple[Atom, Atom]]:
    """Pair the atoms of two dimensions of equal size, splitting either side until they correspond one to one.

    Unit atoms are left out: they carry no index. The last atoms of both sides are paired even where only a guard says that they are of one
    size (`scores[s0] + slopes[64 - Max(0, 64 - s0)]`).
    """
    left, right = [[a for a in resolve(d) if a.size != ONE] for d in (mine, theirs)]
    pairs: list[tuple[Atom, Atom]] = []
    while left and right:
        a, b = left.pop(0), right.pop(0)
        if not same_size(a.size, b.size):
            a, b = (a, b) if not left and not right and _agree(a, b) else _cut(a, b, left, right)
        pairs.append((a, b))
    if left or right:
        raise AxisError(f"axes {mine} and {theirs} differ in size")
    return pairs


def _agree(a: Atom, b: Atom) -> bool:
    """Give two atoms one spelling of their size; False for two different numbers."""
    if a.size.is_Integer and b.size.is_Integer:
        return False
    a.size = b.size = min(a.size, b.size, key=lambda size: (not size.is_Integer, not size.is_Symbol))
    return True


def _cut(a: Atom, b: Atom, left: list[Atom], right: list[Atom]) -> tuple[Atom, Atom]:
    if exact_quotient(a.size, b.size) is not None:
        a.split(b.size)
        first, rest = resolve((a,))
        left.insert(0, rest)
        return first, b
    b.split(a.size)
    first, rest = resolve((b,))
    right.insert(0, rest)
    return a, first
