"""Weights that are divided by their sum: what a mask set to zero before that is a mask of the scores, if nothing is added to the sum."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.near_miss.checking import LENGTH, Case, Cases, check, condition, described, missed, normal, qkv, refused

CASES = Cases()
FOLLOWED = "every axis and every step of the scores can be followed"
AFTER = "the softmax is followed by a product with v"
PADDING = torch.tensor([[1, 1, 1, 0, 0, 1], [0, 1, 1, 1, 1, 0]]).bool()


def weigh(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).softmax(-1)


def normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)


def padded() -> list[Tensor]:
    return qkv(PADDING)


@CASES.near_miss(described("scale 0.3"))
def nothing_is_masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return normalised(weigh(q, k)) @ v


@CASES.near_miss(described("key padding"), inputs=padded)
def masked_by_truth_values(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    return normalised(weigh(q, k).masked_fill(~kept[:, None, None, :], 0.0)) @ v


@CASES.near_miss(described("key padding"), inputs=padded)
def masked_by_a_product(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    return normalised(weigh(q, k) * kept[:, None, None, :]) @ v


@CASES.near_miss(described("key padding"), inputs=padded)
def masked_by_a_product_of_numbers(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    return normalised(weigh(q, k) * kept[:, None, None, :].float()) @ v


@CASES.near_miss(described("dense bool"), inputs=lambda: qkv(condition(LENGTH, LENGTH)))
def masked_by_pairs(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    weights = torch.where(kept, weigh(q, k), 0.0)
    return (weights / weights.sum(-1).unsqueeze(-1)) @ v


@CASES.near_miss(described("causal", "key padding"), inputs=lambda: qkv(torch.tensor([[1, 1, 1, 0, 0, 1]] * 2).bool()))
def scores_and_weights_are_masked(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    weights = (q @ k.mT * 0.3).masked_fill(later, -math.inf).softmax(-1)
    return normalised(weights * kept[:, None, None, :]) @ v


@CASES.near_miss(described("key padding"), inputs=lambda: qkv(PADDING, grad=False))
def one_mask_twice(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    kept = kept[:, None, None, :]
    return normalised((q @ k.mT * 0.3).masked_fill(~kept, -1e9).softmax(-1) * kept) @ v


@CASES.near_miss(described("key padding"), inputs=lambda: qkv(PADDING & torch.tensor([[True], [False]])))
def rows_without_keys_that_become_zero(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    return normalised(weigh(q, k).masked_fill(~kept[:, None, None, :], 0.0)).nan_to_num() @ v


@CASES.near_miss(
    described("key padding"), inputs=lambda: qkv(PADDING & torch.tensor([[True], [False]]), torch.tensor(2))
)
def rows_that_one_number_fills_before(q: Tensor, k: Tensor, v: Tensor, kept: Tensor, first: Tensor) -> Tensor:
    """All scores are one number there, so that the mean is taken over what the mask of the weights leaves."""
    weights = (q @ k.mT * 0.3).masked_fill(~kept[:, None, None, :], -1e9).softmax(-1)
    return normalised(weights * (torch.arange(LENGTH) < first + 1)) @ v


@CASES.near_miss(missed(FOLLOWED, "another mask"), inputs=padded)
def masked_and_not_divided(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    return (weigh(q, k) * kept[:, None, None, :]) @ v


@CASES.near_miss(missed(FOLLOWED, "another mask"), inputs=padded)
def divided_and_masked_after_that(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    return (normalised(weigh(q, k)) * kept[:, None, None, :]) @ v


@CASES.near_miss(missed(FOLLOWED, "sum to any number below 1"), inputs=padded)
def a_number_is_added_to_the_sum(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    """Of weights that nearly all were masked it is not small."""
    weights = weigh(q, k) * kept[:, None, None, :]
    return (weights / (weights.sum(-1, keepdim=True) + 1e-9)) @ v


@CASES.near_miss(missed(FOLLOWED, "sum to any number below 1"), inputs=padded)
def a_sum_that_is_clamped(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    weights = weigh(q, k) * kept[:, None, None, :]
    return (weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)) @ v


@CASES.near_miss(missed(FOLLOWED, "sum to any number below 1"), inputs=padded)
def another_mask_than_that_of_the_scores(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    weights = q.mul(0.3).matmul(k.mT).masked_fill(~kept.flip(1)[:, None, None, :], -1e9).softmax(-1)
    return F.normalize(weights * kept[:, None, None, :], p=1, dim=-1) @ v


EMPTY = PADDING & torch.tensor([[True], [False]])


@CASES.near_miss(described("key padding"), inputs=lambda: qkv(EMPTY))
def one_mask_twice_and_a_number_in_the_sum(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    """A row without keys is 0."""
    kept = kept[:, None, None, :]
    weights = (q @ k.mT * 0.3).masked_fill(~kept, -1e9).softmax(-1) * kept
    return (weights / (weights.sum(-1, keepdim=True) + 1e-9)) @ v


@CASES.near_miss(described("key padding"), inputs=lambda: qkv(EMPTY))
def one_mask_twice_and_a_clamped_sum(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    kept = kept[:, None, None, :]
    weights = (q @ k.mT * 0.3).masked_fill(~kept, -1e9).softmax(-1).masked_fill(~kept, 0.0)
    return (weights / weights.sum(-1, keepdim=True).clamp_min(1e-6)) @ v


@CASES.near_miss(described("key padding"), inputs=lambda: qkv(EMPTY))
def one_mask_twice_and_a_norm(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    kept = kept[:, None, None, :]
    return F.normalize((q @ k.mT * 0.3).masked_fill(~kept, -1e9).softmax(-1) * kept, p=1, dim=-1) @ v


@CASES.near_miss(described("scale 0.3"))
def a_norm_of_all_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.normalize(weigh(q, k), p=1, dim=-1) @ v


@CASES.near_miss(missed(AFTER))
def a_norm_of_squares(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.normalize(weigh(q, k), p=2, dim=-1) @ v


@CASES.near_miss(missed(AFTER))
def a_number_that_the_sum_sees(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = weigh(q, k)
    return (weights / (weights.sum(-1, keepdim=True) + 1e-3)) @ v


@CASES.near_miss(missed(AFTER))
def a_sum_that_is_clamped_from_above(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = weigh(q, k)
    return (weights / weights.sum(-1, keepdim=True).clamp(min=1e-9, max=0.5)) @ v


@CASES.near_miss(missed(AFTER))
def a_sum_that_is_clamped_at_two(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = weigh(q, k)
    return (weights / weights.sum(-1, keepdim=True).clamp(min=2.0)) @ v


@CASES.near_miss(missed(AFTER), inputs=padded)
def divided_by_the_sum_of_others(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    weights = weigh(q, k)
    return (weights * kept[:, None, None, :] / weights.sum(-1, keepdim=True)) @ v


@CASES.near_miss(missed(FOLLOWED, "along another axis"), inputs=padded)
def divided_along_the_queries(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    weights = weigh(q, k) * kept[:, None, None, :]
    return (weights / weights.sum(-2, keepdim=True)) @ v


@CASES.near_miss(missed(AFTER))
def divided_by_the_largest(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = weigh(q, k)
    return (weights / weights.amax(-1, keepdim=True)) @ v


@CASES.near_miss(missed(FOLLOWED, "dropout left"))
def divided_after_dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return normalised(F.dropout(weigh(q, k), 0.3)) @ v


@CASES.near_miss(missed(AFTER), inputs=padded)
def a_sum_without_a_gradient(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    weights = weigh(q, k) * kept[:, None, None, :]
    return (weights / weights.sum(-1, keepdim=True).detach()) @ v


@CASES.near_miss(missed(AFTER), inputs=lambda: qkv(normal(LENGTH).sigmoid()))
def a_gate(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    return normalised(weigh(q, k) * gate) @ v


@CASES.near_miss(refused("they are returned"), inputs=padded)
def masked_weights_that_are_returned(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    weights = weigh(q, k) * kept[:, None, None, :]
    return normalised(weights) @ v, weights


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_renormalised(case: Case) -> None:
    check(case)
