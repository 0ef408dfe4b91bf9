from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attn_compiler.passes.recovering.reading import Unreadable, core
from attn_compiler.passes.recovering.reading.budget import Budget
from tests.passes.recovering.reading.evaluating import evaluated, joined

B, S = 2, 5


@pytest.mark.parametrize("length", [4, 6])
def test_symbolic_sizes_are_read_as_sizes(length: int) -> None:
    def function(x: Tensor) -> Tensor:
        n = x.size(1)
        return (torch.arange(n)[None, :] <= torch.arange(n)[:, None]) & (torch.arange(n) < n - 1) & (x[0] == 0)

    reading = evaluated(function, torch.zeros(B, length), dynamic_sizes=(length,))
    assert reading.equal, reading.text


@pytest.mark.parametrize("length", [3, 6])
def test_the_larger_of_two_sizes_isevaluated(length: int) -> None:
    """The first position that a cache of a sliding window still holds."""

    def function(x: Tensor) -> Tensor:
        first = torch.sym_max(x.size(1) - 4, 0)
        return (torch.arange(5) + first)[None, :] <= torch.arange(S)[:, None]

    reading = evaluated(lambda x: joined(function(x), x[0, 0]), torch.zeros(B, length), dynamic_sizes=(length,))
    assert reading.equal, reading.text
    assert "max(0, " in reading.text


def test_a_tensor_that_is_written_in_part_is_read_as_it_then_is() -> None:
    def function(x: Tensor) -> Tensor:
        mask = torch.zeros(S, S)
        mask[1:] = x
        now = mask + 0.0
        mask[2:] = x + 1
        return torch.where(mask > now, mask, now - 3.0)

    reading = evaluated(function, torch.ones(()))
    assert reading.equal, reading.text
    assert reading.loads == {"x"}, reading.text


def test_a_tensor_that_is_written_in_an_unknown_way_is_loaded_as_it_then_is() -> None:
    def function(x: Tensor) -> Tensor:
        mask = torch.zeros(S, S)
        mask.index_copy_(0, torch.tensor([1, 2]), x.expand(2, S))
        now = mask + 0.0
        mask.diagonal().fill_(3.0)
        return torch.where(mask > now, mask, now - 3.0)

    reading = evaluated(function, torch.ones(()))
    assert reading.equal, reading.text
    assert len(reading.loads) == 2, reading.text


@pytest.mark.parametrize("shape", [(), (1,), (S, 1), (1, S), (1, 1, S, S)])
def test_operands_that_broadcast_are_read_where_they_have_elements(shape: tuple[int, ...]) -> None:
    x = torch.arange(torch.Size(shape).numel()).reshape(shape)
    reading = evaluated(lambda x: x + torch.arange(S)[:, None] * 10 + torch.arange(S), x)
    assert reading.equal, reading.text
    assert reading.loads == {"x"}


def test_an_op_without_a_rule_is_a_load_of_its_result() -> None:
    reading = evaluated(lambda x: x.sin() + x.cos(), torch.randn(S))
    assert reading.equal, reading.text
    assert reading.text == "(sin[k] + cos[k])"


def test_a_chain_that_is_too_long_is_unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core.Budget, "of_graph", lambda ops: Budget(steps=1000, in_a_row=10))

    def function(x: Tensor) -> Tensor:
        for _ in range(10):
            x = x + 1
        return x

    with pytest.raises(Unreadable, match="in a row"):
        evaluated(function, torch.randn(S))
