from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from attn_compiler import torch_frames


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
