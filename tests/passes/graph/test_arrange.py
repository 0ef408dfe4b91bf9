from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from hypothesis import assume, given, settings

from attn_compiler.passes.graph import axes
from attn_compiler.passes.graph.arrange import Recipe, ViewCall, arrange, simplified
from attn_compiler.passes.graph.axes import Atom, AxisError, Dims
from tests.passes.view_chains import Chain, chains, followed


def _run(recipe: Recipe, x: torch.Tensor, sizes: dict[sympy.Symbol, int] | None = None) -> torch.Tensor:
    def call(function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    result: torch.Tensor = recipe.run(x, call, lambda size: int(size.subs(sizes or {})))
    return result


def _atoms(dims: Dims) -> dict[Atom, Atom]:
    return {atom: atom for atom in axes.flat(dims)}


def _dims_or_skip(chain: Chain) -> tuple[Dims, Dims]:
    """Chains that re-group elements across axes, (2, 3) -> (3, 2), have no axes to follow."""
    try:
        return followed(chain.run, chain.root())
    except AxisError:
        assume(False)
        raise


@settings(max_examples=150, deadline=None)
@given(chains())
def test_the_root_becomes_the_result_and_the_result_the_root(chain: Chain) -> None:
    """On the way back repeated axes are kept in front; any index into them then gives the root."""
    root_dims, dims = _dims_or_skip(chain)
    root = chain.root()
    there = simplified(arrange(root_dims, _atoms(root_dims), dims, broadcast=False))
    assert torch.equal(_run(there, root), chain.run(root))
    repeated = tuple((a,) for a in axes.flat(dims) if a.broadcast and a.size != axes.ONE)
    back = simplified(arrange(dims, _atoms(dims), (*repeated, *root_dims), broadcast=False))
    returned = _run(back, chain.run(root))
    assert torch.equal(returned, root.expand(returned.shape))
    permutes = [view for view in there.views if view.function in (torch.permute, torch.transpose)]
    assert len(permutes) <= 1


def test_nothing_to_do_is_an_empty_recipe() -> None:
    dims = axes.fresh([sympy.Integer(2), sympy.Integer(3)])
    assert arrange(dims, _atoms(dims), dims, broadcast=False).views == []


def test_heads_out_of_a_projection_are_one_unflatten_and_one_transpose() -> None:
    batch, length, width = axes.fresh([sympy.Integer(n) for n in (2, 5, 12)])
    width[0].split(sympy.Integer(3))
    heads, head_dim = axes.resolve(width)
    root = (batch, length, width)
    recipe = arrange(root, _atoms(root), (batch, (heads,), length, (head_dim,)), broadcast=False)
    assert [view.function for view in recipe.views] == [torch.unflatten, torch.transpose]
    x = torch.arange(120).view(2, 5, 12)
    assert torch.equal(_run(recipe, x), x.view(2, 5, 3, 4).transpose(1, 2))


def test_axis_that_does_not_vary_is_repeated_without_a_copy() -> None:
    batch, keys, group = (Atom(sympy.Integer(n)) for n in (2, 3, 4))
    root = ((batch,), (keys,))
    x = torch.arange(6).view(2, 3)
    recipe = arrange(root, {batch: batch, keys: keys}, ((batch,), (group,), (keys,)), broadcast=False)
    out = _run(recipe, x)
    assert out.shape == (2, 4, 3)
    assert out.stride() == (3, 0, 1)


def test_with_broadcast_a_dimension_that_does_not_vary_has_size_one() -> None:
    batch, keys, group = (Atom(sympy.Integer(n)) for n in (2, 3, 4))
    recipe = arrange(((batch,), (keys,)), {batch: batch, keys: keys}, ((batch,), (group,), (keys,)), broadcast=True)
    assert _run(recipe, torch.zeros(2, 3)).shape == (2, 1, 3)


def test_part_of_a_dimension_that_varies_is_repeated_in_full() -> None:
    """A mask that varies along the batch but not along the groups merged with it."""
    batch, group, keys = (Atom(sympy.Integer(n)) for n in (2, 4, 3))
    x = torch.arange(6).view(2, 3)
    recipe = arrange(((batch,), (keys,)), {batch: batch, keys: keys}, ((batch, group), (keys,)), broadcast=True)
    assert torch.equal(_run(recipe, x), x.repeat_interleave(4, 0))


def test_axis_without_a_place_is_refused() -> None:
    batch, keys = (Atom(sympy.Integer(n)) for n in (2, 3))
    with pytest.raises(AxisError, match="no place"):
        arrange(((batch,), (keys,)), {batch: batch, keys: keys}, ((batch,),), broadcast=False)


def test_unit_axes_are_dropped_and_come_back() -> None:
    a, b, c = (Atom(sympy.Integer(n)) for n in (1, 3, 1))
    recipe = arrange(((a,), (b,), (c,)), {b: b}, ((), (b,)), broadcast=False)
    assert _run(recipe, torch.zeros(1, 3, 1)).shape == (1, 3)


def test_symbolic_sizes_are_resolved_when_the_recipe_runs() -> None:
    s, heads = sympy.Symbol("s0", positive=True, integer=True), sympy.Integer(2)
    width = Atom(heads * s)
    width.split(heads)
    first, second = axes.resolve((width,))
    group = Atom(s)
    recipe = arrange(((width,),), _atoms(((width,),)), ((second,), (group,), (first,)), broadcast=False)
    for size in (3, 5):
        x = torch.arange(2 * size)
        wanted = x.view(2, size).t()[:, None, :].expand(size, size, 2)
        assert torch.equal(_run(recipe, x, {s: size}), wanted)


def _view(function: Callable[..., Any], *args: Any) -> ViewCall:
    return ViewCall(function=function, args=args)


SQUEEZE, UNSQUEEZE = _view(torch.squeeze, 1), _view(torch.unsqueeze, 1)
UNFLATTEN, FLATTEN = _view(torch.unflatten, 1, (2, 3)), _view(torch.flatten, 1, 2)


@pytest.mark.parametrize(
    ("views", "kept"),
    [
        ([SQUEEZE, UNSQUEEZE], []),
        ([UNFLATTEN, FLATTEN], []),
        ([UNFLATTEN, SQUEEZE, UNSQUEEZE, FLATTEN], []),
        ([UNSQUEEZE, SQUEEZE], [UNSQUEEZE, SQUEEZE]),
        ([FLATTEN, UNFLATTEN], [FLATTEN, UNFLATTEN]),
        ([SQUEEZE, _view(torch.unsqueeze, 2)], [SQUEEZE, _view(torch.unsqueeze, 2)]),
        ([UNFLATTEN, _view(torch.flatten, 0, 1)], [UNFLATTEN, _view(torch.flatten, 0, 1)]),
        ([UNFLATTEN, _view(torch.flatten, 1, 3)], [UNFLATTEN, _view(torch.flatten, 1, 3)]),
        ([_view(torch.transpose, 0, 1), SQUEEZE, UNSQUEEZE], [_view(torch.transpose, 0, 1)]),
    ],
)
def test_simplified_takes_out_what_undoes_itself_and_nothing_else(views: list[ViewCall], kept: list[ViewCall]) -> None:
    assert simplified(Recipe(views=views)).views == kept


def test_text_tells_recipes_apart() -> None:
    views = [ViewCall(function=torch.squeeze, args=(1,)), ViewCall(function=torch.unsqueeze, args=(1,))]
    texts = {Recipe(views=v).text for v in ([], views[:1], views[1:], views)}
    assert len(texts) == 4
