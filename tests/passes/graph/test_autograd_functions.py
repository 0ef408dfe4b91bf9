"""What an autograd.Function around a library's kernel calls besides, and what its forward does around the kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from attn_compiler.passes.graph import autograd_functions, opaque_calls
from attn_compiler.passes.graph.autograd_functions import Inside
from attn_compiler.passes.graph.calls import target_name
from tests import library_kernels
from tests.library_kernels import FlashAttnFunc, flash_attn_func
from tests.passes.library_inputs import qkv


@pytest.fixture(autouse=True)
def _libraries() -> Iterator[None]:
    with library_kernels.installed():
        yield


def _captured(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    found: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        found.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    (gm,) = found
    return gm


def _function(function: Callable[..., Any], head_dim: int = 8) -> tuple[fx.Node, fx.Node]:
    """The call of the autograd.Function, and the kernel in its forward."""
    gm = _captured(function, *(x.requires_grad_() for x in qkv(head_dim=head_dim)))
    (node,) = (n for n in gm.graph.nodes if target_name(n) == "autograd_function_apply")
    kernel = autograd_functions.kernel_of(node)
    assert kernel is not None
    return node, kernel


class Louder(FlashAttnFunc):
    """Its gradient is twice the kernel's."""

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return library_kernels._gradients(ctx, dout.mul(2))


class Shifted(FlashAttnFunc):
    """What it gives is not the kernel's."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        return FlashAttnFunc.forward(ctx, *given).add(1)


class Without(FlashAttnFunc):
    """Its backward calls no kernel."""

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, v, *_ = ctx.saved_tensors
        return *(torch.empty_like(x) for x in (q, k, v)), None, None, None, None


def _apply(kind: type[FlashAttnFunc]) -> Callable[[Tensor, Tensor, Tensor], Any]:
    return lambda q, k, v: kind.apply(q, k, v, 0.3, True, (-1, -1), 0.0)


def test_a_kernel_and_its_own_gradient_are_all_that_is_called() -> None:
    node, kernel = _function(_apply(FlashAttnFunc))
    assert opaque_calls.name_of(kernel) == "flash_attn::_flash_attn_forward"
    assert autograd_functions.differs(node, kernel) is None
    backward = autograd_functions.backward_of(node, kernel)
    assert opaque_calls.qualified(backward) == "flash_attn::_flash_attn_backward"


@pytest.mark.parametrize(
    ("kind", "said"),
    [(Louder, "also calls mul"), (Shifted, "also calls add"), (Without, "calls 0 kernels of the library, not one")],
)
def test_what_else_is_called_is_named(kind: type[FlashAttnFunc], said: str) -> None:
    node, kernel = _function(_apply(kind))
    assert said in str(autograd_functions.differs(node, kernel))


def test_no_other_node_has_a_kernel_inside() -> None:
    gm = _captured(lambda q, k, v: flash_attn_func(q, k, v).cos(), *(x.requires_grad_() for x in qkv()))
    found = [autograd_functions.kernel_of(node) for node in gm.graph.nodes]
    assert [x is not None for x in found].count(True) == 1


@pytest.mark.parametrize("head_dim", [8, 12])
def test_the_forward_is_done_around_another_kernel(head_dim: int) -> None:
    """The library pads head dims to a multiple of 8, and cuts what it gives."""
    node, kernel = _function(_apply(FlashAttnFunc), head_dim)
    inside = Inside(node, kernel)
    inputs = dict(zip(inside.inputs, qkv(head_dim=head_dim), strict=True))
    padded = -(-head_dim // 8) * 8
    q, k, v = inside.values(kernel.args[:3], inputs)  # type: ignore[arg-type]
    assert {x.shape[-1] for x in (q, k, v)} == {padded}
    for x, own in zip((q, k, v), inputs.values(), strict=True):
        assert torch.equal(x[..., :head_dim], own)
        assert not x[..., head_dim:].any()
    attention = torch.randn(q.shape)
    assert torch.equal(inside.result(attention, inputs), attention[..., :head_dim])
