from __future__ import annotations

from collections.abc import Callable

import torch

from attn_compiler.passes.recovering.reading import per_example
from tests.passes.compiling import mirror_of

Tensor = torch.Tensor


def _names(function: Callable[..., Tensor], *inputs: Tensor) -> dict[str, int]:
    """Op -> how many vmaps its result is one example of, for ops whose result is."""
    found = per_example.regions_of(mirror_of(function, *inputs))
    return {
        node.target.overloadpacket.__name__: len(regions)
        for node, regions in found.items()
        if hasattr(node.target, "overloadpacket")
    }


def test_without_a_vmap_nothing_is_one_examples() -> None:
    assert _names(lambda x: x.sin() + 1, torch.randn(3)) == {}


def test_what_is_computed_inside_is_one_examples_and_what_comes_out_is_not() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.vmap(lambda row: row.sin())(x.exp()).cos()

    assert _names(function, torch.randn(3, 4)) == {"sin": 1}


def test_what_the_examples_share_is_one_examples_once_it_meets_one() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.vmap(lambda row: row * y.sin())(x)

    assert _names(function, torch.randn(3, 4), torch.randn(4)) == {"mul": 1}


def test_vmaps_in_each_other() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.vmap(torch.vmap(lambda element: element.sin()))(x)

    assert _names(function, torch.randn(3, 4)) == {"sin": 2}
