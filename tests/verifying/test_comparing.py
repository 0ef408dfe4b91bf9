from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from attn_compiler.verifying import comparing
from attn_compiler.verifying.comparing import NOISY_RUNS, Difference, Outcome, Rule
from attn_compiler.verifying.numbers import Noise

Tensor = torch.Tensor


@dataclass
class Runs:
    """exactly: what the exact run gives. noises: what is added to it, by seed; the last one for all that follow."""

    exactly: Sequence[Tensor | None]
    noises: Sequence[float] = (0.0,)
    asked: list[int | None] = field(default_factory=list)

    def __call__(self, noise: Noise | None) -> Sequence[Tensor | None]:
        self.asked.append(None if noise is None else noise.seed)
        off = 0.0 if noise is None else self.noises[min(noise.seed, len(self.noises) - 1)]
        return [None if x is None else x + off if noise is not None else x for x in self.exactly]


def compare(
    new: Tensor | None, own: Tensor | None, exact: Tensor | None = None, *noises: float
) -> tuple[Outcome, Runs]:
    runs = Runs([own if exact is None else exact], noises or (0.0,))
    return comparing.compare([new], [own], runs, Rule()), runs


ONES = torch.ones(4)


def test_rounding_needs_no_other_run() -> None:
    outcome, runs = compare(ONES + 1e-6, ONES)
    assert outcome.differences == []
    assert runs.asked == []
    assert outcome.compared.elements == 4
    assert 0 < outcome.compared.error <= outcome.compared.allowed


def test_twice_the_models_own_error() -> None:
    exact = ONES.double()
    outcome, runs = compare(ONES - 1.9e-3, ONES + 1e-3, exact)
    assert outcome.differences == []
    assert runs.asked == [None]
    outcome, runs = compare(ONES - 2.1e-3, ONES + 1e-3, exact)
    assert len(outcome.differences) == 1
    assert runs.asked == [None, *range(NOISY_RUNS)]


def test_noise_tells_of_what_cancels_out() -> None:
    """A sum that is exactly 0: neither its size nor the model's own error says how far it may be off."""
    zeros = torch.zeros(4)
    outcome, runs = compare(zeros + 1e-5, zeros, zeros.double(), 0.0, 2e-5)
    assert outcome.differences == []
    assert runs.asked == [None, 0, 1]
    outcome, _ = compare(zeros + 1e-5, zeros, zeros.double(), 4e-6)
    assert len(outcome.differences) == 1


def test_what_is_exactly_zero_may_be_off_by_the_rounding_of_the_others() -> None:
    """The gradient of a single key's scores is zero in every run of the model's own, whatever the noise."""

    def differences(off: float) -> list[Difference]:
        zeros = torch.zeros(4)
        return comparing.compare([zeros + off, ONES], [zeros, ONES], Runs([zeros, ONES]), Rule()).differences

    assert differences(4e-7) == []
    assert [d.index for d in differences(1e-4)] == [0]


def test_a_difference_says_where_and_what() -> None:
    new = torch.tensor([[1.0, 1.0], [1.5, 1.1]])
    outcome, _ = compare(new, torch.ones(2, 2))
    (difference,) = outcome.differences
    assert difference.place == (1, 0)
    assert (difference.expected, difference.observed) == ("1 (exactly 1)", "1.5")
    assert difference.differing == "2 of 4 elements"


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_differs(value: float) -> None:
    outcome, _ = compare(torch.tensor([value, 1.0]), torch.ones(2))
    assert outcome.differences[0].place == (0,)


def test_what_overflows_in_the_model_itself_is_left_out() -> None:
    own = torch.tensor([torch.inf, 1.0])
    assert compare(torch.tensor([3.0, 1.0]), own, torch.tensor([5.0, 1.0]).double())[0].differences == []
    assert compare(torch.tensor([3.0, 2.0]), own, torch.tensor([5.0, 1.0]).double())[0].differences[0].place == (1,)


def test_none_is_zeros() -> None:
    assert compare(None, torch.zeros(3))[0].differences == []
    assert compare(torch.zeros(3), None)[0].differences == []
    assert compare(None, None)[0].compared.elements == 0
    assert compare(None, torch.ones(3))[0].differences[0].observed == "0"
    assert compare(torch.ones(3), None)[0].differences[0].expected == "0 (exactly 0)"


def test_another_shape_or_dtype_differs() -> None:
    expected = Difference(
        index=0,
        place=(),
        expected="torch.float32 [4]",
        observed="torch.float64 [4]",
        allowed="no difference",
        differing="all elements",
    )
    assert compare(ONES.double(), ONES)[0].differences == [expected]
    assert compare(torch.ones(5), ONES)[0].differences[0].observed == "torch.float32 [5]"


def test_whole_numbers_are_equal_where_no_rounding_decides() -> None:
    own = torch.tensor([1, 2, 3])
    runs = Runs([own])
    assert comparing.compare([own.clone()], [own], runs, Rule()).differences == []
    assert runs.asked == []
    wrong = torch.tensor([1, 2, 4])
    assert comparing.compare([wrong], [own], Runs([own]), Rule()).differences[0].place == (2,)
    # The exact run decides the last one otherwise.
    assert comparing.compare([wrong], [own], Runs([torch.tensor([1, 2, 9])]), Rule()).differences == []
    moved = torch.tensor([7, 2, 4])
    assert comparing.compare([moved], [own], Runs([torch.tensor([1, 2, 9])]), Rule()).differences[0].place == (0,)


def test_truth_values_and_complex_numbers() -> None:
    yes = torch.tensor([True, False])
    assert compare(yes.clone(), yes)[0].differences == []
    assert compare(~yes, yes)[0].differences
    x = torch.view_as_complex(torch.ones(3, 2))
    assert compare(x.clone(), x)[0].differences == []
    assert compare(x * 1.1, x)[0].differences[0].place == (0, 0)


def test_the_worst_of_several() -> None:
    outcome = comparing.compare([ONES + 1e-6, ONES + 1.2e-6, 3], [ONES, ONES, 3], Runs([]), Rule())
    error, allowed = outcome.compared.error, outcome.compared.allowed
    assert abs(error - 1.2e-6) < 1e-7
    assert error <= allowed
    assert outcome.compared.elements == 8


def test_nothing_to_compare() -> None:
    outcome = comparing.compare([3, None, torch.ones(0)], [4, None, torch.ones(0)], Runs([]), Rule())
    assert outcome.differences == []
    assert (outcome.compared.error, outcome.compared.allowed) == (0.0, 0.0)


def test_what_cancels_out_is_a_rounding_of_what_it_is_made_of() -> None:
    """All results are zero, so that only the gradients that came in tell how large the summands were."""
    zeros, runs = torch.zeros(4), Runs([torch.zeros(4).double()])
    alone = comparing.compare([zeros + 9e-8], [zeros], runs, Rule())
    assert len(alone.differences) == 1
    beside = comparing.compare([zeros + 9e-8], [zeros], runs, Rule(beside=[ONES]))
    assert beside.differences == []
    too_large = comparing.compare([zeros + 1e-3], [zeros], runs, Rule(beside=[ONES]))
    assert len(too_large.differences) == 1
