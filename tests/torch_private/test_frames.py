from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from attn_compiler import index_expr as ix
from attn_compiler.torch_private import frames as torch_frames, known_masks
from attn_compiler.torch_private.known_masks import Known


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Bare(nn.Module):
    """Its frame reads nothing of it."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2


@pytest.fixture
def compiled() -> list[bool]:
    """Of each graph that `backend` was given, whether it was whole."""
    torch._dynamo.reset()
    _WHOLE.clear()
    return _WHOLE


_WHOLE: list[bool] = []


def backend(gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
    torch_frames.guard_modules()
    _WHOLE.append(torch_frames.is_whole(gm))
    return gm.forward


X = torch.ones(4)


@pytest.mark.parametrize("cls", [Scaled, Bare])
def test_more_modules_of_a_class_than_a_frame_may_have_code_get_their_own(compiled: list[bool], cls: Any) -> None:
    modules = [cls() for _ in range(torch._dynamo.config.recompile_limit + 2)]
    for module in modules:
        module.compile(backend=backend)
    for _ in range(2):
        for module in modules:
            module(X)
    assert compiled == [True] * len(modules)


def test_modules_that_are_arguments_or_lie_in_them_are_told_apart(compiled: list[bool]) -> None:
    one, other = Scaled(), Scaled()
    step = torch.compile(lambda model, x: model(x), backend=backend)
    first = torch.compile(lambda models, x: models[0](x), backend=backend)
    for model in (one, one, other, other):
        step(model, X)
        first([model], X)
    assert len(compiled) == 4


def test_parameters_may_change_and_functions_have_nothing_to_tell_apart(compiled: list[bool]) -> None:
    module = Scaled()
    function, double = torch.compile(module, backend=backend), torch.compile(lambda x: x * 2, backend=backend)
    for _ in range(2):
        function(X)
        double(X)
        module.scale = nn.Parameter(module.scale + 1)
    assert len(compiled) == 2


def test_both_sides_of_a_break_are_parts(compiled: list[bool]) -> None:
    torch.compile(Broken(), backend=backend)(X)
    assert compiled == [False, False]


def test_outside_of_a_compilation_nothing_happens() -> None:
    torch_frames.guard_modules()
    assert torch_frames.is_whole(fx.symbolic_trace(Scaled()))


# ---- what a node belongs to -----------------------------------------------------------------------------------------


_OWNERS: list[Any] = []


def noting(gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
    """Notes what the additions and multiplications of a graph belong to."""
    nodes = (node for node in gm.graph.nodes if node.op == "call_function")
    _OWNERS.extend(torch_frames.owner_of(node.meta.get("nn_module_stack")) for node in nodes)
    return gm.forward


class Nest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Scaled(), Scaled()])
        self.named = nn.ModuleDict({"one": Scaled()})
        self.hidden = [Scaled()]

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, self.named["one"], *self.hidden, self.layers[0]):
            x = layer(x)
        return x


@pytest.fixture
def owners() -> list[Any]:
    torch._dynamo.reset()
    _OWNERS.clear()
    return _OWNERS


def parts(nest: Nest) -> list[nn.Module]:
    return [*nest.layers, nest.named["one"], *nest.hidden, nest.layers[0]]


NEST = Nest()


@pytest.mark.parametrize(
    "compile_it",
    [
        lambda nest: torch.compile(nest, backend=noting)(X),
        lambda nest: torch.compile(lambda model, x: model(x), backend=noting)(nest, X),
        lambda nest: torch.compile(lambda models, x: models["a"](x), backend=noting)({"a": nest}, X),
        lambda nest: torch.compile(lambda x: nest(x), backend=noting)(X),
    ],
    ids=["module", "argument", "in an argument", "closure"],
)
def test_a_node_belongs_to_its_own_module(owners: list[Any], compile_it: Any) -> None:
    nest = Nest()
    compile_it(nest)
    assert [id(owner) for owner in owners] == [id(part) for part in parts(nest)]


def test_a_node_belongs_to_its_own_module_of_a_global_one(owners: list[Any]) -> None:
    torch.compile(lambda x: NEST(x), backend=noting)(X)
    assert [id(owner) for owner in owners] == [id(part) for part in parts(NEST)]


def test_a_node_of_the_frame_itself_belongs_to_its_module_or_its_code(owners: list[Any]) -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2

    scaled = Scaled()
    torch.compile(scaled, backend=noting)(X)
    torch.compile(double, backend=noting)(X)
    assert owners == [scaled, double.__code__]


def test_where_it_can_not_be_told_nothing_is_said(owners: list[Any]) -> None:
    one, other = Scaled(), Scaled()
    torch.compile(lambda a, b, x: x * a.scale, backend=noting)(one, other, X)
    assert owners == [None]
    assert torch_frames.owner_of({"0": ("L['self'].layers.0", Scaled)}) is None


def test_a_path_that_names_nothing_belongs_to_nothing(owners: list[Any]) -> None:
    found: list[Any] = []

    def ask(gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        paths = ("L['self'].gone", "L['gone']", "L['self'].scale", "L['self'](odd)", "X['self']", "L['self'][0]")
        found.extend(torch_frames.owner_of({"1": (path, Scaled)}) for path in paths)
        found.append(torch_frames.owner_of({"key": ("L['self']", Scaled)}))
        return gm.forward

    module = Scaled()
    torch.compile(module, backend=ask)(X)
    assert found == [None] * 6 + [module]


def test_what_is_kept_for_a_compilation_is_new_in_the_next_and_outside() -> None:
    found: list[list[int]] = []

    def ask(gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        found.append(torch_frames.once_per_compilation(list))
        assert torch_frames.once_per_compilation(list) is found[-1]
        return gm.forward

    torch.compile(lambda x: x + 1, backend=ask)(X)
    torch.compile(lambda x: x + 2, backend=ask)(X)
    assert found[0] is not found[1]
    assert torch_frames.once_per_compilation(list) is not torch_frames.once_per_compilation(list)


def test_a_guard_on_what_is_known_lets_no_other_tensor_through() -> None:
    known = Known(element=ix.TRUE, dims=1)
    given: list[Tensor | None] = []

    def ask(gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        (placeholder,) = gm.graph.find_nodes(op="placeholder")
        given.append(torch_frames.given_tensor(placeholder))
        if known_masks.recall(given[-1]) is not None:
            torch_frames.guard_known(placeholder, known)
        return gm.forward

    function = torch.compile(lambda x: x * 3, backend=ask)
    first, second, other = (torch.ones(4) for _ in range(3))
    known_masks.remember(first, known)
    known_masks.remember(second, known)
    for x in (first, second, first):
        function(x)
    assert [x is first for x in given] == [True]
    function(other)
    assert [x is other for x in given] == [False, True]


def test_a_node_that_is_no_input_stands_for_no_tensor() -> None:
    assert torch_frames.given_tensor(fx.Graph().placeholder("x")) is None


def test_what_a_frame_hands_on_is_told_by_its_names() -> None:
    found: list[bool] = []

    def backend(gm: fx.GraphModule, _: object) -> Any:
        found.append(torch_frames.was_given("read_index", "write_index"))
        return gm.forward

    def function(x: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        return x + sum(kwargs.values())

    x = torch.ones(2)
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend)
    compiled(x, read_index=x, write_index=x, other=x)
    compiled(x, read_index=x)
    assert found == [True, False]
    assert not torch_frames.was_given("read_index")
