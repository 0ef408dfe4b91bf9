"""Sizes and numbers that are symbolic while compiling: what is taken of them a guard holds, and a call beyond it compiles anew."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import attn_compiler
from attn_compiler.passes.recovering.reading import core
from tests.near_miss.checking import normal

Attention = Callable[..., Tensor]


def attention(q: Tensor, mask: Tensor) -> Tensor:
    return (q @ q.mT).masked_fill(~mask, float("-inf")).softmax(-1) @ q


def compiled(function: Attention) -> Attention:
    torch._dynamo.reset()
    attn_compiler.reset()
    options = {"inner": "eager", "strict": True, "verify": True}
    return torch.compile(function, backend="attn_compiler", dynamic=True, options=options)  # type: ignore[no-any-return]


def words() -> list[str]:
    """Of the mask, for each compilation."""
    return [report.sites[0].spec.mask.words for report in attn_compiler.reports()]


def same(function: Attention, found: Attention, length: int, *more: int) -> None:
    q = normal(1, 2, length, 8)
    torch.testing.assert_close(found(q, *more), function(q, *more), atol=1e-5, rtol=0)


def causal_of(dtype: torch.dtype) -> Attention:
    def function(q: Tensor) -> Tensor:
        place = torch.arange(q.shape[2], dtype=dtype)
        return attention(q, place[None, :] - place[:, None] <= 0)

    return function


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_one_graph_serves_all_sizes(dtype: torch.dtype) -> None:
    function = causal_of(dtype)
    found = compiled(function)
    for length in (6, 9, 40):
        same(function, found, length)
    assert words() == ["causal (proved)"]


def test_a_longer_sequence_than_was_taken_compiles_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond it, positions may be as many as there is memory for: that fits 64 bits, and not 32."""
    monkeypatch.setattr(core, "LONGEST", 8)
    for dtype, beyond in ((torch.int64, "causal (proved)"), (torch.int32, "dense bool[1, 1, s")):
        function = causal_of(dtype)
        found = compiled(function)
        for length in (6, 7, 8):
            same(function, found, length)
        assert words() == ["causal (proved)"]
        for length in (9, 12):
            same(function, found, length)
        assert len(words()) == 2
        assert words()[1].startswith(beyond)


def test_positions_of_a_symbolic_size_times_what_makes_them_wrap() -> None:
    def function(q: Tensor) -> Tensor:
        place = torch.arange(q.shape[2], dtype=torch.int32) * 1000
        return attention(q, place[None, :] - place[:, None] <= 0)

    same(function, compiled(function), 6)
    assert words()[0].startswith("dense bool")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_positions_of_a_symbolic_size_are_rounded_in_half_precision(dtype: torch.dtype) -> None:
    def function(q: Tensor) -> Tensor:
        place = torch.arange(q.shape[2]).to(dtype)
        return attention(q, place[None, :] <= place[:, None])

    same(function, compiled(function), 300)
    assert words()[0].startswith("((getitem_4[0, k] = getitem_5[q, 0])")


def test_a_number_that_the_model_is_called_with_may_be_negative() -> None:
    def function(q: Tensor, shift: int) -> Tensor:
        keys = torch.arange(q.shape[2])[None, :]
        return attention(q, (keys + shift >= 0) | (keys <= keys.mT))

    found = compiled(function)
    same(function, found, 6, -3)
    same(function, found, 6, -4)
    assert len(words()) == 1
    same(function, found, 6, 3)
    assert words()[1] == "none"


def test_a_positive_number_that_becomes_negative_compiles_anew() -> None:
    def function(q: Tensor, shift: int) -> Tensor:
        keys = torch.arange(q.shape[2])[None, :]
        return attention(q, (keys <= keys.mT + shift) | (keys == 0))

    found = compiled(function)
    same(function, found, 6, 2)
    same(function, found, 6, 3)
    assert len(words()) == 1
    same(function, found, 6, 300)
    assert len(words()) == 1
    same(function, found, 6, -1)
    assert len(words()) == 2
