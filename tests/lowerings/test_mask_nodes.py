from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from attn_compiler.lowerings import mask_nodes
from tests.lowerings.emitting import GraphEmitter, calls

aten = torch.ops.aten


class Bench:
    """A graph with a bias, q and k of which some axes are symbolic."""

    def __init__(self, dynamic: dict[str, tuple[int, ...]] | None = None, **tensors: torch.Tensor) -> None:
        self.env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.env)
        self.graph = fx.Graph()
        self.emitter = GraphEmitter(self.graph)
        self.tensors = tensors
        self.nodes = {name: self._placeholder(name, t, (dynamic or {}).get(name, ())) for name, t in tensors.items()}

    def _placeholder(self, name: str, tensor: torch.Tensor, dynamic: tuple[int, ...]) -> fx.Node:
        sizes = [DimDynamic.DYNAMIC if axis in dynamic else DimDynamic.STATIC for axis in range(tensor.dim())]
        context = StatelessSymbolicContext(dynamic_sizes=sizes)
        node = self.graph.placeholder(name)
        source = torch._dynamo.source.ConstantSource(name)
        node.meta["example_value"] = self.mode.from_tensor(tensor, source=source, symbolic_context=context)
        return node

    def call(self, function: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self.mode:
            return function(self.emitter, *args, **kwargs)

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
    bench = Bench({"q": (2,), "k": (2,), "bias": (3,)}, **tensors(9, 13))
    module = bench.module(bench.call(mask_nodes.for_efficient, bench.nodes["bias"], bench.nodes["q"], bench.nodes["k"]))
    # What was asked of the sizes on the way holds for each of them: no size is tied down.
    for guard in bench.env.guards:
        for size in range(2, 40):
            assert guard.expr.subs({symbol: size + shift for shift, symbol in enumerate(guard.expr.free_symbols)}), (
                guard
            )
    for lengths in ((9, 13), (5, 16), (7, 23)):
        given = tensors(*lengths)
        got = module(*(given[name] for name in bench.nodes))
        assert torch.equal(got, given["bias"].expand(2, 4, *lengths))
        assert all(stride % 8 == 0 for stride in got.stride()[:3])
        assert got.stride(3) == 1


def test_sites_share_one_aligned_bias() -> None:
    bench = Bench(**tensors(9, 13))
    for _ in range(2):
        out = bench.call(mask_nodes.for_efficient, bench.nodes["bias"], bench.nodes["q"], bench.nodes["k"])
    assert calls(bench.module(out)).count(aten.slice_scatter.default) == 1


def test_an_aligned_static_bias_is_only_expanded() -> None:
    bench = Bench(**tensors(9, 16))
    out = bench.call(mask_nodes.for_efficient, bench.nodes["bias"], bench.nodes["q"], bench.nodes["k"])
    assert calls(bench.module(out)) == [aten.expand.default]
    assert bench.value(out).shape == (2, 4, 9, 16)


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
    bench = Bench(**{**tensors(9, 13), "bias": mask})
    out = bench.call(mask_nodes.with_adjacent_keys, bench.nodes["bias"], bench.nodes["k"])
    assert calls(bench.module(out)) == targets
    assert bench.value(out).shape == (2, 1, 9, 13)
    assert bench.value(out).stride(3) == 1


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
    bench = Bench(bias=mask)
    out = bench.call(mask_nodes.additive, bench.nodes["bias"], torch.bfloat16, keep=keep)
    assert (bench.value(out).shape, bench.value(out).dtype) == ((1, 1, 9, 13), dtype)


def test_sites_share_one_converted_mask() -> None:
    bench = Bench(bias=torch.ones(2, 1, 9, 13, dtype=torch.bool))
    first, second = (bench.call(mask_nodes.additive, bench.nodes["bias"], torch.bfloat16) for _ in range(2))
    assert first is second
