from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from attn_compiler.verifying import watching
from attn_compiler.verifying.watching import Arrived, CannotWatchError

Tensor = torch.Tensor


class Called:
    """A function of tensors, watched, and what was found."""

    def __init__(self, function: Any, *args: Tensor) -> None:
        self.found: list[Arrived] = []
        before = watching.edges(args)
        self.outs = watching.watch(_listed(function(*args)), args, before, self.found.append)

    @property
    def one(self) -> Arrived:
        (found,) = self.found
        return found


def _listed(x: Any) -> Sequence[Any]:
    return x if isinstance(x, tuple | list) else (x,)


class _Joined(torch.autograd.Function):
    """One node for all, as a compiled function has: it gives nothing where there is no gradient."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a * 2, a * 3

    @staticmethod
    def backward(ctx: Any, one: Tensor, other: Tensor) -> tuple[Tensor, None]:
        return one * 2 + other * 3, None


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, requires_grad=True)


def test_what_arrives_and_what_leaves() -> None:
    a, b = leaf(1.0, 2.0), leaf(3.0, 4.0)
    call = Called(lambda a, b: a * b, a, b)
    (call.outs[0] * torch.tensor([5.0, 7.0])).sum().backward()
    assert call.one.outputs[0].tolist() == [5.0, 7.0]
    assert [call.one.inputs[i].tolist() for i in (0, 1)] == [[15.0, 28.0], [5.0, 14.0]]  # type: ignore[union-attr]


def test_what_others_add_to_a_gradient_is_theirs() -> None:
    a = leaf(1.0)
    x = a * 10
    call = Called(lambda x: x * 2, x)
    (call.outs[0] + x * 100 + a * 1000).sum().backward()
    assert call.one.inputs[0] == torch.tensor([2.0])
    assert a.grad == torch.tensor([2020.0])


def test_an_input_that_is_read_by_several_nodes() -> None:
    a = leaf(1.0)
    call = Called(lambda a: (a * 2 + a * 3).sin() * 0 + a * a, a)
    call.outs[0].sum().backward()
    assert call.one.inputs[0] == torch.tensor([2.0])


def test_an_output_that_another_is_made_from() -> None:
    """What arrives at it is its own gradient, not that of the other."""

    def function(a: Tensor) -> tuple[Tensor, Tensor]:
        x = a * 2
        return x, x * 5

    a = leaf(1.0)
    call = Called(function, a)
    (call.outs[0] * 3 + call.outs[1]).sum().backward()
    assert {i: g.item() for i, g in call.one.outputs.items()} == {0: 3.0, 1: 1.0}
    assert call.one.inputs[0] == torch.tensor([16.0])


def test_an_output_that_is_given_twice_is_counted_once() -> None:
    def function(a: Tensor) -> tuple[Tensor, Tensor]:
        x = a * 2
        return x, x

    call = Called(function, leaf(1.0))
    (call.outs[0] * 3 + call.outs[1]).sum().backward()
    assert [g.item() for g in call.one.outputs.values()] == [4.0]


def test_an_input_that_is_given_back_is_no_output() -> None:
    a = leaf(1.0)
    call = Called(lambda a: (a, a.view(1), a * 2), a)
    sum(x.sum() for x in call.outs).backward()  # type: ignore[union-attr]
    assert sorted(call.one.outputs) == [1, 2]
    assert call.one.inputs[0] == torch.tensor([3.0])


def test_an_output_that_nothing_is_asked_of() -> None:
    a, b = leaf(1.0), leaf(1.0)
    call = Called(lambda a, b: (a * 2, b * 3), a, b)
    call.outs[0].sum().backward()
    assert list(call.one.outputs) == [0]
    assert list(call.one.inputs) == [0]


def test_one_node_gives_nothing_where_there_is_no_gradient() -> None:
    a, b = leaf(1.0), leaf(1.0)
    call = Called(lambda a, b: _Joined.apply(a, b), a, b)
    call.outs[1].sum().backward()
    assert call.one.inputs == {0: torch.tensor([3.0]), 1: None}


def test_an_input_without_any_way_to_it_gets_no_gradient() -> None:
    a, b = leaf(1.0), leaf(1.0)
    call = Called(lambda a, b: a * b.detach(), a, b)
    call.outs[0].sum().backward()
    assert call.one.inputs == {0: torch.tensor([1.0]), 1: None}


def test_an_input_that_is_written_to_is_an_output_too() -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        x.copy_(y)
        return y + 0

    a = leaf(1.0)
    x = a * 1
    call = Called(function, x)
    (call.outs[0] + x * 10).sum().backward()
    assert {i: g.item() for i, g in call.one.outputs.items()} == {0: 1.0, 1: 10.0}
    assert call.one.inputs[0] == torch.tensor([22.0])


def test_an_input_that_is_read_again_after_it_was_written() -> None:
    def function(x: Tensor) -> Tensor:
        x.mul_(2)
        return x + 1

    with pytest.raises(CannotWatchError):
        Called(function, leaf(1.0) * 1)


def test_outputs_may_be_written_in_place() -> None:
    a = leaf(1.0)
    call = Called(lambda a: a * 2, a)
    call.outs[0].mul_(5)
    call.outs[0].sum().backward()
    assert [g.item() for g in call.one.outputs.values()] == [5.0]


def test_the_first_backward_alone() -> None:
    a = leaf(1.0)
    call = Called(lambda a: a * 2, a)
    call.outs[0].sum().backward(retain_graph=True)
    (call.outs[0] * 3).sum().backward()
    assert call.one.outputs[0] == torch.tensor([1.0])
    assert a.grad == torch.tensor([8.0])


def test_a_backward_that_fails_is_none() -> None:
    def broken(_: Tensor) -> None:
        raise ValueError("odd")

    a = leaf(1.0)
    x = a * 1
    call = Called(lambda x: x * 2, x)
    handle = x.register_hook(broken)
    with pytest.raises(ValueError, match="odd"):
        (call.outs[0] * 7).sum().backward(retain_graph=True)
    handle.remove()
    assert call.found == []
    call.outs[0].sum().backward()
    assert call.one.outputs[0] == torch.tensor([1.0])
    assert call.one.inputs[0] == torch.tensor([2.0])


def test_what_done_raises_the_backward_raises() -> None:
    def done(_: Arrived) -> None:
        raise ValueError("odd")

    a = leaf(1.0)
    before = watching.edges((a,))
    (out,) = watching.watch([a * 2], (a,), before, done)
    with pytest.raises(ValueError, match="odd"):
        out.sum().backward()


@pytest.mark.parametrize("backward", [True, False])
def test_what_watches_goes_with_the_graph(backward: bool) -> None:
    class Done:
        def __call__(self, _: Arrived) -> None: ...

    a, done = leaf(1.0), Done()
    gone = weakref.ref(done)
    outs = watching.watch([a * 2], (a,), watching.edges((a,)), done)
    del done
    assert gone() is not None
    if backward:
        outs[0].sum().backward(retain_graph=True)
    else:
        outs.clear()
    gc.collect()
    assert gone() is None
