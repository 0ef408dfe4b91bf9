"""Mirrors of values, as they are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from attn_compiler.options.options import Options
from attn_compiler.passes.graph import axes, mirroring, unit
from attn_compiler.passes.graph.arrange import Recipe, ViewCall, arrange, simplified
from attn_compiler.passes.graph.axes import Atom, AxisError, Dims
from attn_compiler.passes.graph.values import EmittedValues
from attn_compiler.torch_private import tracing as torch_tracing
from tests.passes.compiling import captured
from tests.passes.view_chains import Chain, chains, followed

# Which nodes the mirror of a unit looks into.
sdpa = F.scaled_dot_product_attention
S = 4
Q = (2, 4, S, 8)


def test_what_a_bodys_mask_is_made_of_is_not_skipped_in_the_caller() -> None:
    def function(q: Tensor, mask: Tensor) -> Tensor:
        shifted = mask + 1
        beside = (q * 2 + 1).exp()
        return checkpoint(lambda q, m, x: sdpa(q, q, q, attn_mask=m) + x, q, shifted > 0, beside, use_reentrant=False)

    gm, _ = captured(function, torch.randn(Q, requires_grad=True), torch.randn(S, S))
    (body,) = unit.units(gm, Options())
    made = mirroring.trace_mirror(body.place.calls[0].unit)
    targets = [node.target for node in made.graph.nodes]
    assert torch.ops.aten.add.Tensor in targets
    assert torch.ops.aten.exp.default not in targets


def test_nothing_is_skipped_for_those_who_ask_each_op() -> None:
    gm, _ = captured(lambda q: sdpa(q, q, q) + (q * 2).exp(), torch.randn(Q))
    (found,) = unit.units(gm, Options(unpad=True))
    (plain,) = unit.units(gm, Options())
    for one, is_there in ((found, True), (plain, False)):
        made = mirroring.trace_mirror(one)
        assert (torch.ops.aten.exp.default in {node.target for node in made.graph.nodes}) == is_there


class _Chooses(torch.nn.Module):
    """Gives back what depends on a parameter, or what does not, of dtypes and shapes that a mask may have."""

    def __init__(self, of_parameter: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(S, S), requires_grad=False)
        self.register_buffer("ones", torch.ones(S, S))
        self.of_parameter = of_parameter

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = x @ (self.weight if self.of_parameter else self.ones)
        return made.argmax(-1), made > 0, made


@pytest.mark.parametrize("of_parameter", [True, False])
def test_what_depends_on_a_parameter_is_no_mask_of_another_graph(of_parameter: bool) -> None:
    """Such a graph has no attention, so nothing of it is looked into."""
    gm, _ = captured(_Chooses(of_parameter), torch.randn(S, S))
    assert len(mirroring.handed_on(gm.graph)) == (0 if of_parameter else 3)


def test_a_mask_with_the_size_of_what_depends_on_a_parameter_may_be_of_another_graph() -> None:
    weight = torch.nn.Parameter(torch.randn(S, S))

    def function(x: Tensor) -> tuple[Tensor, ...]:
        made = (x @ weight).detach()
        at = torch.arange(made.shape[0])
        return torch.ones_like(made).tril(), made.new_ones(S, S).tril() > 0, at <= at[:, None], made > 0

    gm, _ = captured(function, torch.randn(S, S))
    assert len(mirroring.handed_on(gm.graph)) == 3


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.arange(3), True),
        (torch.tensor(3), False),
        (torch.ones(4, 4, dtype=torch.bool), True),
        (torch.zeros(4, 4), True),
        (torch.zeros(4, 5), False),
        (torch.zeros(2, 1, 4, 5), True),
        (torch.zeros(2, 3, 4, 4), False),
        (torch.zeros(4, 4, requires_grad=True), False),
        ("mask", False),
    ],
    ids=str,
)
def test_what_may_be_of_a_mask(value: object, expected: bool) -> None:
    assert mirroring.may_be_of_mask(value) is expected


# What calls give on fake values.
MODE = FakeTensorMode(shape_env=ShapeEnv())


def _input(*, static: bool, grad: bool = True) -> Tensor:
    return MODE.from_tensor(torch.empty(6, 4), static_shapes=static).requires_grad_(grad)


class Runs:
    """Calls functions as a builder does, and counts what is run."""

    def __init__(self) -> None:
        self.values = EmittedValues(MODE)
        self.ran = 0

    def __call__(self, function: Callable[..., Any], *args: Any, with_grad: bool = True, **named: Any) -> Any:
        graph = fx.Graph()
        env: dict[fx.Node, Any] = {}

        def node(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            made = graph.placeholder("x")
            env[made] = x
            return made

        def run() -> Any:
            self.ran += 1
            with torch_tracing.running_in(MODE), torch.set_grad_enabled(with_grad):
                return function(*args, **named)

        call = graph.call_function(function, tuple(map(node, args)), named)
        return self.values.value_of(call, env, run, with_grad=with_grad)


def _told(value: Any) -> list[str]:
    leaves = pytree.tree_leaves(value)
    return [str((x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, x.requires_grad)) for x in leaves]


CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "a new tensor": (torch.mul, (2,)),
    "a view": (torch.transpose, (0, 1)),
    "several": (torch.split, (2, 1)),
    "another dtype": (torch.ops.aten._to_copy.default, ()),
    "whole numbers": (torch.argmax, ()),
}


@pytest.mark.parametrize("static", [True, False], ids=["known", "symbolic"])
@pytest.mark.parametrize("name", CALLS)
def test_alike_calls_are_run_once_and_give_the_same(name: str, static: bool) -> None:
    function, more = CALLS[name]
    x, runs = _input(static=static), Runs()
    first, second = (runs(function, x, *more) for _ in range(2))
    assert runs.ran == 1
    assert _told(second) == _told(first) == _told(Runs()(function, x, *more))


def test_symbolic_calls_are_run_once() -> None:
    x, runs = _input(static=False), Runs()
    first, second = runs(torch.mul, x, 2), runs(torch.mul, x, 2)
    assert runs.ran == 1
    assert _told(first) == _told(second)
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata
    assert runs(torch.transpose, second, 0, 1).untyped_storage()._cdata == second.untyped_storage()._cdata


def test_what_differs_is_run() -> None:
    runs = Runs()
    x = _input(static=True)
    runs(torch.mul, x, 2)
    runs(torch.mul, x, 2.0)
    runs(torch.mul, x, 2, with_grad=False)
    runs(torch.mul, _input(static=True, grad=False), 2)
    runs(torch.mul, x.detach().t(), 2)
    assert runs.ran == 5


def test_a_view_is_in_the_memory_of_what_it_is_given() -> None:
    runs = Runs()
    for x in (_input(static=True), _input(static=True)):
        view = runs(torch.transpose, x, 0, 1)
        assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
    assert runs.ran == 1


def test_what_writes_and_what_gives_its_input_is_run_each_time() -> None:
    runs = Runs()
    x = _input(static=True, grad=False)
    for _ in range(2):
        assert runs(torch.Tensor.add_, x, 1) is x
        assert runs(torch.ops.aten.add_.Tensor, x, 1) is x
        assert runs(torch.Tensor.contiguous, x) is x
    assert runs.ran == 6


@pytest.mark.parametrize("static", [True, False], ids=["known", "symbolic"])
def test_values_without_a_graph_are_made_once(static: bool) -> None:
    values, x = EmittedValues(MODE), _input(static=static)
    others = (_input(static=static), torch.transpose(x, 0, 1).contiguous())
    ran = 0

    def made(*given: Any) -> Any:
        def run() -> Any:
            nonlocal ran
            ran += 1
            with torch_tracing.running_in(MODE), torch.no_grad():
                return torch.broadcast_tensors(*given)[0].clone()

        return values.of_values(torch.broadcast_tensors, given, {}, run)

    first, second = made(x), made(others[0])
    assert ran == 1
    assert _told(first) == _told(second)
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata
    # A tensor that is given twice is told from two, and other strides from these.
    made(x, x), made(x, others[0]), made(others[1])
    assert ran == 4


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
