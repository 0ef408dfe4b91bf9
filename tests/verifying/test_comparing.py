from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from attn_compiler.reasons.errors import VerificationMismatch
from attn_compiler.verifying import comparing
from attn_compiler.verifying.comparing import NOISY_RUNS, Compared, Rule, Words
from attn_compiler.verifying.numbers import Noise

Tensor = torch.Tensor
ONES, ZEROS = torch.ones(4), torch.zeros(4)
WORDS = Words(names=lambda: ["first", "second"], site="layer", formula="k <= q")


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


def holds(new: Sequence[Any], own: Sequence[Any], runs: Runs, rule: Rule | None = None) -> Compared:
    return comparing.compare(new, own, runs, rule or Rule(), WORDS)


def differs(new: Sequence[Any], own: Sequence[Any], runs: Runs, rule: Rule | None = None) -> VerificationMismatch:
    with pytest.raises(VerificationMismatch) as caught:
        holds(new, own, runs, rule)
    return caught.value


def test_rounding_needs_no_other_run() -> None:
    runs = Runs([ONES])
    compared = holds([ONES + 1e-6], [ONES], runs)
    assert runs.asked == []
    assert compared.elements == 4
    assert compared.error is not None
    assert compared.allowed is not None
    assert 0 < compared.error <= compared.allowed


def test_twice_the_models_own_error() -> None:
    runs = Runs([ONES.double()])
    holds([ONES - 1.9e-3], [ONES + 1e-3], runs)
    assert runs.asked == [None]
    runs = Runs([ONES.double()])
    differs([ONES - 2.1e-3], [ONES + 1e-3], runs)
    assert runs.asked == [None, *range(NOISY_RUNS)]


def test_noise_tells_of_what_cancels_out() -> None:
    """A sum that is exactly 0: neither its size nor the model's own error says how far it may be off."""
    runs = Runs([ZEROS.double()], noises=(0.0, 2e-5))
    holds([ZEROS + 1e-5], [ZEROS], runs)
    assert runs.asked == [None, 0, 1]
    differs([ZEROS + 1e-5], [ZEROS], Runs([ZEROS.double()], noises=(4e-6,)))


def test_what_is_exactly_zero_may_be_off_by_the_rounding_of_the_others() -> None:
    """The gradient of a single key's scores is zero in every run of the model's own, whatever the noise."""
    runs = Runs([ZEROS, ONES])
    holds([ZEROS + 4e-7, ONES], [ZEROS, ONES], runs)
    assert differs([ZEROS + 1e-4, ONES], [ZEROS, ONES], runs).what == "first"


def test_what_cancels_out_is_a_rounding_of_what_it_is_made_of() -> None:
    """All results are zero, so that only the gradients that came in tell how large the summands were."""
    runs, beside = Runs([ZEROS.double()]), Rule(beside=[ONES])
    differs([ZEROS + 9e-8], [ZEROS], runs)
    holds([ZEROS + 9e-8], [ZEROS], runs, beside)
    differs([ZEROS + 1e-3], [ZEROS], runs, beside)


def test_a_difference_says_where_and_what() -> None:
    error = differs([torch.tensor([[1.0, 1.0], [1.5, 1.1]])], [torch.ones(2, 2)], Runs([torch.ones(2, 2)]))
    assert (error.site, error.what, error.formula, error.index) == ("layer", "first", "k <= q", "[1, 0]")
    assert (error.expected, error.observed) == ("1 (exactly 1)", "1.5")
    assert error.differing == "2 of 4 elements"


def test_notes_name_the_other_differences() -> None:
    error = differs([ONES.double(), ONES + 1], [ONES, ONES], Runs([ONES, ONES]))
    assert (error.what, error.index, error.differing) == ("first", "every element", "all elements")
    assert (error.expected, error.observed) == ("torch.float32 [4]", "torch.float64 [4]")
    assert error.__notes__ == ["also: the second at layer, [0]: 2 for 1 (exactly 1)"]


FIRST_OVERFLOWS = torch.tensor([torch.inf, 1.0])
NUMBERS = torch.tensor([1, 2, 3])
LAST_DECIDED_OTHERWISE = torch.tensor([1, 2, 9])
YES = torch.tensor([True, False])
COMPLEX = torch.view_as_complex(torch.ones(3, 2))


@pytest.mark.parametrize(
    ("new", "own", "exact"),
    [
        pytest.param(None, torch.zeros(3), None, id="none for zeros"),
        pytest.param(torch.zeros(3), None, None, id="zeros for none"),
        pytest.param(torch.tensor([3.0, 1.0]), FIRST_OVERFLOWS, torch.tensor([5.0, 1.0]).double(), id="overflow"),
        pytest.param(torch.tensor([1, 2, 4]), NUMBERS, LAST_DECIDED_OTHERWISE, id="decided by a rounding"),
        pytest.param(NUMBERS.clone(), NUMBERS, None, id="whole numbers"),
        pytest.param(YES.clone(), YES, None, id="truth values"),
        pytest.param(COMPLEX.clone(), COMPLEX, None, id="complex"),
    ],
)
def test_what_holds(new: Tensor | None, own: Tensor | None, exact: Tensor | None) -> None:
    holds([new], [own], Runs([own if exact is None else exact]))


@pytest.mark.parametrize(
    ("new", "own", "exact", "index"),
    [
        pytest.param(None, torch.ones(3), None, "[0]", id="none for ones"),
        pytest.param(torch.ones(3), None, None, "[0]", id="ones for none"),
        pytest.param(torch.ones(5), torch.ones(4), None, "every element", id="another shape"),
        pytest.param(torch.tensor([torch.nan, 1.0]), torch.ones(2), None, "[0]", id="nan"),
        pytest.param(torch.tensor([torch.inf, 1.0]), torch.ones(2), None, "[0]", id="inf"),
        pytest.param(
            torch.tensor([3.0, 2.0]), FIRST_OVERFLOWS, torch.tensor([5.0, 1.0]).double(), "[1]", id="beside an overflow"
        ),
        pytest.param(torch.tensor([1, 2, 4]), NUMBERS, None, "[2]", id="whole numbers"),
        pytest.param(torch.tensor([7, 2, 4]), NUMBERS, LAST_DECIDED_OTHERWISE, "[0]", id="decided by no rounding"),
        pytest.param(~YES, YES, None, "[0]", id="truth values"),
        pytest.param(COMPLEX * 1.1, COMPLEX, None, "[0, 0]", id="complex"),
    ],
)
def test_what_differs(new: Tensor | None, own: Tensor | None, exact: Tensor | None, index: str) -> None:
    assert differs([new], [own], Runs([own if exact is None else exact])).index == index


def test_the_worst_of_several() -> None:
    compared = holds([ONES + 1e-6, ONES + 1.2e-6, 3], [ONES, ONES, 3], Runs([]))
    assert compared.error == pytest.approx(1.2e-6, abs=1e-7)
    assert compared.allowed is not None
    assert compared.error <= compared.allowed
    assert compared.elements == 8


def test_nothing_to_compare() -> None:
    compared = holds([3, None, torch.ones(0)], [4, None, torch.ones(0)], Runs([]))
    assert (compared.elements, compared.error, compared.allowed) == (0, 0.0, 0.0)
