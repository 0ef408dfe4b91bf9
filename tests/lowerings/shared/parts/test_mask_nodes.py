from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import DimDynamic

from attn_compiler.lowerings.shared.parts import mask_nodes
from tests.lowerings import bench
from tests.lowerings.emitting import calls

aten = torch.ops.aten


class Bench(bench.Bench):
    """A graph with a bias, q and k of which some axes are symbolic, each a symbol of its own."""

    SYMBOLS = DimDynamic.DYNAMIC

    def module(self, out: fx.Node) -> fx.GraphModule:
        self.graph.output(out)
        return fx.GraphModule(torch.nn.Module(), self.graph)

    def value(self, node: fx.Node) -> torch.Tensor:
        return node.meta["example_value"]


def tensors(seqlen_q: int, seqlen_kv: int, batch: int = 2) -> dict[str, torch.Tensor]:
    return {
        "q": torch.randn(batch, 4, seqlen_q, 8),
        "k": torch.randn(batch, 2, seqlen_kv, 8),
        "bias": torch.randn(batch, 1, 1, seqlen_kv),
    }


def test_a_symbolic_bias_is_aligned_for_every_size() -> None:
    case = Bench({"q": (2,), "k": (2,), "bias": (3,)}, **tensors(9, 13))
    module = case.module(case.call(mask_nodes.for_efficient, case.nodes["bias"], case.nodes["q"], case.nodes["k"]))
    # What was asked of the sizes on the way holds for each of them: no size is tied down.
    for guard in case.env.guards:
        for size in range(2, 40):
            assert guard.expr.subs({symbol: size + shift for shift, symbol in enumerate(guard.expr.free_symbols)}), (
                guard
            )
    for lengths in ((9, 13), (5, 16), (7, 23)):
        given = tensors(*lengths)
        got = module(*(given[name] for name in case.nodes))
        assert torch.equal(got, given["bias"].expand(2, 4, *lengths))
        assert all(stride % 8 == 0 for stride in got.stride()[:3])
        assert got.stride(3) == 1


def test_sites_share_one_aligned_bias() -> None:
    case = Bench(**tensors(9, 13))
    for _ in range(2):
        out = case.call(mask_nodes.for_efficient, case.nodes["bias"], case.nodes["q"], case.nodes["k"])
    assert calls(case.module(out)).count(aten.slice_scatter.default) == 1


def test_an_aligned_static_bias_is_only_expanded() -> None:
    case = Bench(**tensors(9, 16))
    out = case.call(mask_nodes.for_efficient, case.nodes["bias"], case.nodes["q"], case.nodes["k"])
    assert calls(case.module(out)) == [aten.expand.default]
    assert case.value(out).shape == (2, 4, 9, 16)


def test_triton_is_given_rows_that_vectors_are_loaded_from() -> None:
    """Once for all sites, also of a bias that was expanded over the batch."""
    bias = torch.randn(1, 4, 9, 133).expand(2, -1, -1, -1)
    case = Bench(**tensors(9, 133) | {"bias": bias})
    for _ in range(2):
        out = case.call(mask_nodes.in_vectors, case.nodes["bias"], case.nodes["q"])
    module = case.module(out)
    assert calls(module).count(aten.slice_scatter.default) == 1
    got = module(*(({**tensors(9, 133), "bias": bias})[name] for name in case.nodes))
    assert torch.equal(got, bias[:1])
    assert got.stride() == (4 * 9 * 144, 9 * 144, 144, 1)


@pytest.mark.parametrize(
    "bias",
    [
        torch.randn(2, 4, 9, 133),
        torch.randn(1, 4, 9, 144),
        torch.randn(1, 4, 1, 133),
        torch.randn(1, 4, 9, 1),
        torch.randn(1, 4, 9, 49),
    ],
    ids=["read once", "aligned", "one row", "one key", "few keys"],
)
def test_other_biases_are_not_copied_for_triton(bias: torch.Tensor) -> None:
    case = Bench(**tensors(9, bias.shape[3]) | {"bias": bias})
    assert case.call(mask_nodes.in_vectors, case.nodes["bias"], case.nodes["q"]) is case.nodes["bias"]


@pytest.mark.parametrize(
    ("mask", "targets"),
    [
        (torch.ones(2, 1, 9, 13), []),
        (torch.ones(2, 1, 9, 1), [aten.expand.default, aten.clone.default]),
        (torch.ones(2, 1, 13, 9).transpose(2, 3), [aten.clone.default]),
        (torch.ones(1).expand(2, 1, 9, 13), [aten.clone.default]),
    ],
)
def test_adjacent_keys(mask: torch.Tensor, targets: list[Any]) -> None:
    case = Bench(**{**tensors(9, 13), "bias": mask})
    out = case.call(mask_nodes.with_adjacent_keys, case.nodes["bias"], case.nodes["k"])
    assert calls(case.module(out)) == targets
    assert case.value(out).shape == (2, 1, 9, 13)
    assert case.value(out).stride(3) == 1


@pytest.mark.parametrize(
    ("mask", "keep", "dtype"),
    [
        (torch.ones(9, 13, dtype=torch.bool), (), torch.bfloat16),
        (torch.ones(9, 13, dtype=torch.float32), (), torch.bfloat16),
        (torch.ones(9, 13, dtype=torch.float32), (torch.float32,), torch.float32),
        (torch.ones(9, 13, dtype=torch.bfloat16), (), torch.bfloat16),
    ],
)
def test_additive_is_four_dimensional_and_of_the_dtype(
    mask: torch.Tensor, keep: tuple[torch.dtype, ...], dtype: torch.dtype
) -> None:
    case = Bench(bias=mask)
    out = case.call(mask_nodes.additive, case.nodes["bias"], torch.bfloat16, keep=keep)
    assert (case.value(out).shape, case.value(out).dtype) == ((1, 1, 9, 13), dtype)


def test_sites_share_one_converted_mask() -> None:
    case = Bench(bias=torch.ones(2, 1, 9, 13, dtype=torch.bool))
    first, second = (case.call(mask_nodes.additive, case.nodes["bias"], torch.bfloat16) for _ in range(2))
    assert first is second
