"""Hooks of autograd: what arrives at the results of a call, what it sends to its inputs, and when its hooks are gone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_compiler.verifying import watching
from attn_compiler.verifying.watching import Arrived, CannotWatchError


class _Joined(torch.autograd.Function):
    """One node for all, as a compiled function has: it gives nothing where there is no gradient."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a * 2, a * 3

    @staticmethod
    def backward(ctx: Any, one: Tensor, other: Tensor) -> tuple[Tensor, None]:
        return one * 2 + other * 3, None


def _twice(a: Tensor) -> tuple[Tensor, Tensor]:
    x = a * 2
    return x, x


def _from_each_other(a: Tensor) -> tuple[Tensor, Tensor]:
    x = a * 2
    return x, x * 5


def _writing(x: Tensor) -> Tensor:
    y = x * 2
    x.copy_(y)
    return y + 0


@dataclass(frozen=True)
class Case:
    """loss: of the outputs and the inputs. outputs, inputs: the gradients that are seen."""

    function: Callable[..., Any]
    loss: Callable[..., Any]
    outputs: dict[int, float]
    inputs: dict[int, float | None]
    leaves: bool = True


def _first(outs: Any, *_: Any) -> Any:
    return outs[0]


CASES = {
    "all": Case(lambda a, b: a * b, lambda o, a, b: o[0] * 5, {0: 5}, {0: 15, 1: 10}),
    "not what others add": Case(lambda a, b: a * 2, lambda o, a, b: o[0] + a * 100, {0: 1}, {0: 2, 1: None}),
    "read by several nodes": Case(lambda a, b: (a * 2 + a * 3).sin() * 0 + a * a, _first, {0: 1}, {0: 4, 1: None}),
    "made from each other": Case(
        lambda a, b: _from_each_other(a), lambda o, a, b: o[0] * 3 + o[1], {0: 3, 1: 1}, {0: 16, 1: None}
    ),
    "given twice": Case(lambda a, b: _twice(a), lambda o, a, b: o[0] * 3 + o[1], {1: 4}, {0: 8, 1: None}),
    "given back": Case(lambda a, b: (a, a.view(1), a * 2), lambda o, a, b: sum(o), {1: 1, 2: 1}, {0: 3, 1: None}),
    "not asked for": Case(lambda a, b: (a * 2, b * 3), _first, {0: 1}, {0: 2}),
    "one node": Case(_Joined.apply, lambda o, a, b: o[1], {1: 1}, {0: 3, 1: None}),
    "no way to it": Case(lambda a, b: a * b.detach(), _first, {0: 1}, {0: 3, 1: None}),
    "written": Case(lambda a, b: _writing(a), lambda o, a, b: o[0] + a * 10, {0: 1, 1: 10}, {0: 22, 1: None}, False),
    "written by the caller": Case(lambda a, b: a * 2, lambda o, a, b: o[0].mul_(5), {0: 5}, {0: 10, 1: None}),
}


def _leaf(*values: float) -> Tensor:
    return torch.tensor(values, requires_grad=True)


def _watched(function: Callable[..., Any], *args: Tensor) -> tuple[list[Arrived], list[Any]]:
    found: list[Arrived] = []
    before = watching.edges(args)
    outs = function(*args)
    return found, watching.watch(outs if isinstance(outs, tuple) else (outs,), args, before, found.append)


@pytest.mark.parametrize("leaves", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_what_arrives_and_what_leaves(name: str, leaves: bool) -> None:
    case = CASES[name]
    if leaves and not case.leaves:
        pytest.skip("no leaf may be written to")
    a, b = (x if leaves else x * 1 for x in (_leaf(2.0), _leaf(3.0)))
    (found, outs) = _watched(case.function, a, b)
    case.loss(outs, a, b).sum().backward()
    (one,) = found
    assert {i: x.item() for i, x in one.outputs.items()} == case.outputs
    assert {i: None if x is None else x.item() for i, x in one.inputs.items()} == case.inputs


def test_an_input_that_is_read_again_after_it_was_written() -> None:
    with pytest.raises(CannotWatchError):
        _watched(lambda x: x.mul_(2) + 1, _leaf(1.0) * 1)


def test_the_first_backward_alone() -> None:
    a = _leaf(1.0)
    found, outs = _watched(lambda a: a * 2, a)
    outs[0].sum().backward(retain_graph=True)
    (outs[0] * 3).sum().backward()
    (one,) = found
    assert one.outputs[0] == torch.tensor([1.0])
    assert a.grad == torch.tensor([8.0])


def test_a_backward_that_fails_is_none() -> None:
    def broken(_: Tensor) -> None:
        raise ValueError("odd")

    x = _leaf(1.0) * 1
    found, outs = _watched(lambda x: x * 2, x)
    handle = x.register_hook(broken)
    with pytest.raises(ValueError, match="odd"):
        (outs[0] * 7).sum().backward(retain_graph=True)
    handle.remove()
    assert found == []
    outs[0].sum().backward()
    (one,) = found
    assert (one.outputs[0], one.inputs[0]) == (torch.tensor([1.0]), torch.tensor([2.0]))


class _Done:
    def __call__(self, _: Arrived) -> None:
        raise ValueError("odd")


@pytest.mark.parametrize("backward", [True, False])
def test_what_watches_raises_in_the_backward_and_goes_with_the_graph(backward: bool) -> None:
    a, done = _leaf(1.0), _Done()
    gone = weakref.ref(done)
    outs = watching.watch([a * 2], (a,), watching.edges((a,)), done)
    del done
    assert gone() is not None
    if backward:
        with pytest.raises(ValueError, match="odd"):
            outs[0].sum().backward(retain_graph=True)
    else:
        outs.clear()
    gc.collect()
    assert gone() is None
