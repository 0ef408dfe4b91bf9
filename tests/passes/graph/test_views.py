from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import event, given, settings
from torch import fx

from attn_compiler.passes.graph import axes, views
from attn_compiler.passes.graph.axes import AxisError
from tests.passes.compiling import mirror_of
from tests.passes.view_chains import Chain, chains, followed, traced

aten = torch.ops.aten


@settings(max_examples=100, deadline=None)
@given(chains())
def test_every_dimension_is_the_product_of_its_atoms_and_none_is_lost(chain: Chain) -> None:
    try:
        root_dims, dims = followed(chain.run, chain.root())
    except AxisError:
        event("an axis can't be followed")
        return
    event("followed")
    assert tuple(int(axes.dim_size(dim)) for dim in dims) == chain.run(chain.root()).shape
    kept = [a for a in axes.flat(dims) if a.size != axes.ONE and not a.broadcast]
    assert set(kept) == {a for a in axes.flat(root_dims) if a.size != axes.ONE}
    assert len(set(kept)) == len(kept)


def _last(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> fx.Node:
    return traced(function, x)[-1]


def test_an_axis_split_later_is_split_for_everyone_who_holds_it() -> None:
    root_dims, dims = followed(lambda x: x.transpose(0, 1).unflatten(0, (2, 3)), torch.zeros(4, 6))
    assert [int(a.size) for a in axes.resolve(root_dims[1])] == [2, 3]
    assert axes.resolve(root_dims[1]) == (*dims[0], *dims[1])


def test_repeat_kv_in_its_spellings_gives_the_same_axes() -> None:
    def by_expand(x: torch.Tensor) -> torch.Tensor:
        return x[:, :, None].expand(2, 3, 4, 5, 6).reshape(2, 12, 5, 6)

    def by_interleave(x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(4, dim=1)

    def by_broadcast(x: torch.Tensor) -> torch.Tensor:
        return torch.broadcast_to(x[:, :, None], (2, 3, 4, 5, 6)).reshape(2, 12, 5, 6)

    for function in (by_expand, by_interleave, by_broadcast):
        _, dims = followed(function, torch.zeros(2, 3, 5, 6))
        heads = axes.resolve(dims[1])
        assert [(int(a.size), a.broadcast) for a in heads] == [(3, False), (4, True)]


def test_tiling_repeats_in_front_of_the_axis() -> None:
    _, dims = followed(lambda x: x.repeat(1, 4, 1), torch.zeros(2, 3, 5))
    assert [(int(a.size), a.broadcast) for a in dims[1]] == [(4, True), (3, False)]


def test_reshape_across_axes_is_refused() -> None:
    with pytest.raises(AxisError, match="split at 3"):
        followed(lambda x: x.reshape(3, 2), torch.zeros(2, 3))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + 1,
        lambda x: x.flip(0),
        lambda x: x.roll(1, 0),
        lambda x: x[1:],
        lambda x: x.detach(),
        lambda x: x.to(torch.float64),
        lambda x: x.softmax(-1),
        lambda x: x.as_strided((2, 2), (1, 1)),
        lambda x: x.diagonal(),
        lambda x: x.repeat_interleave(torch.tensor([1, 2, 3, 1]), dim=0),
        lambda x: torch.dropout(x, 0.5, True),
    ],
    ids=["add", "flip", "roll", "slice", "detach", "cast", "softmax", "as_strided", "diagonal", "counts", "dropout"],
)
def test_what_changes_elements_or_stops_a_gradient_is_no_view(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    node = _last(function, torch.zeros(4, 4))
    assert not views.is_view(node)
    with pytest.raises(AxisError):
        views.forward(node, axes.fresh(axes.shape_exprs(views.value(node))))


@pytest.mark.parametrize(
    "function",
    [lambda x: x[:], lambda x: x.to(torch.float32, copy=True), lambda x: torch.dropout(x, 0.5, False)],
    ids=["whole slice", "cast to the same", "inactive dropout"],
)
def test_ops_that_change_nothing_are_views(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    node = _last(function, torch.zeros(4, 4))
    assert views.is_view(node)
    dims = axes.fresh(axes.shape_exprs(views.value(node)))
    assert views.forward(node, dims) == dims


def test_chain_goes_up_to_what_is_no_view() -> None:
    nodes = traced(lambda x: (x * 2).transpose(0, 1).contiguous(), torch.zeros(2, 3))
    chain = views.chain(nodes[-1])
    assert [n.target for n in chain] == [aten.contiguous.default, aten.transpose.int, aten.mul.Tensor]


@pytest.mark.parametrize(
    ("function", "costly"),
    [
        (lambda x: x.expand(4, 2, 3), True),
        (lambda x: x.repeat(2, 1), True),
        (lambda x: x.t().contiguous(), True),
        (lambda x: x.t().reshape(6), True),
        (lambda x: x.view(1, 2, 3), False),
        (lambda x: x.t(), False),
        (lambda x: x.unsqueeze(0), False),
    ],
)
def test_only_what_can_copy_or_repeat_is_costly(function: Callable[[torch.Tensor], torch.Tensor], costly: bool) -> None:
    assert views.is_costly(_last(function, torch.zeros(2, 3))) == costly


def test_argument_is_found_by_name_however_it_was_passed() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    by_position = graph.call_function(aten.transpose.int, (x, 0, 1))
    by_keyword = graph.call_function(aten.softmax.int, (x,), {"dim": -1})
    assert views.argument(by_position, "dim1") == 1
    assert views.argument(by_keyword, "dim") == -1
    assert views.argument(by_keyword, "dtype") is None
    assert views.argument(by_keyword, "no such name", 7) == 7


def test_asking_for_a_shape_reads_no_element() -> None:
    def function(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return mask.expand_as(x) + torch.zeros_like(x) + x

    mirror = mirror_of(function, torch.zeros(2, 3), torch.zeros(3))
    (x,) = (n for n in mirror.graph.nodes if n.op == "placeholder" and views.value(n).dim() == 2)
    reads = {user.target: views.reads_elements(user, x) for user in x.users}
    assert reads == {aten.expand_as.default: False, aten.zeros_like.default: False, aten.add.Tensor: True}


def test_a_tensor_expanded_like_itself_is_read() -> None:
    mirror = mirror_of(lambda x: x.expand_as(x), torch.zeros(2, 3))
    (node,) = (n for n in mirror.graph.nodes if n.target is aten.expand_as.default)
    assert views.reads_elements(node, views.source(node))
