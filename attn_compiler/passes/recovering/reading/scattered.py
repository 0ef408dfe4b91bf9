"""Numbers that are written at indices. With computed indices, an element was written if its place is among them. With run-time indices,
only the tensor itself tells."""

from __future__ import annotations

import math

import torch
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr, Index, Load
from attn_compiler.index_expr.junctions import split
from attn_compiler.index_expr.linear_forms import solved
from attn_compiler.passes.graph import axes
from attn_compiler.passes.graph.views import argument
from attn_compiler.passes.recovering.reading.core import At, Reader, ReadOp, broadcast, converted_of
from attn_compiler.passes.recovering.reading.nodes import dim_of, fake, size

aten = torch.ops.aten

#: the most indices in a list that the model holds
_MOST_NUMBERS = 64


def somewhere(condition: Expr, variable: Index, extent: Expr) -> Expr | None:
    """Return when a condition holds for some variable in [0, extent), if an equation in it fixes the variable; else None."""
    parts = split("and", condition)
    for part in parts:
        at = solved(part, variable)
        if at is None:
            continue
        inside = (ix.compare(">=", at, ix.ZERO), ix.compare("<", at, extent))
        return ix.apply("and", *inside, *(ix.substitute(rest, variable, at) for rest in parts if rest is not part))
    return None


def _put(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    """Read x[indices] = number, with truth values or computed places as indices."""
    source, indices, values = node.args[:3]
    if not isinstance(source, fx.Node) or not isinstance(values, fx.Node) or argument(node, "accumulate", False):
        return None
    given = [(dim, index) for dim, index in enumerate(indices) if isinstance(index, fx.Node)]  # type: ignore[arg-type]
    if any(fake(index).dtype == torch.bool for _, index in given):
        dim, index = given[0]
        own = at[dim : dim + fake(index).dim()]
        return _written(reader, node, at, ix.as_bool(reader.read(index, own)), values) if len(given) == 1 else None
    reached = _triangle(reader, given, at) or _reached(reader, given, at)
    return None if reached is None else _written(reader, node, at, reached, values)


def _fill(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    """Read x.index_fill(dim, index, number)."""
    dim, index = dim_of(node), argument(node, "index")
    if dim is None or not isinstance(index, fx.Node) or fake(index).dim() > 1:
        return None
    reached = _reached(reader, [(dim % len(at), index)], at)
    return None if reached is None else _written(reader, node, at, reached, argument(node, "value"))


def _scatter(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    """Read x.scatter(dim, index, number), with an index for each place of the other axes."""
    dim, index, value = dim_of(node), argument(node, "index"), argument(node, "value")
    if dim is None or not isinstance(index, fx.Node) or fake(index).dim() != len(at) or not at:
        return None
    dim %= len(at)
    variable, extents = reader.scan_variable(), list(map(size, axes.shape_exprs(fake(index))))
    place = reader.read(index, (*at[:dim], variable, *at[dim + 1 :]))
    if ix.kind_of(place) != "int" or any(extent is None for extent in extents):
        return _at_run_time(reader, node, at)
    places = enumerate(zip(at, extents, strict=True))
    inside = [ix.compare("<", i, n) for axis, (i, n) in places if n is not None and axis != dim]
    length = extents[dim]
    found = None if length is None else somewhere(ix.compare("==", place, at[dim]), variable, length)
    if found is None:
        return _at_run_time(reader, node, at)
    return _written(reader, node, at, ix.apply("and", found, *inside), value)


def _written(reader: Reader, node: fx.Node, at: At, reached: Expr, value: object) -> Expr | None:
    """Return the number where the element was reached, and the old element elsewhere."""
    source = node.args[0]
    if not isinstance(source, fx.Node):
        return None
    if isinstance(value, fx.Node):
        if any(extent != axes.ONE for extent in axes.shape_exprs(fake(value))):
            return None
        number = converted_of(reader, reader.read(value, (ix.ZERO,) * fake(value).dim()), node, fake(value).dtype, at)
    else:
        number = converted_of(reader, Const(value), node, None, at) if isinstance(value, (bool, int, float)) else None
    return None if number is None else ix.where(reached, number, reader.read(source, at))


def _reached(reader: Reader, given: list[tuple[int, fx.Node]], at: At) -> Expr | None:
    """Return when an element is at computed indices with common axes: an equation for each index, solved for each axis."""
    rank = max(fake(index).dim() for _, index in given)
    lengths: list[Expr | None] = [ix.ONE] * rank
    for _, index in given:
        for axis, length in enumerate(axes.shape_exprs(fake(index)), rank - fake(index).dim()):
            lengths[axis] = size(length) if length != axes.ONE else lengths[axis]
    variables = [Index(f"{reader.scan_variable().name}.{axis}") for axis in range(rank)]
    equations: list[Expr] = []
    for dim, index in given:
        place = reader.read(index, broadcast(fake(index), tuple(variables[rank - fake(index).dim() :])))
        if len(given) == 1 and (listed := _listed(reader, place, at[dim])) is not None:
            return listed
        within = {
            variable.name: ix.linear(ix.add(n, Const(-1))) for variable, n in zip(variables, lengths, strict=True) if n
        }
        least = ix.bounds(place, within)[0]
        if least is None or least < 0:
            # Indices may count from the end.
            return None
        equations.append(ix.compare("==", place, at[dim]))
    found: Expr | None = ix.apply("and", *equations)
    for variable, length in zip(variables, lengths, strict=True):
        if found is None or length is None:
            return None
        if length != ix.ONE:
            found = somewhere(found, variable, length)
    return found


def _listed(reader: Reader, place: Expr, at: Expr) -> Expr | None:
    """Return when an index is one of a list that the model holds; None if there is no such list."""
    version = reader.tensors[place.tensor] if isinstance(place, Load) and len(place.at) == 1 else None
    held = None if version is None or version.since is not None else reader.mirror.constant(version.node)
    if held is None or not 0 < held.numel() <= _MOST_NUMBERS or int(held.min()) < 0:
        return None
    return ix.apply("or", *(ix.compare("==", at, Const(int(number))) for number in held))


def _triangle(reader: Reader, given: list[tuple[int, fx.Node]], at: At) -> Expr | None:
    """Return when an element is at one of torch.triu_indices(rows, columns, offset), or of tril_indices; else None."""
    if len(given) != 2 or any(fake(index).dim() != 1 for _, index in given):
        return None
    loads = [reader.read(index, (Index("i"),)) for _, index in given]
    if not all(isinstance(load, Load) and load.at[0] == Const(row) for row, load in enumerate(loads)):
        return None
    nodes = {reader.tensors[load.tensor].node for load in loads if isinstance(load, Load)}
    made = next(iter(nodes))
    upper = made.target is aten.triu_indices.default
    rows, columns, offset = argument(made, "row"), argument(made, "col"), argument(made, "offset", 0)
    if len(nodes) > 1 or not (upper or made.target is aten.tril_indices.default):
        return None
    extents = [reader.operand(extent, torch.Size(()), ()) for extent in (rows, columns, offset)]
    row, column = (at[dim] for dim, _ in given)
    if any(extent is None for extent in extents):
        return None
    within = [ix.compare("<", i, n) for i, n in zip((row, column), extents, strict=False) if n is not None]
    beside = ix.add(column, row, -1)
    return ix.apply("and", *within, ix.compare(">=" if upper else "<=", beside, extents[2]))  # type: ignore[arg-type]


def _at_run_time(reader: Reader, node: fx.Node, at: At) -> Expr | None:
    """Read a tensor of one number after another number was written to places known at run time: one of two, by a load of the element."""
    base, value, dtype = node.args[0], argument(node, "value"), fake(node).dtype
    if not isinstance(base, fx.Node) or not isinstance(value, (bool, int, float)) or not dtype.is_floating_point:
        return None
    before, number = reader.read(base, at), float(value)
    if (
        not isinstance(before, Const)
        or before.value == number
        or not all(_has(dtype, x) for x in (before.value, number))
    ):
        return None
    element = reader.load_at(reader.mirror.order(node) + 1, node, at)
    return ix.where(ix.apply("eq", element, Const(number)), Const(number), before)


def _has(dtype: torch.dtype, x: float) -> bool:
    """True if x is a number of the dtype, so that a tensor holds it exactly."""
    return not math.isnan(x) and float(torch.tensor(x, dtype=torch.float64).to(dtype)) == x


READERS: dict[object, ReadOp] = {
    **dict.fromkeys((aten.index_put.default, aten.index_put_.default), _put),
    **dict.fromkeys((aten.index_fill.int_Scalar, aten.index_fill_.int_Scalar), _fill),
    **dict.fromkeys((aten.scatter.value, aten.scatter_.value), _scatter),
}
