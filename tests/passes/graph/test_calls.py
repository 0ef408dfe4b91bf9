"""Calls of libraries, of autograd functions and of what is opaque: which are seen through, and which are left whole."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from attn_compiler.passes.graph import autograd_functions, opaque_calls, whole_calls
from attn_compiler.passes.graph.autograd_functions import Inside
from attn_compiler.passes.graph.calls import argument, target_name
from attn_compiler.passes.graph.whole_calls import WholeCall
from tests import library_kernels
from tests.library_kernels import FlashAttnFunc, flash_attn_func
from tests.passes.compiling import compiled
from tests.passes.library_inputs import qkv


# The name of what a node calls and the arguments that it is given, however that is written.
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
    ("args", "kwargs"), [((-2,), {}), ((), {"dim": -2}), ((), {"axis": -2})], ids=["position", "name", "NumPy's name"]
)
def test_arguments_are_found_as_they_are_given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    node = _node(lambda graph, x: graph.call_method("softmax", (x, *args), {**kwargs, "dtype": torch.float32}))
    assert argument(node, 1, "dim") == -2
    assert argument(node, 2, "dtype") is torch.float32
    assert argument(node, 3, "out") is None


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


# What an autograd.Function around a library's kernel calls besides, and what its forward does around the kernel.
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


# Which calls are one op, with which arguments.
aten = torch.ops.aten
MODE = FakeTensorMode()


def _x() -> Tensor:
    return MODE.from_tensor(torch.empty(2, 3, 4, 4))


def _read(target: Any, *values: Any, op: str = "call_function", **named: Any) -> tuple[WholeCall | None, list[fx.Node]]:
    """What is read of a call, and the nodes of its tensors."""
    graph, env = fx.Graph(), dict[fx.Node, Any]()

    def node(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        made = graph.placeholder("x")
        env[made] = x
        return made

    call = graph.create_node(op, target, tuple(map(node, values)), {name: node(x) for name, x in named.items()})
    return whole_calls.read(call, env), list(env)


@pytest.mark.parametrize(
    ("target", "op", "found"),
    [
        (torch.matmul, "call_function", aten.matmul.default),
        (operator.matmul, "call_function", aten.matmul.default),
        ("matmul", "call_method", aten.matmul.default),
        (operator.and_, "call_function", aten.bitwise_and.Tensor),
        (torch.add, "call_function", aten.add.Tensor),
        (operator.le, "call_function", aten.le.Tensor),
        (aten.mul.Tensor, "call_function", aten.mul.Tensor),
    ],
)
def test_two_tensors_are_given_to_one_op(target: Any, op: str, found: Any) -> None:
    whole, nodes = _read(target, _x(), _x(), op=op)
    assert whole == WholeCall(op=found, args=tuple(nodes), kwargs={})


def test_arguments_are_where_tracing_has_them() -> None:
    whole, (q, k, v, mask) = _read(F.scaled_dot_product_attention, _x(), _x(), _x(), attn_mask=_x(), scale=0.5)
    assert whole is not None
    assert (whole.args, whole.kwargs) == ((q, k, v, mask), {"scale": 0.5})
    # What comes behind the last that is not the default is left out, and what comes before it is not.
    whole, (q, k, v) = _read(F.scaled_dot_product_attention, _x(), _x(), value=_x(), is_causal=True, enable_gqa=False)
    assert whole is not None
    assert (whole.args, whole.kwargs) == ((q, k, v, None, 0.0, True), {})


@pytest.mark.parametrize(
    "read",
    [
        lambda: _read(torch.mul, _x(), 2.0),
        lambda: _read(torch.add, _x(), _x(), out=_x()),
        lambda: _read(torch.add, _x(), _x(), alpha=0.5),
        lambda: _read(F.scaled_dot_product_attention, _x(), _x(), _x(), None, 0),
        lambda: _read(F.scaled_dot_product_attention, _x(), _x()),
        lambda: _read(F.scaled_dot_product_attention, _x(), _x(), _x(), query=_x()),
        lambda: _read(operator.iadd, _x(), _x()),
        lambda: _read(torch.cat, _x(), _x()),
        lambda: _read(torch.matmul, torch.empty(2, 2), _x()),
    ],
    ids=[
        "a number",
        "out",
        "another type",
        "an integer",
        "too few",
        "twice",
        "in place",
        "other ops",
        "no fake tensor",
    ],
)
def test_other_calls_are_traced(read: Callable[[], tuple[WholeCall | None, Any]]) -> None:
    assert read()[0] is None


def test_calls_under_autocast_are_traced() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert _read(torch.matmul, _x(), _x())[0] is None
    assert _read(torch.matmul, _x(), _x())[0] is not None
