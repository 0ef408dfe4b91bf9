"""Which vmap an axis belongs to: levels are used again, regions are not."""

from __future__ import annotations

from collections.abc import Callable

import torch

from attn_compiler.passes.graph import mutation
from attn_compiler.passes.graph.vmap_axes import VmapAxis
from tests.passes.compiling import mirror_of

Tensor = torch.Tensor
X = torch.arange(12).view(3, 4)


def _axes(function: Callable[[Tensor], Tensor], x: Tensor = X) -> list[VmapAxis]:
    return list(mirror_of(function, x).vmap_axes.values())


def test_a_level_used_again_is_another_region() -> None:
    axes = _axes(lambda x: torch.vmap(lambda a: a + 1)(x) + torch.vmap(lambda a: a * 2)(x))
    assert [(axis.region, axis.added) for axis in axes] == [(1, True), (1, False), (2, True), (2, False)]
    assert all(axis.is_plain for axis in axes)


def test_regions_inside_of_each_other() -> None:
    axes = _axes(lambda x: torch.vmap(torch.vmap(lambda a: a + 1, out_dims=0), in_dims=1, out_dims=1)(x))
    assert [(axis.region, axis.added, axis.dim) for axis in axes] == [
        (1, True, 1),
        (2, True, 0),
        (2, False, 0),
        (1, False, 1),
    ]


def test_random_numbers_make_a_region_closed() -> None:
    axes = _axes(lambda x: torch.vmap(lambda a: a + torch.rand(4), randomness="different")(x))
    assert axes
    assert not any(axis.is_plain for axis in axes)


def test_a_gradient_closes_what_is_around_it_and_inside_of_it() -> None:
    def outside(x: Tensor) -> Tensor:
        return torch.vmap(torch.func.grad(lambda a: (a * a).sum()))(x)

    def inside(x: Tensor) -> Tensor:
        return torch.func.grad(lambda y: torch.vmap(lambda a: a * a)(y).sum())(x)

    for function in (outside, inside):
        axes = _axes(function, X.float())
        assert axes
        assert not any(axis.is_plain for axis in axes)


def test_a_map_that_computes_nothing_gives_back_the_memory_that_it_was_given() -> None:
    def function(x: Tensor) -> Tensor:
        rows = x + 1
        turned = torch.vmap(lambda row: row, in_dims=1, out_dims=0)(rows)
        return turned + torch.vmap(lambda row: row * 2, in_dims=1)(rows)

    mirror = mirror_of(function, X)
    rows = next(n for n in mirror.graph.nodes if n.target is torch.ops.aten.add.Tensor)
    turned, doubled = (n for n, axis in mirror.vmap_axes.items() if not axis.added)
    assert mutation.storages(turned) == mutation.storages(rows)
    assert mutation.storages(doubled) != mutation.storages(rows)
    assert turned.meta["val"].shape == (4, 3)


def test_an_element_index_inside_of_a_map_is_a_gather() -> None:
    def function(x: Tensor) -> Tensor:
        rows, columns = torch.arange(3), torch.arange(4)
        both = torch.vmap(torch.vmap(lambda i, j: x[i, j] + x[0, j] + x[i][j], in_dims=(None, 0)), in_dims=(0, None))
        return both(rows, columns)

    targets = [node.target for node in mirror_of(function, X).graph.nodes]
    assert targets.count(torch.ops.aten.index.Tensor) == 4
