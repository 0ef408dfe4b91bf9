"""What calls give on fake values: computed once for alike ones, and the same as when it is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from attn_compiler.passes.graph.values import EmittedValues
from attn_compiler.torch_private import tracing as torch_tracing

MODE = FakeTensorMode(shape_env=ShapeEnv())


def _input(*, static: bool, grad: bool = True) -> Tensor:
    return MODE.from_tensor(torch.empty(6, 4), static_shapes=static).requires_grad_(grad)


class Runs:
    """Calls functions as a builder does, and counts what is run."""

    def __init__(self) -> None:
        self.values = EmittedValues(MODE)
        self.ran = 0

    def __call__(self, function: Callable[..., Any], *args: Any, with_grad: bool = True, **named: Any) -> Any:
        graph = fx.Graph()
        env: dict[fx.Node, Any] = {}

        def node(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            made = graph.placeholder("x")
            env[made] = x
            return made

        def run() -> Any:
            self.ran += 1
            with torch_tracing.running_in(MODE), torch.set_grad_enabled(with_grad):
                return function(*args, **named)

        call = graph.call_function(function, tuple(map(node, args)), named)
        return self.values.of(call, env, run, with_grad=with_grad)


def _told(value: Any) -> list[str]:
    leaves = pytree.tree_leaves(value)
    return [str((x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, x.requires_grad)) for x in leaves]


CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "a new tensor": (torch.mul, (2,)),
    "a view": (torch.transpose, (0, 1)),
    "several": (torch.split, (2, 1)),
    "another dtype": (torch.ops.aten._to_copy.default, ()),
    "whole numbers": (torch.argmax, ()),
}


@pytest.mark.parametrize("static", [True, False], ids=["known", "symbolic"])
@pytest.mark.parametrize("name", CALLS)
def test_alike_calls_are_run_once_and_give_the_same(name: str, static: bool) -> None:
    function, more = CALLS[name]
    x, runs = _input(static=static), Runs()
    first, second = (runs(function, x, *more) for _ in range(2))
    assert runs.ran == 1
    assert _told(second) == _told(first) == _told(Runs()(function, x, *more))


def test_symbolic_calls_are_run_once() -> None:
    x, runs = _input(static=False), Runs()
    first, second = runs(torch.mul, x, 2), runs(torch.mul, x, 2)
    assert runs.ran == 1
    assert _told(first) == _told(second)
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata
    assert runs(torch.transpose, second, 0, 1).untyped_storage()._cdata == second.untyped_storage()._cdata


def test_what_differs_is_run() -> None:
    runs = Runs()
    x = _input(static=True)
    runs(torch.mul, x, 2)
    runs(torch.mul, x, 2.0)
    runs(torch.mul, x, 2, with_grad=False)
    runs(torch.mul, _input(static=True, grad=False), 2)
    runs(torch.mul, x.detach().t(), 2)
    assert runs.ran == 5


def test_a_view_is_in_the_memory_of_what_it_is_given() -> None:
    runs = Runs()
    for x in (_input(static=True), _input(static=True)):
        view = runs(torch.transpose, x, 0, 1)
        assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
    assert runs.ran == 1


def test_what_writes_and_what_gives_its_input_is_run_each_time() -> None:
    runs = Runs()
    x = _input(static=True, grad=False)
    for _ in range(2):
        assert runs(torch.Tensor.add_, x, 1) is x
        assert runs(torch.ops.aten.add_.Tensor, x, 1) is x
        assert runs(torch.Tensor.contiguous, x) is x
    assert runs.ran == 6


@pytest.mark.parametrize("static", [True, False], ids=["known", "symbolic"])
def test_values_without_a_graph_are_made_once(static: bool) -> None:
    values, x = EmittedValues(MODE), _input(static=static)
    others = (_input(static=static), torch.transpose(x, 0, 1).contiguous())
    ran = 0

    def made(*given: Any) -> Any:
        def run() -> Any:
            nonlocal ran
            ran += 1
            with torch_tracing.running_in(MODE), torch.no_grad():
                return torch.broadcast_tensors(*given)[0].clone()

        return values.of_values(torch.broadcast_tensors, given, {}, run)

    first, second = made(x), made(others[0])
    assert ran == 1
    assert _told(first) == _told(second)
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata
    # A tensor that is given twice is told from two, and other strides from these.
    made(x, x), made(x, others[0]), made(others[1])
    assert ran == 4
