"""What a body's inputs are at its call, and which of them it may write to, told by Dynamo's nodes alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch.utils.checkpoint import checkpoint

from attn_compiler.passes.graph import bodies
from tests.passes.compiling import captured

Tensor = torch.Tensor
X = (4, 5)


def _call(function: Callable[..., Any], *inputs: Tensor) -> fx.Node:
    (call,) = (n for n in captured(function, *inputs)[0].graph.nodes if bodies.is_higher_order(n))
    return call


def _written(edit: Callable[[Tensor, Tensor], Any]) -> set[str]:
    """Which of x and y, given to a checkpoint, it may write to by `edit`."""

    def body(x: Tensor, y: Tensor) -> Tensor:
        kept = edit(x, y)
        return x + y if kept is None else x + y + kept.sum()

    def function(a: Tensor, b: Tensor) -> Tensor:
        x, y = a.sin(), b.cos()
        return checkpoint(body, x, y, use_reentrant=False)

    call = _call(function, torch.randn(X), torch.randn(X))
    return {str(node.name) for node in bodies.written_by(call)}


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "setitem": lambda x, y: x.__setitem__(0, 1.0),
    "a method": lambda x, y: x.mul_(y),
    "an augmented assignment": lambda x, y: x.__iadd__(y),
    "a function": lambda x, y: torch.relu_(x),
    "a flag by keyword": lambda x, y: F.silu(x, inplace=True),
    "a flag by position": lambda x, y: F.dropout(x, 0.5, False, True),
    "out": lambda x, y: torch.add(y, y, out=x),
    "a view": lambda x, y: x[1:].view(-1)[2:].zero_(),
    "an operator": lambda x, y: torch.ops.aten.copy_.default(x, y),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_is_told(name: str) -> None:
    assert _written(WRITES[name]) == {"x"}


@pytest.mark.parametrize(
    "edit",
    [
        lambda x, y: x.masked_fill(y > 0, 0.0).mul_(y),
        lambda x, y: F.dropout(x, 0.5, True),
        lambda x, y: torch.zeros(5).add_(x[0]),
        lambda x, y: F.scaled_dot_product_attention(x, x, x, None, 0.0, True),
        lambda x, y: torch.ops.aten.add.Tensor(x, y),
        lambda x, y: x.clone().detach_(),
    ],
    ids=["its own result", "a flag of something else", "a new tensor", "is_causal", "an operator", "no element"],
)
def test_what_is_only_read_is_not_told(edit: Callable[[Tensor, Tensor], Any]) -> None:
    assert _written(edit) == set()


def test_statistics_of_a_norm_are_written() -> None:
    def body(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return F.batch_norm(x, mean, var, training=True)

    def function(a: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return checkpoint(body, a.sin(), mean, var, use_reentrant=False)

    call = _call(function, torch.randn(X), torch.zeros(5), torch.ones(5))
    assert {node.name for node in bodies.written_by(call)} == {"l_mean_", "l_var_"}


def test_a_body_in_a_body_is_looked_into() -> None:
    def inner(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return x + y

    def outer(x: Tensor, y: Tensor) -> Tensor:
        return checkpoint(inner, y, x, use_reentrant=False)

    def function(a: Tensor, b: Tensor) -> Tensor:
        x, y = a.sin(), b.cos()
        return checkpoint(outer, x, y, use_reentrant=False)

    call = _call(function, torch.randn(X), torch.randn(X))
    assert {node.name for node in bodies.written_by(call)} == {"y"}


def test_arguments_are_the_bodys_inputs() -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        return checkpoint(lambda x, y: x.sin() * y, a, b, use_reentrant=False)

    call = _call(function, torch.randn(X), torch.randn(X))
    (body,) = bodies.bodies(call)
    first = bodies.first_argument(call, body)
    assert first == 1
    shapes = [node.meta["example_value"].shape for node in bodies.placeholders(body)]
    assert shapes == [node.meta["example_value"].shape for node in call.args[first:]]


def test_a_call_that_does_more_than_pass_on_has_no_arguments_for_its_bodies() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    with torch.no_grad():
        call = _call(function, torch.randn(X))
    assert len(bodies.bodies(call)) == 2
    assert all(bodies.first_argument(call, body) is None for body in bodies.bodies(call))
    assert bodies.written_by(call) == set()
