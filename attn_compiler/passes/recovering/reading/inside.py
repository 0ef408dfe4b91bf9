"""Views in reverse, from elements of the source to those of the view: they tell which elements a write through the view reaches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const
from attn_compiler.passes.graph import axes, mutation
from attn_compiler.passes.graph.views import PERMUTES, RESHAPES, SQUEEZES, argument
from attn_compiler.passes.recovering.reading import moving
from attn_compiler.passes.recovering.reading.core import At, Inside
from attn_compiler.passes.recovering.reading.nodes import dim_of, fake, size

aten = torch.ops.aten

#: (view, source, indices in the source) -> when the view has that element, and at which indices; None: unknown
FindInside = Callable[[fx.Node, fx.Node, At], Inside | None]


def reached(written: fx.Node, base: fx.Node, at: At) -> Inside | None:
    """Return when a write to `written` reaches the element of `base` at `at`, and the indices of that element in `written`.

    None if `written` is not a view of `base`, or a view that can't be followed.
    """
    if not isinstance(written.meta.get("val"), torch.Tensor):
        return None
    if written is base or _are_the_same(written, base):
        return ix.TRUE, at
    returned = mutation.returned(written)
    source = returned if returned is not None else next(iter(written.all_input_nodes), None)
    if source is None or not mutation.storages(written) & mutation.storages(source):
        return None
    above = reached(source, base, at)
    if above is None or returned is not None:
        return above
    find = INSIDE.get(written.target)
    own = None if find is None else find(written, source, above[1])
    return None if own is None else (ix.apply("and", above[0], own[0]), own[1])


def _are_the_same(a: fx.Node, b: fx.Node) -> bool:
    """True if two tensors of one storage have the same elements in the same order, by dtype, offset, shape and strides."""
    x, y = fake(a), fake(b)
    placed = [(axes.size_expr(v.storage_offset()), *map(axes.size_expr, (*v.shape, *v.stride()))) for v in (x, y)]
    return x.dtype == y.dtype and x.dim() == y.dim() and placed[0] == placed[1]


def _same(view: fx.Node, source: fx.Node, at: At) -> Inside | None:
    return ix.TRUE, at


def _unsqueezed(view: fx.Node, source: fx.Node, at: At) -> Inside | None:
    dim = dim_of(view)
    if dim is None:
        return None
    dim %= len(at) + 1
    return ix.TRUE, (*at[:dim], ix.ZERO, *at[dim:])


def _reshaped(view: fx.Node, source: fx.Node, at: At) -> Inside | None:
    own = moving.reindexed(at, fake(source), fake(view))
    return None if own is None else (ix.TRUE, own)


def _permuted(view: fx.Node, source: fx.Node, at: At) -> Inside | None:
    order = moving.permuted(view, len(at))
    return None if order is None else (ix.TRUE, tuple(at[dim] for dim in order))


def _selected(view: fx.Node, source: fx.Node, at: At) -> Inside | None:
    dim, index = dim_of(view), argument(view, "index")
    if dim is None or not isinstance(index, int):
        return None
    dim %= len(at)
    place = size(axes.shape_exprs(fake(source))[dim]) if index < 0 else ix.ZERO
    if place is None:
        return None
    return ix.compare("==", at[dim], ix.add(place, Const(index))), (*at[:dim], *at[dim + 1 :])


def _sliced(view: fx.Node, source: fx.Node, at: At) -> Inside | None:
    dim, step = dim_of(view, 0), argument(view, "step", 1)
    if dim is None or not isinstance(step, int):
        return None
    dim %= len(at)
    first = moving.first_of_slice(view, source, dim)
    count = size(axes.shape_exprs(fake(view))[dim])
    if first is None or count is None:
        return None
    past = ix.add(at[dim], first, -1)
    conditions = [
        ix.compare(">=", past, ix.ZERO),
        ix.compare("<", past, ix.mul(count, Const(step))),
        ix.compare("==", ix.apply("mod", past, Const(step)), ix.ZERO),
    ]
    own = ix.apply("floordiv", past, Const(step))
    return ix.decide(ix.apply("and", *conditions), {}), (*at[:dim], own, *at[dim + 1 :])


#: ATen view -> rule for the elements of its source that it holds
INSIDE: dict[object, FindInside] = {
    **dict.fromkeys(PERMUTES, _permuted),
    **dict.fromkeys((*RESHAPES, *SQUEEZES), _reshaped),
    **dict.fromkeys((aten.alias.default, aten.detach.default, aten.contiguous.default), _same),
    **dict.fromkeys((aten.to.dtype, aten.to.dtype_layout), _same),
    aten.unsqueeze.default: _unsqueezed,
    aten.select.int: _selected,
    **dict.fromkeys((aten.slice.Tensor, aten.narrow.default), _sliced),
}
