"""The name of what a node calls and the arguments that it is given, however that is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from attn_compiler.passes.graph.calls import argument, target_name, with_arguments
from tests.passes.compiling import compiled

Tensor = torch.Tensor


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (torch.ops.aten.linear.default, "linear"),
        (F.linear, "linear"),
        ("softmax", "softmax"),
        (torch.ops.aten.add_.Tensor, "add_"),
    ],
)
def test_target_name(target: object, name: str) -> None:
    graph = fx.Graph()
    node = graph.call_method(target) if isinstance(target, str) else graph.call_function(target)
    assert target_name(node) == name


def _node(call: Callable[[fx.Graph, fx.Node], fx.Node]) -> fx.Node:
    graph = fx.Graph()
    return call(graph, graph.placeholder("x"))


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((-2,), {}), ((), {"dim": -2}), ((), {"axis": -2})],
    ids=["position", "name", "NumPy's name"],
)
def test_arguments_are_found_and_replaced_as_they_are_given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    node = _node(lambda graph, x: graph.call_method("softmax", (x, *args), {**kwargs, "dtype": torch.float32}))
    assert argument(node, 1, "dim") == -2
    assert argument(node, 2, "dtype") is torch.float32
    assert argument(node, 3, "out") is None
    changed = with_arguments(node, dim=(1, -1))
    assert changed == ((node.args[0], *[-1 for _ in args]), {**dict.fromkeys(kwargs, -1), "dtype": torch.float32})


ALLOWED = torch.ones(6, 6, dtype=torch.bool).tril()

sdpa = F.scaled_dot_product_attention

#: name -> an attention whose calls are given their arguments by name, in any order
BY_NAME: dict[str, Callable[..., Tensor]] = {
    "softmax": lambda q, k, v: F.softmax(input=q @ k.mT, dim=-1) @ v,
    "softmax of NumPy": lambda q, k, v: torch.softmax(axis=-1, x=q @ k.mT) @ v,
    "a method's axis": lambda q, k, v: (q @ k.mT).softmax(axis=-1) @ v,
    "matmul": lambda q, k, v: torch.matmul(other=v, input=torch.matmul(other=k.mT, input=q).softmax(-1)),
    "bmm": lambda q, k, v: torch.bmm(input=torch.bmm(mat2=k[0].mT, input=q[0]).softmax(-1), mat2=v[0]),
    "baddbmm": lambda q, k, v: (
        torch.baddbmm(batch1=q[0], batch2=k[0].mT, input=v[0, :, :, :6].detach(), beta=0).softmax(-1) @ v[0]
    ),
    "sdpa": lambda q, k, v: sdpa(value=v, key=k, query=q, attn_mask=ALLOWED, scale=0.3),
    "sdpa, some": lambda q, k, v: sdpa(q, value=v, key=k, is_causal=True),
    "where": lambda q, k, v: (
        torch.where(other=torch.tensor(float("-inf")), input=q @ k.mT, condition=ALLOWED).softmax(-1) @ v
    ),
    "where as a mask": lambda q, k, v: sdpa(
        q, k, v, attn_mask=torch.where(condition=ALLOWED, input=torch.zeros(()), other=torch.tensor(float("-inf")))
    ),
    "masked_fill": lambda q, k, v: (
        torch.masked_fill(value=torch.tensor(float("-inf")), input=q @ k.mT, mask=~ALLOWED).softmax(-1) @ v
    ),
    "masked_fill, method": lambda q, k, v: (q @ k.mT).masked_fill(value=float("-inf"), mask=~ALLOWED).softmax(-1) @ v,
    "masked_fill_": lambda q, k, v: (q @ k.mT).masked_fill_(mask=~ALLOWED, value=float("-inf")).softmax(-1) @ v,
    "mul and add": lambda q, k, v: (
        torch.mul(other=0.5, input=torch.add(other=q @ k.mT, input=q @ k.mT)).softmax(-1) @ v
    ),
    "sub": lambda q, k, v: torch.sub(other=(~ALLOWED).float() * 1e9, input=q @ k.mT).softmax(-1) @ v,
    "transpose": lambda q, k, v: (q @ torch.transpose(dim1=-1, dim0=-2, input=k)).softmax(-1) @ v,
    "permute": lambda q, k, v: (q @ k.permute(dims=(0, 1, 3, 2))).softmax(-1) @ v,
    "repeats": lambda q, k, v: sdpa(
        q, torch.repeat_interleave(dim=1, repeats=2, input=k[:, :2]), v[:, :2].repeat_interleave(dim=1, repeats=2)
    ),
    "triu": lambda q, k, v: (
        (q @ k.mT)
        .masked_fill(mask=torch.triu(diagonal=1, input=torch.ones(size=(6, 6), dtype=torch.bool)), value=float("-inf"))
        .softmax(-1)
        @ v
    ),
    "arange": lambda q, k, v: sdpa(
        q, k, v, attn_mask=torch.arange(end=6)[None] <= torch.arange(start=0, end=6, step=1)[:, None]
    ),
    "dropout": lambda q, k, v: F.dropout(training=False, p=0.1, input=(q @ k.mT).softmax(-1)) @ v,
    "chunk": lambda q, k, v: sdpa(*torch.chunk(dim=-1, chunks=3, input=torch.cat(dim=-1, tensors=[q, k, v]))),
}


@pytest.mark.parametrize("name", BY_NAME)
def test_attention_is_found_however_its_arguments_are_given(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 4, 6, 8, generator=generator, requires_grad=True) for _ in range(3)]
    function = BY_NAME[name]
    run = compiled(function, inner="eager", lowerings=["sdpa_cpu_flash", "reference"])
    got, wanted = run(*inputs), function(*inputs)
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)
    grads = [torch.autograd.grad(out.sin().sum(), inputs) for out in (got, wanted)]
    torch.testing.assert_close(*grads, atol=2e-5, rtol=2e-5)
    assert run.report.num_sites == 1
    assert run.report.num_misses == 0
    assert run.site.decision.lowering != "untouched"
