from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import pytest
import torch

from attn_compiler.passes.unpad import batches_before
from attn_compiler.passes.unpad.batches_before import BatchesBefore
from attn_compiler.reporting.facts import MUCH_PADDING, Steps, UnpaddedStep

POSITIONS = 100


class Late:
    """Numbers that come when a test says so."""

    def __init__(self, told: torch.Tensor) -> None:
        self.told = told
        self.has_come = False

    def are_there(self) -> bool:
        return self.has_come

    def numbers(self) -> list[int]:
        assert self.has_come
        found: list[int] = self.told.tolist()
        return found


def read(numbers: Sequence[int], positions: int) -> UnpaddedStep:
    number, holds = numbers
    return UnpaddedStep(number=number, positions=positions, failed=() if holds else ("a fact",))


class Batches:
    """sent: numbers under way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[Late] = []
        self.steps = Steps()
        self.before = BatchesBefore(steps=self.steps, read=read, are_awaited=True)
        monkeypatch.setattr(batches_before, "Arriving", self.send)

    def send(self, told: torch.Tensor) -> Late:
        self.sent.append(Late(told))
        return self.sent[-1]

    def call(self, number: int, holds: int = 1) -> str:
        """As `Unpadded` does."""
        told = torch.tensor([number, holds])
        if self.before.are_better_padded():
            if not self.before.are_enough_under_way:
                self.before.send(told, POSITIONS)
            return "padded"
        self.before.add(read(told.tolist(), POSITIONS))
        return "asked"


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Batches:
    return Batches(monkeypatch)


def test_two_nearly_full_batches_tell_of_the_next(batches: Batches) -> None:
    assert [batches.call(n) for n in (100, 85, 50, 30)] == ["asked", "asked", "padded", "padded"]
    assert [late.told.tolist() for late in batches.sent] == [[50, 1], [30, 1]]


def test_one_full_batch_tells_nothing(batches: Batches) -> None:
    assert [batches.call(n) for n in (100, 84, 100, 84, 100)] == ["asked"] * 5
    assert batches.sent == []


def test_what_comes_in_later_ends_it(batches: Batches) -> None:
    for number in (100, 100, 50, 50):
        batches.call(number)
    # In their order: the second came, and nobody reads it before the first.
    batches.sent[1].has_come = True
    assert batches.call(50) == "padded"
    batches.sent[0].has_come = True
    assert batches.call(50) == "asked"
    assert [step.fill for step in batches.steps.last] == [1.0, 1.0, 0.5, 0.5, 0.5]
    assert [step.failed for step in batches.steps.last] == [(), (), (MUCH_PADDING,), (MUCH_PADDING,), ()]


def test_a_fact_that_fails_tells_of_the_next_batch_too(batches: Batches) -> None:
    assert [batches.call(50, holds=0) for _ in range(3)] == ["asked", "asked", "padded"]
    batches.sent[0].has_come = True
    assert batches.call(50) == "padded"
    batches.sent[1].has_come = True
    assert batches.call(50) == "asked"


def test_so_many_are_under_way_and_no_more(batches: Batches) -> None:
    for _ in range(40):
        batches.call(100)
    assert len(batches.sent) == 16
    for late in batches.sent:
        late.has_come = True
    batches.call(100)
    assert len(batches.sent) == 17


def test_batches_that_ran_padded_unasked_are_not_never_packed(batches: Batches) -> None:
    """Asking costs no wait then, so each call is asked."""
    for _ in range(40):
        batches.call(50, holds=0)
        for late in batches.sent:
            late.has_come = True
    assert len(batches.steps.last) == 16
    assert not batches.steps.are_all_padded


def test_where_nobody_waits_each_batch_tells_of_itself() -> None:
    before = BatchesBefore(steps=Steps(), read=read)
    for _ in range(4):
        assert not before.are_better_padded()
        before.add(read([100, 1], POSITIONS))


def test_nothing_goes_by_when_numbers_come_where_runs_are_to_be_the_same(batches: Batches) -> None:
    with deterministic_algorithms():
        assert [batches.call(100) for _ in range(4)] == ["asked"] * 4
    assert batches.call(100) == "padded"


@contextlib.contextmanager
def deterministic_algorithms() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
def test_numbers_come_from_a_gpu() -> None:
    told = torch.tensor([7, 1], device="cuda")
    late = batches_before.Arriving(told)
    torch.cuda.synchronize()
    assert late.are_there()
    assert late.numbers() == [7, 1]
