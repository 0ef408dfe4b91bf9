"""Ops of the mirror that only move, repeat or re-label elements, as functions on dimensions: one line of VIEWS each.

An op that is not listed is no view. `detach` is left out on purpose: looking through it would bring a gradient back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

from attn_compiler.passes.graph import axes
from attn_compiler.passes.graph.axes import Atom, AxisError, Dim, Dims

aten = torch.ops.aten
Handler = Callable[[fx.Node, Dims], Dims]
#: for each axis of a result, the axis of the input
Order = tuple[int, ...]


def value(node: fx.Node) -> torch.Tensor:
    """Return the fake tensor that a mirror node stands for."""
    val: torch.Tensor = node.meta["val"]
    return val


def source(node: fx.Node) -> fx.Node:
    """Return the node that a view, a cast or another one-tensor op reads."""
    first = node.args[0]
    if not isinstance(first, fx.Node):
        raise AxisError(f"{node.target} reads no single tensor")
    return first


def argument(node: fx.Node, name: str, default: object = None) -> object:
    """Return an argument of an ATen node by its schema name, whether it was passed by position, by keyword or not at all."""
    if name in node.kwargs:
        return node.kwargs[name]
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        for position, parameter in enumerate(target._schema.arguments):
            if parameter.name == name:
                if position < len(node.args):
                    return node.args[position]
                return parameter.default_value if parameter.has_default_value() else default
    return default


def _reshape(node: fx.Node, dims: Dims) -> Dims:
    return axes.regroup(dims, axes.shape_exprs(value(node)))


def _int(node: fx.Node, name: str) -> int:
    given = argument(node, name)
    if not isinstance(given, int):
        raise AxisError(f"{node.target} has the {name} {given}")
    return given


def _swapped(rank: int, i: int, j: int) -> Order:
    order = list(range(rank))
    order[i], order[j] = order[j], order[i]
    return tuple(order)


def _transpose(node: fx.Node, rank: int) -> Order:
    return _swapped(rank, _int(node, "dim0"), _int(node, "dim1"))


def _last_two(node: fx.Node, rank: int) -> Order:
    return _swapped(rank, -1, -2) if rank >= 2 else tuple(range(rank))


def _ints(node: fx.Node, name: str) -> list[int]:
    given = argument(node, name)
    found = [given] if isinstance(given, int) else list(given) if isinstance(given, (list, tuple)) else None
    if found is None or not all(isinstance(i, int) for i in found):
        raise AxisError(f"{node.target} has the {name} {given}")
    return found


def _movedim(node: fx.Node, rank: int) -> Order:
    sources, targets = ([i % rank for i in _ints(node, name)] for name in ("source", "destination"))
    moved = dict(zip(targets, sources, strict=True))
    rest = iter(i for i in range(rank) if i not in sources)
    return tuple(moved[i] if i in moved else next(rest) for i in range(rank))


#: ops that permute axes -> (node, rank) -> for each axis of the result, that of the input. Matching, mask reading and writes through views
#: all use it.
PERMUTES: dict[object, Callable[[fx.Node, int], Order]] = {
    aten.transpose.int: _transpose,
    aten.swapdims.default: _transpose,
    aten.swapaxes.default: lambda node, rank: _swapped(rank, _int(node, "axis0"), _int(node, "axis1")),
    aten.t.default: _last_two,
    aten.mT.default: _last_two,
    aten.numpy_T.default: lambda _, rank: tuple(reversed(range(rank))),
    aten.permute.default: lambda node, rank: tuple(i % rank for i in _ints(node, "dims")),
    **dict.fromkeys((aten.movedim.int, aten.movedim.intlist, aten.moveaxis.int, aten.moveaxis.intlist), _movedim),
}

#: ops that keep the elements in their row-major order
RESHAPES: tuple[object, ...] = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.view_as.default,
    aten.reshape_as.default,
    aten.flatten.using_ints,
    aten.ravel.default,
    aten.unflatten.int,
)

#: ops that may change the dtype, and keep shape and elements
CASTS: tuple[object, ...] = (aten.to.dtype, aten.to.dtype_layout, aten.to.other, aten._to_copy.default)

#: ops that keep shape, dtype and elements
COPIES: tuple[object, ...] = (
    *(aten.clone.default, aten.contiguous.default, aten.alias.default),
    *(aten.detach.default, aten.lift_fresh.default),
)

#: ops that leave out axes of size one
SQUEEZES: tuple[object, ...] = (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)

#: ops that repeat along axes of size one
EXPANDS: tuple[object, ...] = (aten.expand.default, aten.expand_as.default, aten.broadcast_to.default)


def _permuted(node: fx.Node, dims: Dims) -> Dims:
    return tuple(dims[i] for i in PERMUTES[node.target](node, len(dims)))


def _unsqueeze(node: fx.Node, dims: Dims) -> Dims:
    at = _int(node, "dim") % (len(dims) + 1)
    return (*dims[:at], (), *dims[at:])


def _squeeze(node: fx.Node, dims: Dims) -> Dims:
    given = argument(node, "dim")
    asked = range(len(dims)) if given is None else [given] if isinstance(given, int) else list(given)  # type: ignore[call-overload]
    dropped = {i % len(dims) for i in asked if axes.is_unit(dims[i])}
    return tuple(d for i, d in enumerate(dims) if i not in dropped)


def _repeat_interleave(node: fx.Node, dims: Dims) -> Dims:
    times, dim = argument(node, "repeats"), argument(node, "dim")
    if not isinstance(dim, int) or not isinstance(times, (int, torch.SymInt)):
        raise AxisError("repeat_interleave without one dimension and one count")
    at = dim % len(dims)
    return (*dims[:at], (*dims[at], Atom(axes.size_expr(times), broadcast=True)), *dims[at + 1 :])


def _repeat(node: fx.Node, dims: Dims) -> Dims:
    times = list(argument(node, "repeats"))  # type: ignore[call-overload]
    padded: list[Dim] = [()] * (len(times) - len(dims)) + list(dims)
    return tuple(_tiled(dim, count) for dim, count in zip(padded, times, strict=True))


def _tiled(dim: Dim, count: object) -> Dim:
    if not isinstance(count, (int, torch.SymInt)):
        raise AxisError("repeat by a traced count")
    size = axes.size_expr(count)
    return dim if size == axes.ONE else (Atom(size, broadcast=True), *dim)


def _whole(node: fx.Node, dims: Dims) -> Dims:
    """Keep the dimensions through a slice or a conversion that changes nothing."""
    before, after = value(source(node)), value(node)
    same_shape = axes.shape_exprs(before) == axes.shape_exprs(after)
    if not same_shape or before.dtype != after.dtype or before.device != after.device:
        raise AxisError(f"{node.target} changes its input")
    return dims


VIEWS: dict[object, Handler] = {
    **dict.fromkeys(PERMUTES, _permuted),
    **dict.fromkeys(RESHAPES, _reshape),
    **dict.fromkeys(SQUEEZES, _squeeze),
    **dict.fromkeys(EXPANDS, lambda node, dims: axes.expand(dims, axes.shape_exprs(value(node)))),
    aten.unsqueeze.default: _unsqueeze,
    aten.repeat_interleave.self_int: _repeat_interleave,
    aten.repeat.default: _repeat,
    **{op: lambda _, dims: dims for op in COPIES if op is not aten.detach.default},
    **dict.fromkeys((aten.to.dtype, aten.to.dtype_layout, aten.to.other, aten.to.device, aten.type_as.default), _whole),
    aten.slice.Tensor: _whole,
    **dict.fromkeys((aten.dropout.default, aten.dropout_.default), lambda n, d: _inactive_dropout(n, d)),
}

#: ops that cost memory traffic or repeat elements: an operand is read from above them where it can be
_COSTLY = {*EXPANDS, aten.repeat_interleave.self_int, aten.repeat.default, aten.contiguous.default, aten.clone.default}


#: ops that ask a tensor for its shape, dtype or device -> which argument that is; no element of it is read
_ASKS_METADATA: dict[object, int] = {
    **dict.fromkeys((aten.expand_as.default, aten.view_as.default, aten.reshape_as.default), 1),
    **dict.fromkeys((aten.type_as.default, aten.to.other), 1),
    **{getattr(aten, f"{fill}_like").default: 0 for fill in ("zeros", "ones", "full", "empty")},
    **{getattr(aten, f"new_{fill}").default: 0 for fill in ("zeros", "ones", "full", "empty")},
    **dict.fromkeys((aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default), 0),
}


def reads_elements(user: fx.Node, node: fx.Node) -> bool:
    """Return whether `user` needs the elements of `node`, not only its shape, dtype or device."""
    asks = _ASKS_METADATA.get(user.target)
    return asks is None or [i for i, arg in enumerate(user.args) if arg is node] != [asks]


def _inactive_dropout(node: fx.Node, dims: Dims) -> Dims:
    if dropout_probability(node) != 0.0:
        raise AxisError("dropout")
    return dims


def dropout_probability(node: fx.Node) -> float:
    """Return the probability with which aten.dropout drops."""
    return float(argument(node, "p")) if argument(node, "train") else 0.0  # type: ignore[arg-type]


def forward(node: fx.Node, dims: Dims) -> Dims:
    """Return the dimensions of `node`, a view of a value that has `dims`. Raises AxisError if it is none, or can't be followed."""
    handler = VIEWS.get(node.target)
    if handler is None:
        raise AxisError(f"{node.target} is no view")
    return handler(node, dims)


def forward_whole(node: fx.Node, dims: Dims, whole: Collection[Atom]) -> Dims | None:
    """Return the dimensions as `forward`, without splitting atoms that other values hold; None if the view splits one of `whole`.

    It works on copies of the atoms: all that hold an atom would see its split.
    """
    copies = {atom: Atom(atom.size, broadcast=atom.broadcast) for dim in dims for atom in axes.resolve(dim)}
    own = {copy: atom for atom, copy in copies.items()}
    found = forward(node, tuple(tuple(copies[a] for a in axes.resolve(dim)) for dim in dims))
    if any(atom in copies and copies[atom].parts is not None for atom in whole):
        return None
    return tuple(tuple(own.get(a, a) for a in axes.resolve(dim)) for dim in found)


def named_axes(node: fx.Node, rank: int, argument_name: str = "dim") -> set[int]:
    """Return the axes that an op names. None and no axes at all both mean all of them."""
    given: Any = argument(node, argument_name, 0)
    if given is None or (isinstance(given, (tuple, list)) and not given):
        return set(range(rank))
    return {int(i) % rank for i in (given if isinstance(given, (tuple, list)) else [given])}


def axes_after(dims: Dims, result: torch.Tensor, which: Collection[int], rank: int) -> Dims:
    """Return the axes of a result of an op along the axes `which`: these are fresh if the op keeps the rank, and gone if it does not."""
    if result.dim() == rank:
        fresh = axes.fresh(axes.shape_exprs(result))
        return tuple(fresh[i] if i in which else dim for i, dim in enumerate(dims))
    return tuple(dim for i, dim in enumerate(dims) if i not in which)


def is_view(node: fx.Node) -> bool:
    """Return whether `forward` can follow this node (a cast to the same dtype counts, another one does not)."""
    handler = VIEWS.get(node.target)
    if handler in (_whole, VIEWS[aten.dropout.default]):
        try:
            handler(node, ())
        except AxisError:
            return False
    return handler is not None


def is_costly(node: fx.Node) -> bool:
    """Return whether reading above this view saves a copy or a repetition."""
    merges = node.target in RESHAPES and value(node).dim() < value(source(node)).dim()
    return merges or node.target in _COSTLY


def chain(node: fx.Node) -> list[fx.Node]:
    """Return `node` and everything above it through views, nearest first; the last one is no view."""
    nodes = [node]
    while is_view(nodes[-1]):
        nodes.append(source(nodes[-1]))
    return nodes
