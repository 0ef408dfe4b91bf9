"""How q meets keys of other ranks: in how few collectives, with which bytes; the ranks here are equal, so that one tells of all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from attn_compiler.context_parallel import collectives as torch_collectives
from attn_compiler.passes.context_parallel import exchanging
from attn_compiler.passes.context_parallel.layout import GraphLayout
from tests.lowerings.emitting import GraphEmitter

B, H, HKV, N, D, DV = 2, 4, 2, 6, 8, 4
SIZE = 2


def _gathered(x: Tensor, axis: int, size: int, balanced: bool, group: str) -> Tensor:
    return torch.cat([x] * size, axis)


def _to_heads(x: Tensor, size: int, balanced: bool, group: str) -> Tensor:
    """Rank 0's: the first heads of each rank, which are those of this one."""
    return torch.cat([x[:, : x.shape[1] // size]] * size, 2)


@pytest.fixture(autouse=True)
def _equal_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_collectives, "gathered_sequence", _gathered)
    monkeypatch.setattr(torch_collectives, "heads_for_positions", _to_heads)
    monkeypatch.setattr(torch_collectives, "rank_of", lambda group: 0)


def _met(method: Any, *operands: Tensor) -> tuple[Any, dict[str, Tensor], list[object]]:
    """What is met, the values of q, k, v and queries, and the collectives."""
    builder = GraphEmitter(fx.Graph())
    nodes = []
    for x in operands:
        node = builder.graph.placeholder("x")
        node.meta["example_value"] = x
        nodes.append(node)
    met = method(builder, GraphLayout(size=SIZE, group="g", is_balanced=False), *nodes)
    values = {name: builder.value(getattr(met, name)) for name in ("q", "k", "v", "queries")}
    collectives = [n.target for n in builder.graph.nodes if n.target in (_gathered, _to_heads)]
    return met, values, collectives


def _qkv(**dtypes: torch.dtype) -> list[Tensor]:
    shapes = {"q": (B, H, N, D), "k": (B, HKV, N, D), "v": (B, HKV, N, DV)}
    return [torch.randn(shape).to(dtypes.get(name, torch.float32)) for name, shape in shapes.items()]


def test_keys_and_values_of_one_dtype_are_gathered_at_once() -> None:
    q, k, v = _qkv()
    met, values, collectives = _met(exchanging.gather, q, k, v)
    assert len(collectives) == 1
    assert values["q"] is q
    assert torch.equal(values["k"], torch.cat([k, k], 2))
    assert torch.equal(values["v"], torch.cat([v, v], 2))
    assert torch.equal(values["queries"], torch.arange(N))
    assert met.first_head is None
    assert met.bytes == (SIZE - 1) * 4 * (k.numel() + v.numel())


def test_two_dtypes_are_gathered_apart() -> None:
    q, k, v = _qkv(v=torch.float16)
    met, values, collectives = _met(exchanging.gather, q, k, v)
    assert len(collectives) == 2
    assert torch.equal(values["v"], torch.cat([v, v], 2))
    assert met.bytes == 4 * k.numel() + 2 * v.numel()


@pytest.mark.parametrize(
    ("head_dim_v", "dtypes", "expected"),
    [(D, {}, 1), (DV, {}, 2), (D, {"k": torch.float16}, 3), (D, {"v": torch.float16}, 2)],
)
def test_neighbours_that_are_alike_are_exchanged_at_once(
    head_dim_v: int, dtypes: dict[str, torch.dtype], expected: int
) -> None:
    q, k, v = _qkv(**dtypes)
    v = torch.randn(B, HKV, N, head_dim_v).to(v.dtype)
    met, values, collectives = _met(exchanging.exchange, q, k, v)
    assert len(collectives) == expected
    for name, x in zip("qkv", (q, k, v), strict=True):
        assert torch.equal(values[name], torch.cat([x[:, : x.shape[1] // SIZE]] * SIZE, 2)), name
    assert torch.equal(values["queries"], torch.arange(SIZE * N))
    assert int(met.first_head.meta["example_value"]) == 0
    # q goes there and comes back as the output; a rank keeps its own share.
    sent = sum(x.numel() * x.element_size() for x in (q, k, v, q))
    assert met.bytes == sent // 2


def test_the_first_head_is_the_rank_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_collectives, "rank_of", lambda group: 1)
    met, _, _ = _met(exchanging.exchange, *_qkv())
    assert int(met.first_head.meta["example_value"]) == H // SIZE
