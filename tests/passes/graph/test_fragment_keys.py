"""What tells two Dynamo nodes apart, and what no key is made of. That the mirrors agree, test_fragments.py asks."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from attn_compiler.passes.graph.fragment_keys import NodeInputs, Unknown, key_of, number

MODE = FakeTensorMode()


def stands(node: fx.Node, value: Tensor) -> fx.Node:
    """Each tensor has a node of its own."""
    return node


def fake(make: Callable[[], Any]) -> Any:
    with MODE:
        return make()


def key(target: Any, *values: Any, op: str = "call_function", **named: Any) -> Any:
    """Of one call. What is a fake tensor among the values stands as a node."""
    graph, env = fx.Graph(), {}

    def given(value: Any) -> Any:
        if not isinstance(value, (Tensor, torch.SymInt)):
            return value
        node = graph.placeholder("x")
        env[node] = value
        return node

    node = graph.create_node(op, target, tuple(map(given, values)), {name: given(x) for name, x in named.items()})
    return key_of(node, env, NodeInputs(), stands)


def x(*shape: int, **more: Any) -> Tensor:
    found: Tensor = fake(lambda: torch.empty(shape or (2, 3), **more))
    return found


def test_calls_that_are_alike_have_one_key() -> None:
    assert key(torch.add, x(), x(), alpha=2) == key(torch.add, x(), x(), alpha=2)


#: each differs from the first in one thing
APART: dict[str, Callable[[], Any]] = {
    "as it is": lambda: key(torch.mul, x(), 1),
    "float": lambda: key(torch.mul, x(), 1.0),
    "truth value": lambda: key(torch.mul, x(), True),
    "zero": lambda: key(torch.mul, x(), 0.0),
    "negative zero": lambda: key(torch.mul, x(), -0.0),
    "function": lambda: key(torch.add, x(), 1),
    "method": lambda: key("mul", x(), 1, op="call_method"),
    "by name": lambda: key(torch.mul, x(), other=1),
    "list": lambda: key(torch.mul, x(), [1]),
    "tuple": lambda: key(torch.mul, x(), (1,)),
    "slice": lambda: key(operator.getitem, x(), slice(1)),
    "slice from the end": lambda: key(operator.getitem, x(), slice(-1)),
    "ellipsis": lambda: key(operator.getitem, x(), ...),
    "dtype": lambda: key(torch.mul, x(dtype=torch.float16), 1),
    "shape": lambda: key(torch.mul, x(3, 2), 1),
    "strides": lambda: key(torch.mul, fake(lambda: torch.empty(3, 2).t()), 1),
    "offset": lambda: key(torch.mul, fake(lambda: torch.empty(9)[3:].view(2, 3)), 1),
    "device": lambda: key(torch.mul, x(device="meta"), 1),
    "gradient": lambda: key(torch.mul, x(requires_grad=True), 1),
    "two tensors": lambda: key(torch.mul, x(), x()),
}


def test_one_difference_is_another_key() -> None:
    keys = {name: make() for name, make in APART.items()}
    assert len({repr(key) for key in keys.values()}) == len(keys)
    assert len(set(keys.values())) == len(keys)


def test_which_tensors_are_one_and_which_share_memory() -> None:
    one = x()
    view = fake(lambda: one.view(2, 3))
    found = {key(torch.add, one, x()), key(torch.add, one, one), key(torch.add, one, view)}
    assert len(found) == 3
    other = x()
    assert key(torch.add, other, fake(lambda: other.view(2, 3))) in found


def test_what_is_given_is_kept_once_in_order() -> None:
    graph, one, other = fx.Graph(), x(), x()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    inputs = NodeInputs()
    key_of(graph.call_function(torch.cat, ([b, a, b],)), {a: one, b: other}, inputs, stands)
    assert [value is wanted for value, wanted in zip(inputs.values, (other, one), strict=True)] == [True, True]
    assert len(inputs.holders) == 2


def _somebody_elses(x: Tensor) -> Tensor:
    return x


def test_tensors_of_one_memory_are_counted_once() -> None:
    one = x()
    for other, memories in ((fake(lambda: one.view(3, 2)), 1), (x(3, 2), 2)):
        graph, inputs = fx.Graph(), NodeInputs()
        a, b = graph.placeholder("a"), graph.placeholder("b")
        key_of(graph.call_function(torch.matmul, (a, b)), {a: one, b: other}, inputs, stands)
        assert len(inputs.holders) == memories


UNKNOWN: dict[str, Callable[[], Any]] = {
    "somebody else's function": lambda: key(_somebody_elses, x()),
    "no method of tensors": lambda: key("somebody_elses", x(), op="call_method"),
    "an object": lambda: key(torch.mul, x(), object()),
    "a real tensor": lambda: key(torch.mul, torch.empty(2), 1),
    "conjugated": lambda: key(torch.mul, fake(lambda: torch.empty(2, dtype=torch.complex64).conj()), 1),
    "sparse": lambda: key(torch.mul, fake(lambda: torch.empty(2, layout=torch.sparse_coo)), 1),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_all_told_has_no_key(name: str) -> None:
    with pytest.raises(Unknown):
        UNKNOWN[name]()


def test_an_op_of_a_library_has_no_key() -> None:
    with torch.library._scoped_library("test_fragment_keys", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        with pytest.raises(Unknown):
            key(torch.ops.test_fragment_keys.twice.default, x())
    assert key(torch.ops.aten.neg.default, x())


def _symbolic(*sizes: int) -> Tensor:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())
    found = mode.from_tensor(torch.empty(sizes), static_shapes=False)
    assert all(isinstance(size, torch.SymInt) for size in found.shape)
    return found


def test_symbolic_sizes_are_told_apart_by_their_expressions() -> None:
    a, b = _symbolic(5, 4).shape
    assert number(4) == 4
    assert number(a * 2) == number(2 * a)
    assert len({number(a), number(b), number(a * 2), number(a * b), 5, 10}) == 6


def test_a_symbol_that_is_replaced_later_is_another_number() -> None:
    x = _symbolic(5, 4)
    a, b = x.shape
    before = number(a), number(b)
    with x.fake_mode:  # type: ignore[attr-defined]
        assert a == 5
    assert number(a) != before[0]
    # What was learned of one symbol may decide about another.
    assert number(b) != before[1]


def test_a_symbol_of_an_op_has_no_key() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    made = ShapeEnv().create_unbacked_symint()
    with pytest.raises(Unknown):
        number(made)
    with pytest.raises(Unknown):
        number(made + 1)
    with pytest.raises(Unknown):
        key(torch.mul, x(), made)


def test_symbolic_tensors_and_numbers_have_keys() -> None:
    x = _symbolic(5, 4)
    assert key(torch.neg, x) == key(torch.neg, x)
    assert len({key(torch.mul, x, x.shape[0]), key(torch.mul, x, x.shape[1]), key(torch.mul, x, 5)}) == 3


def test_a_tensor_that_nothing_stands_for_has_no_key() -> None:
    graph = fx.Graph()
    node = graph.placeholder("x")
    with pytest.raises(Unknown):
        key_of(graph.call_function(torch.neg, (node,)), {node: x()}, NodeInputs(), lambda node, value: None)


def test_two_tensors_of_one_node_are_not_two_of_two() -> None:
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    call, env = graph.call_function(torch.add, (a, b)), {a: x(), b: x()}
    assert key_of(call, env, NodeInputs(), lambda node, value: a) != key_of(call, env, NodeInputs(), stands)


def test_a_tensor_with_known_numbers_has_no_key() -> None:
    """What is made of it may depend on them."""
    known = fake(lambda: torch.tensor(2.0))
    assert known.constant is not None
    with pytest.raises(Unknown):
        key(torch.neg, known)
