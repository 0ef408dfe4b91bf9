"""Scores that are masked by arithmetic, as in GPT-1: only numbers that are shown to be 0 and 1 are a mask."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.near_miss.checking import BATCH, LENGTH, Case, Cases, check, condition, described, normal, qkv, refused

CASES = Cases()
NOT_SHOWN = "were not shown to be 0 and 1"
PADDING = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * 0.25


def diagonal() -> Tensor:
    return torch.ones(LENGTH, LENGTH).tril()


@CASES.near_miss(described("causal"))
def a_diagonal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b = diagonal()
    return (scores(q, k) * b + -1e4 * (1 - b)).softmax(-1) @ v


@CASES.near_miss(described("causal"), inputs=lambda: qkv(grad=False, dtype=torch.float64))
def a_diagonal_and_the_lowest_number(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b = diagonal().double()
    return (b * scores(q, k) - torch.finfo(q.dtype).max * (1 - b)).softmax(-1) @ v


@CASES.near_miss(described("key padding"), inputs=lambda: qkv(PADDING.bool()))
def truth_values_of_padding(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    b = kept[:, None, None, :].float()
    return (scores(q, k) * b + -1e4 * (1 - b)).softmax(-1) @ v


@CASES.near_miss(described("dense bool"), inputs=lambda: qkv(condition(BATCH, 1, LENGTH, LENGTH)))
def truth_values_of_pairs(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    b = kept.to(q.dtype)
    return (scores(q, k) * b + -1e4 * (1 - b)).softmax(-1) @ v


@CASES.near_miss(described("key padding"), inputs=lambda: qkv(torch.tensor([[0] * 6, [1, 1, 1, 0, 0, 0]]).bool()))
def a_row_without_keys(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    """All its keys have one score: the mean of v."""
    b = kept[:, None, None, :].float()
    return (scores(q, k) * b + -1e4 * (1 - b)).softmax(-1) @ v


@CASES.near_miss(refused(NOT_SHOWN), inputs=lambda: qkv(PADDING))
def whole_numbers(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    b = kept[:, None, None, :]
    return (scores(q, k) * b + -1e4 * (1 - b)).softmax(-1) @ v


@CASES.near_miss(refused(NOT_SHOWN), inputs=lambda: qkv(normal(LENGTH, LENGTH).sigmoid()))
def a_gate(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    return (scores(q, k) * b + -1e4 * (1 - b)).softmax(-1) @ v


@CASES.near_miss(refused(NOT_SHOWN))
def a_diagonal_of_halves(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b = diagonal() - diagonal().tril(-2) / 2
    return (scores(q, k) * b + -1e4 * (1 - b)).softmax(-1) @ v


@CASES.near_miss(refused("masks by"))
def a_number_that_a_score_may_be_below(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b = diagonal()
    return (scores(q, k) * 20 * b + -1e4 * (1 - b)).softmax(-1) @ v


@CASES.near_miss(refused(NOT_SHOWN))
def twice_as_much(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b = 2 * diagonal()
    return (scores(q, k) * b + -1e4 * (1 - b)).softmax(-1) @ v


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_blended(case: Case) -> None:
    check(case)
