from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from attn_compiler.lowerings.cudnn import ops
from attn_compiler.lowerings.cudnn.plan import CudnnCall
from tests.lowerings import call_math

TEXT = CudnnCall(scale=0.125, right=0, needs_grad=True).to_text()


def bshd(*shape: int) -> torch.Tensor:
    batch, heads, seqlen, head_dim = shape
    return torch.empty(batch, seqlen, heads, head_dim, dtype=torch.bfloat16).transpose(1, 2)


def test_the_op_can_be_traced_where_there_is_neither_gpu_nor_frontend() -> None:
    with FakeTensorMode():
        q, k, v = bshd(2, 4, 16, 32), bshd(2, 2, 24, 32), bshd(2, 2, 24, 8).contiguous()
        out, lse = torch.ops.attn_compiler.cudnn.default(q, k, v, [], TEXT)
        assert (tuple(out.shape), out.transpose(1, 2).is_contiguous(), out.dtype) == (
            (2, 4, 16, 8),
            True,
            torch.bfloat16,
        )
        assert (tuple(lse.shape), lse.dtype) == ((2, 4, 16), torch.float32)
        leaf = torch.ops.attn_compiler.cudnn_backward.default
        *grads, further = leaf(out, lse, q, k, v, [], out, lse, TEXT)
        assert [grad.stride() for grad in grads] == [t.stride() for t in (q, k, v)]
        assert further == []


def test_gradients_of_operands_follow_the_call() -> None:
    call = CudnnCall(scale=1.0, needs_grad=True, bias=True, sinks=True, sinks_grad=True, lengths=True)
    operands = [torch.empty(1)] * 4
    assert ops.differentiable(operands, call.to_text()) == [False, False, False, False]
    learned = dataclasses.replace(call, bias_grad=True)
    assert ops.differentiable(operands, learned.to_text()) == [True, False, False, False]
    with pytest.raises(ValueError, match="the call has the operands bias, sinks, lengths_q, lengths; got 1"):
        ops.differentiable(operands[:1], call.to_text())


def test_the_gradient_of_sinks_is_what_autograd_gives() -> None:
    batch, heads, seqlen, head_dim = 2, 3, 5, 8
    q, k, v = (torch.randn(batch, heads, seqlen, head_dim, dtype=torch.float64) for _ in range(3))
    sinks = torch.randn(heads, dtype=torch.float64, requires_grad=True)
    call = CudnnCall(scale=0.3, right=0, sinks=True, sinks_grad=True, needs_grad=True)
    out = call_math.attention(q, k, v, {"sinks": sinks}, call)
    grad_out = torch.randn_like(out)
    (expected,) = torch.autograd.grad(out, sinks, grad_out)
    scores = (q @ k.transpose(-1, -2) * 0.3).masked_fill(torch.ones(seqlen, seqlen).triu(1).bool(), -torch.inf)
    joined = torch.cat([scores, sinks[None, :, None, None].expand(batch, -1, seqlen, 1)], -1)
    lse = torch.logsumexp(joined, -1)
    (found,) = ops.in_graph(grad_out, out, lse, [sinks], call.to_text())
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    frozen = CudnnCall(scale=0.3, sinks=True)
    assert ops.in_graph(grad_out, out, lse, [sinks], frozen.to_text()) == [None]


@pytest.mark.parametrize(("contiguous", "copies"), [(False, 0), (True, 1)])
def test_the_outputs_gradient_is_brought_into_place_by_a_node(contiguous: bool, copies: int) -> None:
    """In the traced backward, where the compiler can fuse it; and not at all where it lies so already."""

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, _ = torch.ops.attn_compiler.cudnn.default(q, k, v, [], TEXT)
        return torch.autograd.grad(out, (q, k, v), up)

    with FakeTensorMode():
        q, k, v = (bshd(2, 4, 16, 32).requires_grad_() for _ in range(3))
        up = bshd(2, 4, 16, 32)
        traced = make_fx(step, tracing_mode="fake")(q, k, v, up.contiguous() if contiguous else up)
    names = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
    assert names.count("aten.clone.default") == copies
    (leaf,) = (node for node in traced.graph.nodes if "cudnn_backward" in str(node.target))
    grad_out = leaf.args[0].meta["val"]
    assert grad_out.transpose(1, 2).is_contiguous()


# ---- the op in compiled code, its device side stood in for by its definition ------------------------------------------


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """The op and its backward run on the CPU, as call_math says."""
    library: Any = torch.library.Library("attn_compiler", "IMPL")  # type: ignore[no-untyped-call]

    def math(q: Tensor, k: Tensor, v: Tensor, operands: Sequence[Tensor], text: str) -> tuple[Tensor, Tensor]:
        call = CudnnCall.from_text(text)
        named = dict(zip(call.operands, operands, strict=True))
        group = q.shape[1] // k.shape[1]
        usable = call_math.allowed(call, named, q.shape[2], k.shape[2], q.device)
        scores = (q @ k.repeat_interleave(group, 1).transpose(-1, -2) * call.scale).masked_fill(~usable, -torch.inf)
        column = named["sinks"][None, :, None, None].expand(*scores.shape[:3], 1)
        out = call_math.attention(q, k, v, named, call).transpose(1, 2).contiguous().transpose(1, 2)
        return out, torch.logsumexp(torch.cat([scores, column], -1), -1)

    def gradients(grad_out: Tensor, _: Tensor, q: Tensor, k: Tensor, v: Tensor, operands: Any, *rest: Any) -> Any:
        assert grad_out.transpose(1, 2).is_contiguous()
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            out, _lse = math(*leaves, operands, rest[-1])
        found = torch.autograd.grad(out, leaves, grad_out)
        return (*(torch.empty_like(x).copy_(grad) for x, grad in zip((q, k, v), found, strict=True)), [])

    for name, function in (("cudnn", math), ("cudnn_forward", math), ("cudnn_backward", gradients)):
        library.impl(name, function, "CPU")
    yield
    library._destroy()


@pytest.mark.in_turns
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("bshd_upstream", [True, False])
@pytest.mark.usefixtures("on_cpu")
def test_compiled_gradients_are_those_of_the_definition(backend: str, bshd_upstream: bool) -> None:
    call = CudnnCall(scale=0.25, right=0, sinks=True, sinks_grad=True, needs_grad=True)
    q = torch.randn(2, 8, 4, 16).transpose(1, 2).requires_grad_()
    k, v = (torch.randn(2, 8, 2, 16).transpose(1, 2).requires_grad_() for _ in range(2))
    sinks = torch.randn(4, requires_grad=True)
    upstream = torch.randn(2, 8, 4, 16).transpose(1, 2) if bshd_upstream else torch.randn(2, 4, 8, 16)

    def fused(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        out: Tensor = torch.ops.attn_compiler.cudnn.default(q, k, v, [sinks], call.to_text())[0]
        return out * 2

    leaves = (q, k, v, sinks)
    found = torch.autograd.grad(torch.compile(fused, backend=backend)(*leaves), leaves, upstream)
    expected = torch.autograd.grad(call_math.attention(q, k, v, {"sinks": sinks}, call) * 2, leaves, upstream)
    for got, right in zip(found, expected, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-4)
    assert [grad.stride() for grad in found[:3]] == [x.stride() for x in (q, k, v)]
