"""Models' modules are looked at when something is compiled for us, and for nobody else."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx

from attn_compiler.compiling import linear_attention
from attn_compiler.compiling.backend import attn_compiler
from attn_compiler.passes.matching.linear import looking
from attn_compiler.reasons.errors import AttnCompilerWarning
from attn_compiler.torch_private import substitution


def _other(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    return gm.forward


def test_our_backend_takes_calls_and_others_do_not() -> None:
    assert substitution.are_taken_for(attn_compiler)
    assert not substitution.are_taken_for(_other)


@pytest.mark.parametrize("resets", [0, 1])
def test_modules_are_looked_at_when_ours_begins(monkeypatch: pytest.MonkeyPatch, resets: int) -> None:
    looked: list[int] = []
    monkeypatch.setattr(looking, "new_functions", lambda: looked.append(1) or ())
    for _ in range(resets):
        torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend=_other)(torch.ones(2))
    assert looked == []
    torch.compile(lambda x: x + 2, backend="attn_compiler", options={"inner": "eager"})(torch.ones(2))
    assert looked == [1]


def test_what_fails_in_looking_costs_no_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(looking, "new_functions", fail)
    with pytest.warns(AttnCompilerWarning, match="planted"):
        out = torch.compile(lambda x: x + 3, backend="attn_compiler", options={"inner": "eager"})(torch.ones(2))
    assert out.tolist() == [4.0, 4.0]


def test_functions_that_wrap_themselves_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def around(query: Any, key: Any, value: Any, g: Any, beta: Any) -> Any:
        return query

    around.__wrapped__ = around  # type: ignore[attr-defined]
    around.__module__ = "a_module_of_a_model"
    module = types.ModuleType("a_module_of_a_model")
    module.around = around  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(looking, "_SEEN", set())
    assert around not in list(looking.new_functions())
    assert list(looking.innermost(around)) == []


def test_a_backend_is_told_of_once() -> None:
    linear_attention.watch(attn_compiler)
    before = list(substitution.callback_handler.start_callbacks)
    linear_attention.watch(attn_compiler)
    assert substitution.callback_handler.start_callbacks == before
