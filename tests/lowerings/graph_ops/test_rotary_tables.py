from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from attn_compiler.lowerings.graph_ops import rotary_tables

B, H, S, D = 2, 4, 16, 8


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary_tables, "_WORTH_IT", B * H * S * D * 2)


def made(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is torch.ops.attn_compiler.table.default]


def kept(function: Callable[..., Any], *given: Tensor) -> tuple[fx.GraphModule, list[fx.Node]]:
    gm = make_fx(function)(*given)
    rotary_tables.keep_tables(gm.graph)
    gm.recompile()
    return gm, made(gm.graph)


def rotary(q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = ((getattr(angles, name)() * 2.0).to(torch.bfloat16) for name in ("cos", "sin"))
    q, k = (x * cos[:, None] + x.flip(-1) * sin[:, None] for x in (q, k))
    return q, k


def _read_twice(q: Tensor, k: Tensor, cos: Tensor, shown: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
    return q * cos[:, None], k * cos[:, None], shown(cos)


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    q, k = (torch.randn(B, H, S, D).bfloat16() for _ in range(2))
    return q, k, torch.randn(1, D, S).transpose(1, 2)


def test_tables_of_rotary_embeddings_are_made_once_as_they_are_read() -> None:
    given = tensors()
    gm, found = kept(rotary, *given)
    assert [node.meta["val"].dtype for node in found] == [torch.bfloat16] * 2
    assert [node.meta["val"].is_contiguous() for node in found] == [True, True]
    assert all(torch.equal(mine, own) for mine, own in zip(gm(*given), rotary(*given), strict=True))


@pytest.mark.parametrize(
    "function",
    [
        lambda q, k, x: q * x.cos(),
        lambda q, k, x: (x.cos() + 1, x.cos() * x),
        lambda q, k, x: (q * x.exp(), k * x.exp()),
        lambda q, k, x: _read_twice(q, k, x.cos(), lambda c: c),
        lambda q, k, x: _read_twice(q, k, x.cos(), lambda c: c[:, None, :5].squeeze(1)),
        lambda q, k, x: _read_twice(q, k, x.cos(), lambda c: torch.as_strided(c, (S * D,), (1,), 0) + 1),
        lambda q, k, x: [(c := x[0].cos()) @ torch.randn(D, 100), c @ torch.randn(D, 200)],
    ],
    ids=[
        "one reader",
        "readers of its own size",
        "another function",
        "it is an output",
        "a view of it is an output",
        "its strides are known to a reader",
        "products",
    ],
)
def test_others_are_left_to_inductor(function: Callable[..., Any]) -> None:
    assert kept(function, *tensors())[1] == []


def test_few_elements_are_left_to_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of decoding waits for launches."""
    monkeypatch.setattr(rotary_tables, "_WORTH_IT", B * H * S * D * 2 + 1)
    assert kept(rotary, *tensors())[1] == []


def test_compiled_by_the_backend_they_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """In training, and the backward reads the same ones."""
    seen: list[fx.Graph] = []
    own = rotary_tables.keep_tables

    def noted(graph: fx.Graph) -> None:
        own(graph)
        seen.append(graph)

    monkeypatch.setattr(rotary_tables, "keep_tables", noted)
    given = tensors()
    leaves = [x.requires_grad_() for x in given[:2]]
    with torch._inductor.config.patch(force_disable_caches=True):  # type: ignore[attr-defined]
        found = torch.compile(rotary, backend="attn_compiler", dynamic=False)(*leaves, given[2])
    (graph,) = seen
    assert len(made(graph)) == 2
    upstream = [torch.randn_like(x) for x in found]
    mine = torch.autograd.grad(found, leaves, upstream)
    right = torch.autograd.grad(rotary(*leaves, given[2]), leaves, upstream)
    for a, b in zip(mine, right, strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)
