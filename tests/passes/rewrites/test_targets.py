from __future__ import annotations

import functools
import operator
import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from attn_compiler.lowerings import LOWERINGS  # noqa: F401 (defines our ops)
from attn_compiler.passes.rewrites import targets
from attn_compiler.passes.rewrites.refusing import Unkeyed

aten = torch.ops.aten
FUNCTIONS: list[Any] = [
    *(torch.matmul, torch.softmax, F.softmax, aten.softmax, aten.softmax.int, aten._softmax.default),
    *(operator.add, operator.iadd, operator.getitem, torch.add, aten.add.Tensor, aten.add.Scalar),
    *(F.scaled_dot_product_attention, torch.Tensor.to, torch.Tensor.contiguous, torch._C._set_grad_enabled),
    *(torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast),
    *(torch.ops.attn_compiler.held.default, torch.ops.higher_order.tag_activation_checkpoint, getattr),
]


def _node(target: Any, op: str = "call_function") -> fx.Node:
    return fx.Graph().create_node(op, target)


def test_every_function_has_a_name_of_its_own() -> None:
    assert len({targets.name_of(_node(function)) for function in FUNCTIONS}) == len(FUNCTIONS)


def test_names_of_what_records_may_have_lead_back() -> None:
    mine = [
        *(torch.matmul, torch.softmax, F.softmax, aten._softmax.default, aten.add.Tensor, operator.mul, torch.where),
        *(F.scaled_dot_product_attention, torch.Tensor.contiguous, torch.ops.attn_compiler.held.default),
        *(torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast, torch._C._set_grad_enabled),
    ]
    for function in mine:
        assert targets.resolved("call_function", targets.name_of(_node(function))) is function
    assert targets.resolved("call_method", targets.name_of(_node("transpose", "call_method"))) == "transpose"


def test_functions_that_pybind_made_go_by_the_room_that_they_are_in() -> None:
    """PyTorch 2.11's name for their module is of the compiler that built it."""
    names = [targets.name_of(_node(f)) for f in (torch._C._log_api_usage_once, torch._C._functorch.is_batchedtensor)]
    assert names == ["function:torch._C._log_api_usage_once", "function:torch._C._functorch.is_batchedtensor"]


def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_pytorchs_own_functions_and_methods_are_known_for_such() -> None:
    for function in torch.overrides.get_testing_overrides():
        for room in (torch, F):
            if getattr(room, function.__name__, None) is function:
                assert targets.name_of(_node(function))
    for name in dir(Tensor):
        assert targets.name_of(_node(name, "call_method")) == name


def test_functions_that_took_the_place_of_pytorchs_have_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    @functools.wraps(F.silu)
    def silu(x: Tensor, inplace: bool = False) -> Tensor:
        return x

    for instead in (silu, torch.no_grad()(silu)):
        monkeypatch.setattr(F, "silu", instead)
        with pytest.raises(Unkeyed, match=r"torch\.nn\.functional\.silu is not PyTorch's own function any more"):
            targets.name_of(_node(F.silu))
        monkeypatch.setattr(Tensor, "cos", instead)
        with pytest.raises(Unkeyed, match=r"torch\.Tensor\.cos is not"):
            targets.name_of(_node("cos", "call_method"))


@pytest.mark.parametrize("place", ["torch.matmul", "torch.nn.functional.softmax", "torch.Tensor.__matmul__"])
def test_whether_somebody_took_the_place_of_a_function_is_seen(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    targets.require_untouched()
    monkeypatch.setattr(place, lambda *_: None)
    with pytest.raises(Unkeyed, match=f"{place} is not PyTorch's own function any more"):
        targets.require_untouched()


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (twice, "twice is no function of PyTorch's"),
        (lambda x: x, "is no function of PyTorch's"),
        (os.system, "system is no function of PyTorch's"),
        (torch.ops.higher_order.triton_kernel_wrapper_mutation, "may stand for something else"),
    ],
    ids=["a user's", "a lambda", "Python's", "Triton's"],
)
def test_what_may_be_something_else_tomorrow_has_no_name(target: Any, said: str) -> None:
    with pytest.raises(Unkeyed, match=said):
        targets.name_of(_node(target))


def test_a_function_in_the_place_of_pytorchs_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's patch of PyTorch, which another process may not have."""
    patched = lambda *args: None  # noqa: E731
    patched.__module__, patched.__qualname__, patched.__name__ = "torch.nn.functional", "silu", "silu"
    with pytest.raises(Unkeyed):
        targets.name_of(_node(patched))


def test_modules_have_no_name() -> None:
    with pytest.raises(Unkeyed, match="calls a module"):
        targets.name_of(_node("layer", "call_module"))


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("call_function", "function:os.system"),
        ("call_function", "function:builtins.eval"),
        ("call_function", "function:builtins.getattr"),
        ("call_function", "function:torch.load"),
        ("call_function", "function:torch.hub.load"),
        ("call_function", "function:torch._C._jit_init"),
        ("call_function", "function:torch.nn.functional.boolean_dispatch"),
        ("call_function", "op:mylib.steal.default"),
        ("call_function", "op:aten.nothing.default"),
        ("call_function", ""),
        ("call_method", "__reduce__"),
        ("call_method", "_typed_storage"),
        ("call_module", "layer"),
        ("get_attr", "weight"),
        ("placeholder", "x, y"),
    ],
)
def test_a_record_names_nothing_else(op: str, name: str) -> None:
    with pytest.raises(Unkeyed, match="a record may not have"):
        targets.resolved(op, name)
