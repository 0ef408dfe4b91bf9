"""Numbers are held against each other: those that a check reads, pairs of them, masks and outputs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Index
from attn_compiler.passes.graph.site import Operand, Term
from attn_compiler.reasons.errors import VerificationMismatch
from attn_compiler.spec.numerics import FLOOR_ULPS
from attn_compiler.verifying import comparing, pairs, running
from attn_compiler.verifying.comparing import NOISY_RUNS, Compared, Rule
from attn_compiler.verifying.interpreting import Noise, fused_noise, shares_memory
from attn_compiler.verifying.pairs import (
    ALLOWED,
    BIASED_MASKED_BELOW,
    MASKED,
    NEITHER,
    Own,
    combined,
    slices,
    varying,
)
from attn_compiler.verifying.values import Values
from tests.verifying.planning import LENGTH, planned, qkv

ONES, ZEROS = torch.ones(4), torch.zeros(4)
RULE = Rule(names=lambda: ["first", "second"], site="layer", formula="k <= q")


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
    return comparing.compare(new, own, runs, rule or RULE)


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
    runs, beside = Runs([ZEROS.double()]), dataclasses.replace(RULE, beside=[ONES])
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


# Roundings, differences and noise.
INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("dtype", FLOOR_ULPS, ids=str)
def test_noise_is_as_large_as_a_rounding_and_the_same_for_a_seed(dtype: torch.dtype) -> None:
    wide = torch.full((500,), 3.0, dtype=torch.float64)
    one, again, other = (Noise(seed=seed).on(wide, dtype) for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    step = 3 * FLOOR_ULPS[dtype] * torch.finfo(dtype).eps
    assert 0.9 * step < float((one - wide).abs().max()) <= step * 1.001


def test_noise_goes_on_from_draw_to_draw() -> None:
    noise = Noise(seed=0)
    assert not torch.equal(noise.like(torch.ones(9)), noise.like(torch.ones(9)))


def test_what_is_no_rounded_number_is_left_as_it_is() -> None:
    noise, x = Noise(seed=0), torch.randn(4, dtype=torch.float64)
    own = x.float()
    assert not torch.equal(noise.on_step(x, own, []), x)
    assert noise.on_step(x, own, [x.view(2, 2)]) is x
    assert noise.on_step(x, own.int(), []) is x
    assert noise.on_step(x, None, []) is x
    assert noise.on_step(7, own, []) == 7
    whole = torch.arange(4)
    assert noise.on_step(whole, whole, []) is whole


def test_memory_that_is_shared() -> None:
    x = torch.randn(6)
    assert shares_memory(x[:2], x[4:])
    assert shares_memory(x[:1], x)
    assert not shares_memory(x, x.clone())
    assert not shares_memory(x[:0], x)
    # Nobody says where a sparse tensor's numbers are.
    assert shares_memory(x.to_sparse(), torch.zeros(1))
    assert shares_memory(torch.zeros(1), x.to_sparse())


# ---- noise where a fused kernel rounds ---------------------------------------------------------------------------


def _gradient_of_scores(
    scores: torch.Tensor, v: torch.Tensor, noise: Noise | None, dtype: torch.dtype | None
) -> torch.Tensor:
    leaf = scores.clone().requires_grad_()
    out = leaf.softmax(-1) @ v
    with fused_noise(noise, dtype):
        (found,) = torch.autograd.grad(out.sum(), leaf)
    return found


def test_one_key_alone_has_a_gradient_of_roundings() -> None:
    scores, v = torch.randn(2, 3, 1, dtype=torch.float64), torch.randn(2, 1, 8, dtype=torch.float64)
    assert not _gradient_of_scores(scores, v, None, torch.float32).any()
    found = _gradient_of_scores(scores, v, Noise(seed=0), torch.float32)
    most = v.sum(-1).abs().max() * FLOOR_ULPS[torch.float32] * torch.finfo(torch.float32).eps
    assert 0 < found.abs().max() <= most


def test_a_narrower_output_rounds_more() -> None:
    scores, v = torch.randn(2, 3, 5, dtype=torch.float64), torch.randn(2, 5, 8, dtype=torch.float64)
    exact = _gradient_of_scores(scores, v, None, None)
    off = [
        float((_gradient_of_scores(scores, v, Noise(seed=0), dtype) - exact).abs().max())
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert 0 < off[0] < off[1] / 100


def test_sdpa_is_disturbed_as_its_products_are() -> None:
    q = torch.randn(1, 1, 4, 8, dtype=torch.float64, requires_grad=True)
    with fused_noise(Noise(seed=0), torch.float32):
        out = F.scaled_dot_product_attention(q, q.detach(), q.detach())
        (found,) = torch.autograd.grad(out.sum(), q)
    (exact,) = torch.autograd.grad(F.scaled_dot_product_attention(q, q.detach(), q.detach()).sum(), q)
    assert 0 < (found - exact).abs().max() < 1e-3


def test_without_noise_nothing_changes() -> None:
    scores, v = torch.randn(2, 3, 5), torch.randn(2, 5, 8)
    exact = _gradient_of_scores(scores, v, None, torch.float32)
    assert torch.equal(_gradient_of_scores(scores, v, Noise(seed=0), None), exact)


def test_a_softmax_of_nothing() -> None:
    found = _gradient_of_scores(torch.randn(2, 0, 5), torch.randn(2, 5, 8), Noise(seed=0), torch.float32)
    assert found.shape == (2, 0, 5)


LOWEST = torch.finfo(torch.float32).min
PADDING = torch.tensor([[1] * LENGTH, [1, 1, 1, 0, 0, 1]])


def _own(x: Tensor, *, adds: bool = True, weight: float = 1.0, inverted: bool = False) -> Own:
    node = torch.fx.Graph().placeholder("mask")
    operand = Operand(node=node, used=node, dims=(), root=node, root_dims=(), reads={})
    return Own(x=x, term=Term(operand=operand, weight=weight, inverted=inverted), adds=adds)


def test_truth_values() -> None:
    x = torch.tensor([True, False])
    assert _own(x, adds=False).effects().tolist() == [ALLOWED, MASKED]
    assert _own(x, adds=False, inverted=True).effects().tolist() == [MASKED, ALLOWED]


def test_truth_values_that_are_added_mask_nothing() -> None:
    assert _own(torch.tensor([True, False])).effects().tolist() == [NEITHER, ALLOWED]


def test_a_mask_that_a_bias_was_added_to_still_masks() -> None:
    x = torch.tensor([torch.finfo(torch.float16).min, 40.0], dtype=torch.float16).sum().reshape(1)
    assert _own(x).effects().tolist() == [NEITHER]
    assert _own(torch.cat([x, torch.tensor([-1e4])])).effects(None, BIASED_MASKED_BELOW).tolist() == [MASKED, NEITHER]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_added_numbers(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, -0.0, torch.finfo(dtype).min, -torch.inf, -1.0, 3.0, torch.nan, -1e4], dtype=dtype)
    expected = [ALLOWED, ALLOWED, MASKED, MASKED, NEITHER, NEITHER, NEITHER, NEITHER]
    assert _own(x).effects().tolist() == expected


def test_a_weight_may_take_the_masking_away() -> None:
    x = torch.tensor([-65504.0, LOWEST])
    assert _own(x, weight=1e-3).effects().tolist() == [NEITHER, MASKED]


def test_one_that_masks_is_enough() -> None:
    a = torch.tensor([MASKED, MASKED, ALLOWED, ALLOWED, NEITHER, NEITHER], dtype=torch.int8)
    b = torch.tensor([ALLOWED, NEITHER, ALLOWED, NEITHER, MASKED, NEITHER], dtype=torch.int8)
    assert combined([a, b]).tolist() == [MASKED, MASKED, ALLOWED, NEITHER, MASKED, NEITHER]


# ---- slices -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 7, 12, 2**24])
def test_slices_cover_every_pair_once(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(pairs, "MOST_PAIRS", most)
    x = torch.zeros(2, 3, 5, 4)
    for at in slices(tuple(x.shape)):
        part = at.of(x)
        assert part.numel() <= max(most, 4)
        part.add_(1)
        assert x[at.b, at.h, at.first, 3] == 1
    assert bool((x == 1).all())


def test_axes_that_change_neither_side_have_one_index() -> None:
    x = _own(torch.zeros(1, 1, 5, 1))
    assert varying([], [x], (2, 3, 5, 4)) == (1, 1, 5, 1)
    assert varying([ix.as_float(Index("h"))], [x], (2, 3, 5, 4)) == (1, 3, 5, 1)


def test_elements_are_those_of_a_broadcast_tensor() -> None:
    own = _own(torch.arange(4.0).reshape(1, 1, 1, 4))
    assert own.element((1, 2, 3, 3)) == 3.0


def test_rows_with_keys() -> None:
    """They are asked for where the model gives no number."""

    def of_infinity(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        return (q @ k.mT).masked_fill(real[:, None, None, :] == 0, -torch.inf).softmax(-1) @ v

    found = planned(of_infinity, *qkv(), PADDING * torch.tensor([[1], [0]]))
    seen: list[Tensor | None] = []
    check = found.check("output")
    real = pairs.rows_with_keys

    def rows(site: Any, values: Values) -> Tensor | None:
        seen.append(real(site, values))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairs, "rows_with_keys", rows)
        running.run_checks(found.plan, found.args)
    assert check.skipped is None
    assert seen[0] is not None
    assert seen[0].expand(2, 1, 1, 1).flatten().tolist() == [True, False]


def test_rows_of_a_site_without_a_mask() -> None:
    found = planned(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, *qkv())
    values = Values(bodies=found.plan.mirrors)
    assert pairs.rows_with_keys(found.check("output").site, values) is None


def test_a_call_without_queries_is_verified() -> None:
    """A slice of no rows, beside a bias that all rows share."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        return (q @ k.mT + slope * torch.arange(k.shape[2])).softmax(-1) @ v

    options = {"verify": True, "strict": True, "inner": "aot_eager"}
    compiled = torch.compile(attention, backend="attn_compiler", dynamic=True, options=options)
    for queries, keys in ((2, 3), (0, 7)):
        q, k, v = (torch.randn(2, 1, n, 4) for n in (queries, keys, keys))
        given = (q, k, v, torch.tensor(0.5))
        torch.testing.assert_close(compiled(*given), attention(*given))
