"""Models' modules are looked at when something is compiled for us, and for nobody else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx

from attn_compiler.compiling import linear_attention
from attn_compiler.compiling.backend import attn_compiler
from attn_compiler.passes.matching.linear import substitutes
from attn_compiler.torch_private import substitution


def _other(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    return gm.forward


def test_our_backend_takes_calls_and_others_do_not() -> None:
    assert substitution.are_taken_for(attn_compiler)
    assert not substitution.are_taken_for(_other)


@pytest.mark.parametrize("resets", [0, 1])
def test_modules_are_looked_at_when_ours_begins(monkeypatch: pytest.MonkeyPatch, resets: int) -> None:
    looked: list[int] = []
    monkeypatch.setattr(substitutes, "look", lambda: looked.append(1))
    for _ in range(resets):
        torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend=_other)(torch.ones(2))
    assert looked == []
    torch.compile(lambda x: x + 2, backend="attn_compiler", options={"inner": "eager"})(torch.ones(2))
    assert looked == [1]


def test_a_backend_is_told_of_once() -> None:
    linear_attention.watch(attn_compiler)
    before = list(substitution.callback_handler.start_callbacks)
    linear_attention.watch(attn_compiler)
    assert substitution.callback_handler.start_callbacks == before
