"""The rule: results beside the model's own, with exact runs and runs with noise, and how large the noise is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_compiler.reasons.errors import VerificationMismatch
from attn_compiler.spec.numerics import FLOOR_ULPS
from attn_compiler.verifying import comparing
from attn_compiler.verifying.comparing import NOISY_RUNS, NOISY_RUNS_OF_STEEP, Compared, Rule
from attn_compiler.verifying.interpreting import Noise, fused_noise, shares_memory

ONES, ZEROS = torch.ones(4), torch.zeros(4)
EXACT_ONES, EXACT_ZEROS = ONES.double(), ZEROS.double()
RULE = Rule(names=["first", "second"], site="layer", formula="k <= q")
BESIDE = dataclasses.replace(RULE, beside=[ONES])
MEAN = dataclasses.replace(RULE, weighted=1.0)


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


def holds(new: Sequence[Any], own: Sequence[Any], runs: Runs, rule: Rule = RULE) -> Compared:
    return comparing.compare(new, own, runs, rule)


def differs(new: Sequence[Any], own: Sequence[Any], runs: Runs, rule: Rule = RULE) -> VerificationMismatch:
    with pytest.raises(VerificationMismatch) as caught:
        holds(new, own, runs, rule)
    return caught.value


ALL, STEEP = [None, *range(NOISY_RUNS)], [None, *range(NOISY_RUNS_OF_STEEP)]
#: ours, the model's own, the exact result, noises, rule -> the runs that are asked for; no difference after fewer than all
NOISES = {
    "rounding": (ONES + 1e-6, ONES, ONES, (0.0,), RULE, []),
    "a mean": (ONES + 1e-6, ONES, EXACT_ONES, (0.0,), MEAN, [None]),
    "twice the model's own error": (ONES - 1.9e-3, ONES + 1e-3, EXACT_ONES, (0.0,), RULE, [None]),
    "noise": (ZEROS + 1e-5, ZEROS, EXACT_ZEROS, (0.0, 2e-5), RULE, [None, 0, 1]),
    "late noise of a steep mean": (
        ONES + 0.3,
        ONES,
        EXACT_ONES,
        (0.1, 0.1, 0.1, 0.1, 0.1, 0.2),
        MEAN,
        [None, *range(6)],
    ),
    "what cancels": (ZEROS + 9e-8, ZEROS, EXACT_ZEROS, (0.0,), BESIDE, ALL),
}
WRONG_NOISES = {
    "more than twice": (ONES - 2.1e-3, ONES + 1e-3, EXACT_ONES, (0.0,), RULE, ALL),
    "noise is too little": (ZEROS + 1e-5, ZEROS, EXACT_ZEROS, (4e-6,), RULE, ALL),
    "noise grows less": (ONES + 1e-2, ONES + 4e-3, EXACT_ONES, (4e-3, 0.0), RULE, ALL),
    "a steep mean": (ONES + 0.3, ONES, EXACT_ONES, (0.1,), MEAN, STEEP),
    "nothing is known of what cancels": (ZEROS + 9e-8, ZEROS, EXACT_ZEROS, (0.0,), RULE, ALL),
    "more than what cancels": (ZEROS + 1e-3, ZEROS, EXACT_ZEROS, (0.0,), BESIDE, ALL),
    "beside what is not zero": (ONES * 1e-3 + 4e-7, ONES * 1e-3, EXACT_ONES * 1e-3, (0.0,), BESIDE, ALL),
}


@pytest.mark.parametrize("name", [*NOISES, *WRONG_NOISES])
def test_runs_go_on_until_it_is_settled(name: str) -> None:
    new, own, exact, noises, rule, asked = (NOISES | WRONG_NOISES)[name]
    runs = Runs([exact], noises=noises)
    (holds if name in NOISES else differs)([new], [own], runs, rule)
    assert runs.asked == asked


def test_what_noise_allows_stays_allowed() -> None:
    """The limit of one run is not taken back by the next one."""
    error = differs([ONES + 1e-2], [ONES], Runs([EXACT_ONES], noises=(4e-3, 0.0)))
    assert error.allowed == "an error of 0.008"


def test_what_is_exactly_zero_may_be_off_by_the_rounding_of_the_others() -> None:
    """The gradient of a single key's scores is zero in every run of the model's own, whatever the noise."""
    runs = Runs([ZEROS, ONES])
    holds([ZEROS + 4e-7, ONES], [ZEROS, ONES], runs)
    assert differs([ZEROS + 1e-4, ONES], [ZEROS, ONES], runs).what == "first"


def test_a_difference_says_where_and_what() -> None:
    error = differs([torch.tensor([[1.0, 1.0], [1.5, 1.1]])], [torch.ones(2, 2)], Runs([torch.ones(2, 2)]))
    assert (error.site, error.what, error.formula, error.index) == ("layer", "first", "k <= q", "[1, 0]")
    assert (error.expected, error.observed, error.differing) == ("1 (exactly 1)", "1.5", "2 of 4 elements")
    error = differs([EXACT_ONES, ONES + 1], [ONES, ONES], Runs([ONES, ONES]))
    assert (error.what, error.index, error.differing) == ("first", "every element", "all elements")
    assert (error.expected, error.observed) == ("torch.float32 [4]", "torch.float64 [4]")
    assert error.__notes__ == ["also: the second at layer, [0]: 2 for 1 (exactly 1)"]


OVERFLOW, NOT_EXACTLY = torch.tensor([torch.inf, 1.0]), torch.tensor([5.0, 1.0]).double()
NUMBERS, DECIDED = torch.tensor([1, 2, 3]), torch.tensor([1, 2, 9])
YES, COMPLEX = torch.tensor([True, False]), torch.view_as_complex(torch.ones(3, 2))
KINDS = {
    "none for zeros": (None, torch.zeros(3), None, None),
    "zeros for none": (torch.zeros(3), None, None, None),
    "overflow": (torch.tensor([3.0, 1.0]), OVERFLOW, NOT_EXACTLY, None),
    "decided by a rounding": (torch.tensor([1, 2, 4]), NUMBERS, DECIDED, None),
    "whole numbers": (NUMBERS.clone(), NUMBERS, None, None),
    "truth values": (YES.clone(), YES, None, None),
    "complex": (COMPLEX.clone(), COMPLEX, None, None),
    "none for ones": (None, torch.ones(3), None, "[0]"),
    "ones for none": (torch.ones(3), None, None, "[0]"),
    "another shape": (torch.ones(5), torch.ones(4), None, "every element"),
    "nan": (torch.tensor([torch.nan, 1.0]), torch.ones(2), None, "[0]"),
    "inf": (torch.tensor([torch.inf, 1.0]), torch.ones(2), None, "[0]"),
    "beside an overflow": (torch.tensor([3.0, 2.0]), OVERFLOW, NOT_EXACTLY, "[1]"),
    "wrong whole numbers": (torch.tensor([1, 2, 4]), NUMBERS, None, "[2]"),
    "decided by no rounding": (torch.tensor([7, 2, 4]), NUMBERS, DECIDED, "[0]"),
    "wrong truth values": (~YES, YES, None, "[0]"),
    "wrong complex": (COMPLEX * 1.1, COMPLEX, None, "[0, 0]"),
}


@pytest.mark.parametrize("name", KINDS)
def test_results_of_every_kind(name: str) -> None:
    new, own, exact, index = KINDS[name]
    runs = Runs([own if exact is None else exact])
    if index is None:
        holds([new], [own], runs)
    else:
        assert differs([new], [own], runs).index == index


def test_the_worst_of_several_is_kept_and_what_is_no_tensor_is_left_out() -> None:
    compared = holds([ONES + 1e-6, ONES + 1.2e-6, 3], [ONES, ONES, 3], Runs([]))
    assert compared.error == pytest.approx(1.2e-6, abs=1e-7)
    assert compared.allowed is not None
    assert compared.error <= compared.allowed
    assert compared.elements == 8
    compared = holds([3, None, torch.ones(0)], [4, None, torch.ones(0)], Runs([]))
    assert (compared.elements, compared.error, compared.allowed) == (0, 0.0, 0.0)


# ---- noise ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOOR_ULPS, ids=str)
def test_noise_is_as_large_as_a_rounding_and_the_same_for_a_seed(dtype: torch.dtype) -> None:
    wide = torch.full((500,), 3.0, dtype=torch.float64)
    noise = Noise(seed=1)
    one, more, again, other = (x.on(wide, dtype) for x in (noise, noise, Noise(seed=1), Noise(seed=2)))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert not torch.equal(one, more)
    step = 3 * FLOOR_ULPS[dtype] * torch.finfo(dtype).eps
    assert 0.9 * step < float((one - wide).abs().max()) <= step * 1.001


def test_what_is_no_rounded_number_is_left_as_it_is() -> None:
    noise, x, whole = Noise(seed=0), torch.randn(4, dtype=torch.float64), torch.arange(4)
    own = x.float()
    assert not torch.equal(noise.on_step(x, own), x)
    for value, its, inputs in (
        (x, own, [x.view(2, 2)]),
        (x, own.int(), []),
        (x, None, []),
        (7, own, []),
        (whole, whole, []),
    ):
        assert noise.on_step(value, its, inputs) is value


def test_memory_that_is_shared() -> None:
    x = torch.randn(6)
    # Nobody says where a sparse tensor's numbers are.
    for one, other in ((x[:2], x[4:]), (x[:1], x), (x.to_sparse(), ZEROS), (ZEROS, x.to_sparse())):
        assert shares_memory(one, other)
    for one, other in ((x, x.clone()), (x[:0], x), (x, 3)):
        assert not shares_memory(one, other)


def _gradient(scores: Tensor, noise: Noise | None, dtype: torch.dtype | None, *, sdpa: bool = False) -> Tensor:
    """The gradient of scores, or of SDPA's query."""
    leaf, v = (
        scores.clone().requires_grad_(),
        torch.linspace(-1, 2, scores.shape[-1] * 8).reshape(-1, 8).to(scores.dtype),
    )
    with fused_noise(noise, dtype):
        out = F.scaled_dot_product_attention(leaf, scores, scores) if sdpa else leaf.softmax(-1) @ v
        (found,) = torch.autograd.grad(out.sum(), leaf)
    return found


SCORES = torch.randn(1, 2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
NOISE, SINGLE = Noise(seed=0), torch.float32


def test_one_key_alone_has_a_gradient_of_roundings() -> None:
    assert not _gradient(SCORES[..., :1], None, SINGLE).any()
    found, most = _gradient(SCORES[..., :1], NOISE, SINGLE), 8 * 2 * FLOOR_ULPS[SINGLE] * torch.finfo(SINGLE).eps
    assert 0 < found.abs().max() <= most


@pytest.mark.parametrize("sdpa", [False, True])
def test_a_narrower_output_rounds_more_and_without_noise_nothing_changes(sdpa: bool) -> None:
    exact = _gradient(SCORES, None, None, sdpa=sdpa)
    off = [float((_gradient(SCORES, NOISE, x, sdpa=sdpa) - exact).abs().max()) for x in (SINGLE, torch.bfloat16)]
    assert 0 < off[0] < off[1] / 100 < 1e-3
    assert torch.equal(_gradient(SCORES, None, SINGLE), _gradient(SCORES, NOISE, None))
    assert _gradient(SCORES[:, :, :0], NOISE, SINGLE).shape == (1, 2, 0, 5)
