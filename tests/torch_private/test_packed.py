from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from attn_compiler.torch_private import compat as torch_compat, packed as torch_packed
from attn_compiler.torch_private.packed import Compilation, GuardedError


def mode() -> FakeTensorMode:
    return FakeTensorMode(shape_env=ShapeEnv())


def test_guards_of_an_own_size_are_taken_and_asked() -> None:
    of = mode()
    size = torch_packed.own_size(of, hint=101, most=500)
    assert bool(size > 50)
    assert len(of.shape_env.guards) == 1
    guards = torch_packed.taken_guards(size, [])
    assert of.shape_env.guards == []
    assert guards.hold(51, [])
    assert not guards.hold(50, [])


def test_a_size_that_is_fixed_serves_one_number() -> None:
    size = torch_packed.own_size(mode(), hint=101, most=500)
    assert bool(size == 101)
    guards = torch_packed.taken_guards(size, [])
    assert guards.hold(101, [])
    assert not guards.hold(102, [])


def test_guards_with_sizes_of_inputs_are_asked_of_the_inputs() -> None:
    of = mode()
    size, other = (torch_packed.own_size(of, hint=hint, most=None) for hint in (101, 200))
    assert bool(size < other)
    with of:
        given = torch.empty(3, other)
    guards = torch_packed.taken_guards(size, [7, given])
    assert guards.hold(5, [7, torch.empty(3, 6)])
    assert not guards.hold(6, [7, torch.empty(3, 6)])


def test_a_guard_of_what_is_no_input_is_an_error() -> None:
    of = mode()
    size, other = (torch_packed.own_size(of, hint=hint, most=None) for hint in (101, 200))
    assert bool(size < other)
    with pytest.raises(ValueError, match="asks for"):
        torch_packed.taken_guards(size, [])


def test_what_is_known_of_its_range_asks_nothing() -> None:
    of = mode()
    size = torch_packed.own_size(of, hint=101, most=500)
    assert bool(size >= 2)
    assert bool(size <= 500)
    assert of.shape_env.guards == []


def test_guards_of_a_graph_that_was_given_up_are_forgotten() -> None:
    of = mode()
    size = torch_packed.own_size(of, hint=101, most=500)
    with of:
        given = torch.empty(size)
    assert bool(size > 50)
    torch_packed.forget_guards([given])
    assert of.shape_env.guards == []


def test_a_copy_of_a_graph_shares_parameters_and_no_node() -> None:
    gm = fx.symbolic_trace(torch.nn.Linear(2, 2))
    twin = torch_packed.copied(gm)
    assert twin.weight is gm.weight
    assert not set(twin.graph.nodes) & set(gm.graph.nodes)


def test_a_copy_of_dynamos_graph_says_where_parameters_are_from() -> None:
    gm = fx.symbolic_trace(torch.nn.Linear(2, 2))
    gm._param_name_to_source = {"weight": ConstantSource("weight")}
    twin = torch_packed.copied(gm)
    torch_compat.add_buffer(twin, "kept", torch.zeros(1))
    assert set(twin._param_name_to_source) == {"weight", "kept"}
    assert set(gm._param_name_to_source) == {"weight"}


def test_outside_of_a_compilation_nothing_is_entered() -> None:
    with Compilation.now().again():
        pass
    assert issubclass(GuardedError, Exception)
