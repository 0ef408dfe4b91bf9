from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.passes.recovering.reading.evaluating import evaluated, joined

Tensor = torch.Tensor
S, KEYS = 5, 7
q_rows, k_columns = (lambda n=S: torch.arange(n)[:, None]), (lambda n=KEYS: torch.arange(n)[None, :])

POSITIONS: dict[str, Callable[[], Tensor]] = {
    "cumulative": lambda: torch.ones(KEYS, dtype=torch.int64).cumsum(0)[None, :] <= q_rows(),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_what_only_positions_say_is_read_in_full(name: str) -> None:
    reading = evaluated(lambda x: joined(POSITIONS[name](), x), torch.zeros(()))
    assert reading.equal, reading.text
    assert reading.loads <= {"x"}, reading.text


LOADS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "running count": (lambda t: (t != 0).cumsum(-1), (torch.tensor([[1, 0, 1], [1, 1, 0]]),)),
    "starts of documents": (
        lambda t: torch.diff(t, prepend=t[:, :1], dim=-1) != 0,
        (torch.tensor([[0, 0, 1, 2], [0, 1, 1, 1]]),),
    ),
}


@pytest.mark.parametrize("name", LOADS)
def test_what_a_tensor_says_is_a_load(name: str) -> None:
    function, inputs = LOADS[name]
    reading = evaluated(function, *inputs)
    assert reading.equal, reading.text
    assert reading.loads


def test_a_difference_of_positions_is_read_in_full() -> None:
    reading = evaluated(lambda x: joined(torch.diff(torch.arange(KEYS) * 3)[None, :] + q_rows(), x), torch.zeros(()))
    assert reading.equal, reading.text
    assert "3" in reading.text
    assert reading.loads <= {"x"}


#: what runs along an axis in another way than is understood: one tensor
WHOLE: dict[str, Callable[[Tensor], Tensor]] = {
    "a difference of differences": lambda t: torch.diff(t, n=2),
    "appended to": lambda t: torch.diff(t, append=t[:, :1]),
    "prepended with several": lambda t: torch.diff(t, prepend=t[:, :2]),
    "bytes that wrap": lambda t: torch.diff(t.to(torch.uint8)),
    "a sum of what is not constant": lambda t: t.cumsum(0),
    "a sum that wraps": lambda t: torch.full_like(t, 100).cumsum(1, dtype=torch.int8),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_not_understood_is_one_tensor(name: str) -> None:
    reading = evaluated(lambda t: WHOLE[name](t) + 0, torch.tensor([[3, 1, 0, 2], [0, 5, 1, 1]]))
    assert reading.equal, reading.text
    assert reading.loads
