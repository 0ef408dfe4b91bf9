"""Values taken at the tokens that are computed, and given back in the model's own shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from attn_compiler.passes.graph.axes import Dims
from attn_compiler.passes.unpad.forms import Context, FormRecipe, Indexed, Need, places, require_alone

aten = torch.ops.aten


def indexed(node: fx.Node, form: Indexed) -> FormRecipe:
    """Return the recipe of a plain value's elements at the real tokens."""

    def make(maker: Any, given: tuple[fx.Node, ...]) -> fx.Node:
        x = given[0]
        for _ in range(form.rank - x.meta["example_value"].dim()):
            x = maker.call(aten.unsqueeze.default, x, 0)
        i, j = form.batch, form.seq
        shape = x.meta["example_value"].shape
        if i == j:
            return x if _is_one(shape[i]) else maker.call(aten.index_select.default, x, i, maker.given.tokens)
        if _is_one(shape[i]):
            return x if _is_one(shape[j]) else maker.call(aten.index_select.default, x, j, maker.given.positions)
        if _is_one(shape[j]):
            # Tokens move to the axis j, which has size one.
            moved: fx.Node = maker.call(aten.index_select.default, x, i, maker.given.rows)
            return maker.call(aten.transpose.int, moved, i, j)  # type: ignore[no-any-return]
        return _flat(maker, x, i, j)

    return FormRecipe(needs=(Need(node, "plain"),), make=make)


def _is_one(size: int | torch.SymInt) -> bool:
    return isinstance(size, int) and size == 1


def _flat(maker: Any, x: fx.Node, i: int, j: int) -> fx.Node:
    """Turn (rows, positions) at i and j into (1, tokens)."""
    if (i, j) != (0, 1):
        x = maker.call(aten.movedim.intlist, x, [i, j], [0, 1])
    x = maker.call(aten.flatten.using_ints, x, 0, 1)
    x = maker.call(aten.index_select.default, x, 0, maker.given.tokens)
    x = maker.call(aten.unsqueeze.default, x, 0)
    found: fx.Node = x if (i, j) == (0, 1) else maker.call(aten.movedim.intlist, x, [0, 1], [i, j])
    return found


def unpacked(context: Context, node: fx.Node, dims: Dims, number: float = 0) -> FormRecipe:
    """Return the recipe of the model's own shape, with a number at padding."""
    (i,), (j,) = places(dims, context.batch), places(dims, context.seq)
    require_alone(context, node, dims, (i, j))

    def make(maker: Any, given: tuple[fx.Node, ...]) -> fx.Node:
        x = given[0]
        if i == j:
            rows = x if i == 0 else maker.call(aten.movedim.int, x, i, 0)
        else:
            rows = x if (i, j) == (0, 1) else maker.call(aten.movedim.intlist, x, [i, j], [0, 1])
            rows = maker.call(aten.squeeze.dim, rows, 0)
        if maker.given.places is not None:
            whole = maker.call(aten.index_select.default, rows, 0, maker.given.places)
            return _split(maker, whole, i, j)
        others = list(rows.meta["example_value"].shape[1:])
        is_filling = maker.call(torch.logical_not, maker.is_token())
        for axis in range(len(others)):
            is_filling = maker.call(aten.unsqueeze.default, is_filling, axis + 1)
        rows = maker.call(torch.masked_fill, rows, is_filling, number)
        padding = maker.call(aten.new_full.default, rows, [maker.whole_number(), *others], number)
        whole = maker.call(aten.index_put.default, padding, [maker.given.tokens], rows)
        return _split(maker, whole, i, j)

    return FormRecipe(needs=(Need(node, "packed"),), make=make)


def _split(maker: Any, whole: fx.Node, i: int, j: int) -> fx.Node:
    """Turn (rows · positions, ...) into rows and positions at i and j."""
    if i == j:
        return whole if i == 0 else maker.call(aten.movedim.int, whole, 0, i)
    others = list(whole.meta["example_value"].shape[1:])
    whole = maker.call(aten.view.default, whole, [maker.whole_size(0), maker.whole_size(1), *others])
    return whole if (i, j) == (0, 1) else maker.call(aten.movedim.intlist, whole, [0, 1], [i, j])
