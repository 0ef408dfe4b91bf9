"""Sizes that are symbols, and fake tensors that are marked."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.source import ConstantSource
from torch._functorch.compilers import make_boxed_compiler
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import symbolic_shapes
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from attn_compiler.torch_private import (
    compat as torch_compat,
    marks,
    symbols as torch_symbols,
    tracing as torch_tracing,
)

Capture = Callable[..., list[fx.GraphModule]]


def test_dims_and_conditions_add_no_guard(capture: Capture) -> None:
    (gm,) = capture(lambda x: x.sin(), torch.randn(6, 3), dynamic=True)
    sizes = [torch_compat.fake_value(n) for n in gm.graph.nodes if isinstance(torch_compat.fake_value(n), torch.SymInt)]
    size = sizes[0]
    guards = len(size.node.shape_env.guards)
    name = torch_symbols.dim_of(size)
    assert isinstance(name, str)
    assert torch_symbols.dim_of(size * 2) == f"2*{name}"
    assert torch_symbols.dim_of(size - size + 4) == 4
    assert torch_symbols.dim_of(3) == 3
    assert torch_symbols.statically_known(size * 2 == size + size)
    assert not torch_symbols.statically_known(size == 6)
    assert torch_symbols.statically_known(True)
    assert len(size.node.shape_env.guards) == guards


def test_the_range_of_a_size_is_what_guards_ask() -> None:
    found: list[tuple[int, int | None]] = []
    table = torch.zeros(512)

    def function(x: torch.Tensor) -> torch.Tensor:
        return x + table[: x.size(0)]

    def backend(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        sizes = [size for size in inputs if isinstance(size, torch.SymInt)]
        guards = len(sizes[0].node.shape_env.guards)
        found.append(torch_symbols.range_of(sizes[0]))
        assert len(sizes[0].node.shape_env.guards) == guards
        return gm.forward

    for bounds in ({}, {"min": 3, "max": 64}):
        x = torch.zeros(6)
        torch._dynamo.mark_dynamic(x, 0, **bounds)
        torch._dynamo.reset()
        torch.compile(function, backend=backend)(x)
    assert found == [(2, 512), (3, 64)]
    torch._dynamo.reset()
    x = torch.zeros(6)
    torch._dynamo.mark_dynamic(x, 0)
    torch.compile(lambda x: x.sin(), backend=backend)(x)
    assert found[-1] == (2, None)
    assert torch_symbols.range_of(7) == (7, 7)


def test_the_larger_of_two_sizes_is_the_one_that_guards_say() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        n = x.size(0)
        rest = torch.sym_max(n - 4, 0)
        if n >= 4:
            return x.new_zeros(rest) + x.new_zeros(torch.sym_min(n, 9))[:1]
        return x

    found: list[str] = []

    def backend(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        values = (n.meta.get("example_value") for n in gm.graph.nodes)
        found.extend(str(torch_symbols.decided(value)) for value in values if isinstance(value, torch.SymInt))
        return gm.forward

    x = torch.zeros(6)
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.reset()
    torch.compile(function, backend=backend)(x)
    symbol = found[0]
    assert f"{symbol} - 4" in found
    assert f"Min(9, {symbol})" in found
    assert torch_symbols.decided(3) == 3


def test_a_symbolic_number_is_that_of_the_call_without_a_guard() -> None:
    env = symbolic_shapes.ShapeEnv()
    with FakeTensorMode(shape_env=env) as mode:
        size = mode.from_tensor(torch.zeros(5, 16), static_shapes=False).shape[0]
        guards = len(env.guards)
        assert (torch_symbols.example(size), torch_symbols.example(size * 2 + 1)) == (5, 11)
        assert torch_symbols.example(env.create_unbacked_symint()) is None
        assert len(env.guards) == guards
    assert (torch_symbols.example(3), torch_symbols.example(0.5)) == (3, 0.5)


def test_a_float_of_fixed_sizes_is_a_number_and_no_other_one_is() -> None:
    found: list[tuple[float | None, float | None]] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        length, width = (size for size in inputs if isinstance(size, torch.SymInt))
        guards = len(length.node.shape_env.guards)
        found.append((torch_symbols.constant(1 / length), torch_symbols.constant(width**-0.5)))
        assert len(length.node.shape_env.guards) == guards
        assert int(width) == 16
        found.append((torch_symbols.constant(1 / length), torch_symbols.constant(width**-0.5)))
        return gm.forward

    x = torch.zeros(6, 16)
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.reset()
    torch.compile(lambda x: x.sin() * x.shape[0] * x.shape[1], backend=backend, dynamic=True)(x)
    assert found == [(None, None), (None, 0.25)]
    assert [torch_symbols.constant(x) for x in (0.5, 2, "0.5")] == [0.5, 2.0, None]


def test_floats_are_told_apart_by_value_and_guards_and_not_by_name() -> None:
    found: list[Any] = []

    def backend(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        values = [torch_compat.fake_value(node) for node in gm.graph.nodes]
        a, b, c, *_ = [value for value in values if isinstance(value, torch.SymFloat)]
        env = torch_symbols.env_of(a)
        asked = len(env.guards)
        found.append([torch_symbols.float_key(number) for number in (a, b, c, a * b)])
        assert len(env.guards) == asked
        assert bool(a > 0.25)
        found.append([torch_symbols.float_key(number) for number in (a, b)])
        assert bool(b > 0.25)
        found.append([torch_symbols.float_key(number) for number in (a, b)])
        assert torch_symbols.fixed(a) == 0.5
        found.append([torch_symbols.float_key(a)])
        return gm.forward

    x = torch.randn(4)
    torch.compile(lambda x, a, b, c: x * a + x * b * c, backend=backend, dynamic=True)(x, 0.5, 0.5, 0.75)
    (a, b, c, product), (asked, not_asked), (both, alike), (fixed,) = found
    assert a == b != c
    assert product is None
    assert asked != not_asked == b
    assert both == alike
    assert fixed == ((0.5).hex(),)


def _sizes(*values: int) -> list[torch.SymInt]:
    env, found = symbolic_shapes.ShapeEnv(), []
    for place, value in enumerate(values):
        source = ConstantSource(f"size_{place}")
        symbol = env.create_symbol(value, source, dynamic_dim=symbolic_shapes.DimDynamic.DYNAMIC)
        found.append(env.create_symintnode(symbol, hint=value, source=source))
    return found


def test_equal_sizes_have_one_name() -> None:
    s, t = _sizes(12, 5)
    equal = (
        (s * s // s, s),
        ((s * s + 3 * s * t) // s, s + 3 * t),
        ((s - 1) // 2 + 1, (s + 1) // 2),
        ((4 * s + t) // 4, s + t // 4),
        (s * (t + 1), s * t + s),
        ((s * s * t) // (s * t), s),
    )
    for a, b in equal:
        assert torch_symbols.dim_of(a) == torch_symbols.dim_of(b)
    for a, b in ((s // 4, t // 4), (s // 4 * 4, s), ((s + 1) // 2, s // 2)):
        assert torch_symbols.dim_of(a) != torch_symbols.dim_of(b)
    assert not s.node.shape_env.guards


def test_what_a_guard_says_is_equal_has_one_name() -> None:
    s, t = _sizes(12, 14)
    assert torch_symbols.dim_of(s // 4 + 1) != torch_symbols.dim_of(t // 4 + 1)
    assert bool(s // 4 == t // 4)
    assert torch_symbols.dim_of(s // 4 + 1) == torch_symbols.dim_of(t // 4 + 1)
    assert torch_symbols.dim_of(s // 2) != torch_symbols.dim_of(t // 2)


def test_a_guard_asks_for_some_only_where_there_may_be_none() -> None:
    s, t = _sizes(12, 3)
    env = s.node.shape_env
    for size in (s, s + t, (s + 3) // 4, 7):
        torch_symbols.ask_for_some(size)
    assert not env.guards
    assert torch_symbols.range_of(s // 4)[0] == 0
    for size in (s // 4, 4 * (t // 3)):
        torch_symbols.ask_for_some(size)
        assert torch_symbols.range_of(size)[0] >= 1
    assert [str(guard.expr) for guard in env.guards] == [f"(({s}//4)) >= 1", f"4*(({t}//3)) >= 1"]
    torch_symbols.ask_for_some(t // 4)
    assert torch_symbols.range_of(t // 4)[0] == 0
    env.freeze()
    torch_symbols.ask_for_some(s // 8)
    assert len(env.guards) == 3


# The marks on what a checkpoint made, as PyTorch puts them there and as it reads them.
aten = torch.ops.aten
#: what the function below calls in its checkpoint, and around it
INSIDE, OUTSIDE = aten.sigmoid.default, aten.tanh.default


class Parted:
    """A backend that looks at the traced graph, marks `saved`, and keeps what becomes of it.

    left: of each op, whether it is left to the partitioner. policies: of each body, whether it has one of its own.
    """

    def __init__(self, saved: object = None) -> None:
        self.saved = saved
        self.left: dict[object, bool] = {}
        self.policies: list[bool] = []
        self.parts: list[fx.GraphModule] = []

    def __call__(self, gm: fx.GraphModule, inputs: Any) -> Any:
        self.policies = [marks.has_policy(body) for body in torch_compat.graph_modules(gm) if body is not gm]
        kept = make_boxed_compiler(self._kept)
        return aot_autograd(fw_compiler=kept, bw_compiler=kept, partition_fn=self._parted)(gm, inputs)

    def _kept(self, gm: fx.GraphModule, inputs: Any) -> Any:
        self.parts.append(gm)
        return gm

    def _parted(self, gm: fx.GraphModule, inputs: Any, **more: Any) -> Any:
        for node in gm.graph.nodes:
            if node.op == "call_function":
                self.left.setdefault(node.target, marks.is_left_to_partitioner(node))
            if node.target is self.saved:
                marks.must_save(node)
        return min_cut_rematerialization_partition(gm, inputs, **more)

    def calls(self, target: Any) -> list[int]:
        """Of an op, in the forward and in the backward."""
        return [len(part.graph.find_nodes(op="call_function", target=target)) for part in self.parts]


def _run(backend: Parted, policy: CheckpointPolicy | None = None, *, use_reentrant: bool = False) -> tuple[Tensor, ...]:
    more: dict[str, Any] = {}
    if policy is not None:
        more["context_fn"] = functools.partial(create_selective_checkpoint_contexts, lambda *_, **__: policy)

    def inside(x: Tensor) -> Tensor:
        return x.sigmoid().exp() * 2

    def function(x: Tensor) -> Tensor:
        made: Tensor = checkpoint(inside, x.tanh(), use_reentrant=use_reentrant, **more)
        return made.sum()

    torch._dynamo.reset()
    inputs = [torch.linspace(-1, 1, 12).requires_grad_() for _ in range(2)]
    torch.compile(function, backend=backend, fullgraph=True)(inputs[0]).backward()  # type: ignore[no-untyped-call]
    function(inputs[1]).backward()  # type: ignore[no-untyped-call]
    grads = tuple(x.grad for x in inputs if x.grad is not None)
    torch.testing.assert_close(*grads)
    return grads


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_a_checkpoint_computes_again_is_left_to_the_partitioner(use_reentrant: bool) -> None:
    backend = Parted()
    _run(backend, use_reentrant=use_reentrant)
    assert (backend.left[INSIDE], backend.left[OUTSIDE]) == (True, False)
    assert backend.calls(INSIDE) == [1, 1]
    assert backend.policies == [False]


def test_what_must_be_saved_is_not_computed_again() -> None:
    backend = Parted(INSIDE)
    _run(backend)
    assert backend.calls(INSIDE) == [1, 0]
    assert backend.calls(aten.exp.default) == [1, 1]


@pytest.mark.parametrize(
    ("policy", "is_left"),
    [
        (CheckpointPolicy.PREFER_RECOMPUTE, True),
        (CheckpointPolicy.MUST_RECOMPUTE, False),
        (CheckpointPolicy.MUST_SAVE, False),
    ],
)
def test_a_users_policy_is_seen(policy: CheckpointPolicy, is_left: bool) -> None:
    backend = Parted()
    _run(backend, policy)
    assert backend.left[INSIDE] == is_left
    assert backend.policies == [True]


# What tracing learns from Dynamo's example values.
def test_fake_mode_of_the_values() -> None:
    with FakeTensorMode() as mode:
        fake = torch.empty(2)
    assert torch_tracing.fake_mode_of_values([3, fake]) is mode
    assert torch_tracing.fake_mode_of_values([]) is None
