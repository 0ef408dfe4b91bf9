from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.passes.recovering.reading.evaluating import evaluated, joined

Tensor = torch.Tensor
S, KEYS = 5, 7
LOWEST = torch.finfo(torch.float32).min
q_rows, k_columns = (lambda n=S: torch.arange(n)[:, None]), (lambda n=KEYS: torch.arange(n)[None, :])

POSITIONS: dict[str, Callable[[], Tensor]] = {
    "arange of a step": lambda: torch.arange(0, 2 * KEYS, 2)[None, :] <= torch.arange(3, S + 3)[:, None],
    "cast around": lambda: (k_columns() <= q_rows()).float().to(torch.int64).bool(),
    "a constant": lambda: torch.full((S, KEYS), 3.5),
    "like another": lambda: torch.zeros_like(torch.ones(S, KEYS)).masked_fill(k_columns() >= 3, LOWEST),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_what_only_positions_say_is_read_in_full(name: str) -> None:
    reading = evaluated(lambda x: joined(POSITIONS[name](), x), torch.zeros(()))
    assert reading.equal, reading.text
    assert reading.loads <= {"x"}, reading.text


@pytest.mark.parametrize(
    "make",
    [
        lambda: (torch.arange(300)[:S, None] * 100).to(torch.uint8) <= torch.arange(S),
        lambda: torch.full((S, S), LOWEST) * 2 > torch.arange(S),
    ],
    ids=["out of uint8's range", "out of float32's range"],
)
def test_numbers_that_a_dtype_does_not_hold_are_never_misread(make: Callable[[], Tensor]) -> None:
    """Wrapping and overflow: either read right, or not looked into."""
    reading = evaluated(lambda x: joined(make(), x), torch.zeros(()))
    assert reading.equal, reading.text
