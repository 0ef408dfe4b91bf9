"""0 in the place of NaN, at the weights, rows of weights set to zero, and ends of the dtype in the place of infinities, at scores."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import attn_compiler
from tests.near_miss.checking import LENGTH, Case, Cases, assert_same, check, condition, described, missed, nothing, qkv

CASES = Cases()
FOLLOWED = "every axis and every step of the scores can be followed"
AFTER = "the softmax is followed by a product with v"
STEPS = "between the product q kᵀ and the softmax stand only"
#: the second row of the batch has no key
EMPTY = torch.tensor([[1, 1, 1, 0, 0, 1], [0] * LENGTH]).bool()


def masked(q: Tensor, k: Tensor, kept: Tensor, fill: float = -math.inf) -> Tensor:
    return (q @ k.mT * 0.3).masked_fill(~kept[:, None, None, :], fill)


def padded() -> list[Tensor]:
    return qkv(EMPTY)


@CASES.near_miss(described("key padding"), inputs=padded)
def weights_without_nan(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    return masked(q, k, kept).softmax(-1).nan_to_num() @ v


@CASES.near_miss(described("key padding"), inputs=padded)
def weights_without_nan_by_a_number(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    return torch.nan_to_num(masked(q, k, kept).softmax(-1), nan=0.0, posinf=1.0, neginf=0.0) @ v


@CASES.near_miss(described("key padding"), inputs=padded)
def weights_that_are_filled_where_they_are_nan(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    weights = masked(q, k, kept).softmax(-1)
    return weights.masked_fill(weights.isnan(), 0.0) @ v


@CASES.near_miss(described("key padding"), inputs=padded)
def weights_that_are_chosen_where_they_are_nan(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    weights = masked(q, k, kept).softmax(-1)
    return torch.where(torch.isnan(weights), torch.zeros_like(weights), weights) @ v


@CASES.near_miss(described("key padding"), inputs=padded)
def a_number_masks_and_no_weight_is_nan(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    """The mean of v: no row is NaN."""
    return masked(q, k, kept, -1e9).softmax(-1).nan_to_num() @ v


@CASES.near_miss(described("scale 0.3"))
def nothing_masks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).softmax(-1).nan_to_num() @ v


@CASES.near_miss(described("key padding"), inputs=padded)
def scores_with_ends(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    """-inf becomes the lowest number, so that a row without keys is the mean of v."""
    return masked(q, k, kept).nan_to_num().softmax(-1) @ v


@CASES.near_miss(described("key padding"), inputs=padded)
def scores_with_the_lowest_number(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    return masked(q, k, kept).nan_to_num(neginf=torch.finfo(q.dtype).min).softmax(-1) @ v


@CASES.near_miss(missed(AFTER), inputs=padded)
def another_number(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    return masked(q, k, kept).softmax(-1).nan_to_num(nan=0.25) @ v


@CASES.near_miss(missed(FOLLOWED, "another mask"), inputs=padded)
def where_others_are_nan(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    weights = masked(q, k, kept).softmax(-1)
    return weights.masked_fill((weights * 2).isnan(), 0.0) @ v


@CASES.near_miss(missed(FOLLOWED, "another mask"), inputs=lambda: qkv(grad=False))
def all_that_are_not_nan(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT * 0.3).softmax(-1)
    return weights.masked_fill(~weights.isnan(), 0.0) @ v


@CASES.near_miss(missed(STEPS, "nan_to_num"), inputs=padded)
def scores_with_another_end(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    """-inf becomes 0, as any score may be."""
    return masked(q, k, kept).nan_to_num(neginf=0.0).softmax(-1) @ v


def _guarded(q: Tensor, k: Tensor, v: Tensor, kept: Tensor, rows: Tensor, fill: float) -> Tensor:
    """Rows that are told apart get nothing, whatever the others do."""
    return (q @ k.mT * 0.3).masked_fill(~kept, fill).softmax(-1).masked_fill(~rows, 0.0) @ v


def _some_rows() -> Tensor:
    """Without keys: rows 0 and 2. What guards leaves out row 0, and row 3, which has keys."""
    kept = condition(LENGTH, LENGTH)
    kept[:, 1] = True
    kept[[0, 2]] = False
    return kept


@CASES.near_miss(described("scale 0.3"), inputs=lambda: qkv(_some_rows()))
def rows_without_keys_are_guarded(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    return _guarded(q, k, v, kept, kept.any(-1, keepdim=True), -1e9)


@CASES.near_miss(described("scale 0.3"), inputs=lambda: qkv(_some_rows()))
def other_rows_are_guarded_than_those_without_keys(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    rows = (torch.arange(LENGTH) % 3 > 0)[:, None]
    return _guarded(q, k, v, kept, rows, -1e9)


@CASES.near_miss(described("scale 0.3"), inputs=lambda: qkv(_some_rows()))
def rows_are_guarded_by_a_product(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    weights = (q @ k.mT * 0.3).masked_fill(~kept, -1e9).softmax(-1)
    return (weights * kept.any(-1, keepdim=True)) @ v


@CASES.near_miss(described("scale 0.3", lowering="untouched"), inputs=lambda: qkv(_some_rows()))
def guarded_rows_are_returned(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q @ k.mT * 0.3).masked_fill(~kept, -1e9).softmax(-1).masked_fill(~kept.any(-1, keepdim=True), 0.0)
    return weights @ v, weights


@CASES.near_miss(missed(FOLLOWED, "another mask"), inputs=lambda: qkv(_some_rows()))
def keys_are_guarded(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).masked_fill(~kept, -1e9).softmax(-1).masked_fill(~kept.any(-2, keepdim=True), 0.0) @ v


@CASES.near_miss(nothing)
def no_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).nan_to_num() @ v


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_not_a_number(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", [case for case in CASES if "weights" in case.name], ids=lambda case: case.name)
@pytest.mark.parametrize("lowering", ["math", "reference"])
def test_each_lowering_that_computes_with_the_models_ops(case: Case, lowering: str) -> None:
    assert_same(case.function, case.inputs, lowerings=(lowering,))
    (report,) = attn_compiler.reports()
    assert [site.decision.lowering for site in report.sites] == [lowering]
