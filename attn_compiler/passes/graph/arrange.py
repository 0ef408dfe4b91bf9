"""Bring a tensor's axes into another order by the fewest view calls: a `Recipe`, run on a fake value or written into a graph.

Only `flatten` can cost a copy, where the axes to merge are not adjacent in memory. Whoever runs the recipe sees the copy in the
strides. Sizes stay expressions until the recipe is run, so symbolic sizes work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import sympy
import torch

from attn_compiler.passes.graph import axes
from attn_compiler.passes.graph.axes import Atom, AxisError, Dim, Dims, Size

T = TypeVar("T")
Call = Callable[..., Any]
Resolve = Callable[[Size], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ViewCall:
    """One view call: function(x, *args); a Size in args stands for a number to be resolved."""

    function: Call
    args: tuple[Any, ...]


@dataclass(kw_only=True)
class Recipe:
    """Views to apply in order. `text` identifies the recipe."""

    views: list[ViewCall] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "; ".join(f"{v.function.__name__}{v.args}" for v in self.views)

    def run(self, x: Any, call: Call, resolve: Resolve) -> Any:
        """Apply the views to `x` through call(function, x, *args)."""
        for view in self.views:
            x = call(view.function, x, *(_resolved(a, resolve) for a in view.args))
        return x


def _resolved(arg: Any, resolve: Resolve) -> Any:
    if isinstance(arg, sympy.Expr):
        return resolve(arg)
    return [_resolved(a, resolve) for a in arg] if isinstance(arg, (tuple, list)) else arg


def arrange(root_dims: Dims, reads: dict[Atom, Atom], target: Sequence[Dim], *, broadcast: bool) -> Recipe:
    """Return the views that turn a tensor with `root_dims` into one with `target` (atoms of the site, one tuple a dimension).

    reads: site atom -> root atom. A target atom that the tensor does not vary along becomes a stride-0 axis of its size. If `broadcast` is
    set, a whole target dimension without varying atoms becomes an axis of size one.
    Raises AxisError when a root axis would be lost.
    """
    recipe = Recipe()
    own = [axes.resolve(dim) for dim in root_dims]
    _split(recipe, own)
    position = _drop_units(recipe, own)
    wanted = [_wanted(dim, reads, position, broadcast=broadcast) for dim in target]
    order = [position[reads[a]] for dim in wanted for a in dim if _varies(a, reads, position)]
    if sorted(order) != list(range(len(position))):
        raise AxisError("an axis of the tensor has no place in the arrangement")
    if order != sorted(order):
        recipe.views.append(_permutation(order))
    _insert_broadcasts(recipe, wanted, reads, position)
    _merge(recipe, wanted)
    return recipe


def _split(recipe: Recipe, own: list[Dim]) -> None:
    for i in range(len(own) - 1, -1, -1):
        if len(own[i]) > 1:
            recipe.views.append(ViewCall(function=torch.unflatten, args=(i, tuple(a.size for a in own[i]))))


def _drop_units(recipe: Recipe, own: list[Dim]) -> dict[Atom, int]:
    """Squeeze all dimensions of size one, which `_merge` adds again, and return the position of each remaining atom."""
    atoms = [a for dim in own for a in (dim or (Atom(axes.ONE),))]
    for i in range(len(atoms) - 1, -1, -1):
        if atoms[i].size == axes.ONE:
            recipe.views.append(ViewCall(function=torch.squeeze, args=(i,)))
    return {a: i for i, a in enumerate(a for a in atoms if a.size != axes.ONE)}


def _varies(atom: Atom, reads: dict[Atom, Atom], position: dict[Atom, int]) -> bool:
    return reads.get(atom) in position


def _wanted(dim: Dim, reads: dict[Atom, Atom], position: dict[Atom, int], *, broadcast: bool) -> Dim:
    atoms = tuple(a for a in axes.resolve(dim) if a.size != axes.ONE)
    if broadcast and not any(_varies(a, reads, position) for a in atoms):
        return ()
    return atoms


def _permutation(order: list[int]) -> ViewCall:
    moved = [i for i, at in enumerate(order) if i != at]
    if len(moved) == 2:
        return ViewCall(function=torch.transpose, args=tuple(moved))
    return ViewCall(function=torch.permute, args=(tuple(order),))


def _insert_broadcasts(recipe: Recipe, wanted: list[Dim], reads: dict[Atom, Atom], position: dict[Atom, int]) -> None:
    sizes: list[Any] = []
    for index, atom in enumerate(a for dim in wanted for a in dim):
        if _varies(atom, reads, position):
            sizes.append(-1)
        else:
            recipe.views.append(ViewCall(function=torch.unsqueeze, args=(index,)))
            sizes.append(atom.size)
    if any(s != -1 for s in sizes):
        recipe.views.append(ViewCall(function=torch.broadcast_to, args=(tuple(sizes),)))


def _merge(recipe: Recipe, wanted: list[Dim]) -> None:
    for index, dim in enumerate(wanted):
        if len(dim) > 1:
            recipe.views.append(ViewCall(function=torch.flatten, args=(index, index + len(dim) - 1)))
        elif not dim:
            recipe.views.append(ViewCall(function=torch.unsqueeze, args=(index,)))


def simplified(recipe: Recipe) -> Recipe:
    """Return the recipe without pairs of views that undo each other."""
    views: list[ViewCall] = []
    for view in recipe.views:
        if views and _undoes(views[-1], view):
            views.pop()
        else:
            views.append(view)
    return Recipe(views=views)


def _undoes(first: ViewCall, second: ViewCall) -> bool:
    if first.function is torch.squeeze and second.function is torch.unsqueeze:
        return first.args == second.args
    if first.function is torch.unflatten and second.function is torch.flatten:
        dim, sizes = first.args
        return bool(second.args == (dim, dim + len(sizes) - 1))
    return False
