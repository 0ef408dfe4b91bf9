"""Factors on FlexAttention's output that are nearly those of attention sinks, and calls whose logsumexp is used for more."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from tests.near_miss.checking import BATCH, HEAD_DIM, HEADS, Case, Cases, check, described, normal, tensors, with_lse

LENGTH = 12
SHAPE = (BATCH, HEADS, LENGTH, HEAD_DIM)
CASES = Cases()


@pytest.fixture(autouse=True)
def _unfused() -> Iterator[None]:
    """Eager FlexAttention says that it is slow."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without")
        warnings.filterwarnings("ignore", message="return_lse is deprecated")
        yield


def given(*shape: int) -> list[Tensor]:
    """FlexAttention has no backward on CPUs."""
    return [*tensors(SHAPE, SHAPE, SHAPE, grad=False), normal(*(shape or (HEADS,)))]


def attended(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = flex_attention(q, k, v, return_lse=True)
    return out, lse  # type: ignore[return-value]


def joined(lse: Tensor, column: Tensor) -> Tensor:
    return torch.logsumexp(torch.cat([lse, column], dim=-1), dim=-1, keepdim=True)


@CASES.near_miss(described("sinks"), inputs=given)
def good(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    out, lse = attended(q, k, v)
    return out * torch.sigmoid(lse - sinks.view(1, -1, 1)).unsqueeze(-1)


@CASES.near_miss(described("sinks"), inputs=given)
def good_the_other_way_round(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    out, lse = attended(q, k, v)
    lse = lse.unsqueeze(-1)
    column = sinks[None, :, None, None].expand(BATCH, HEADS, LENGTH, 1)
    return torch.exp(lse - joined(column, lse)).mul(out)


@CASES.near_miss(with_lse, inputs=given)
def the_difference_turned_round(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    out, lse = attended(q, k, v)
    return out * torch.sigmoid(sinks.view(1, -1, 1) - lse).unsqueeze(-1)


@CASES.near_miss(with_lse, inputs=given)
def twice_the_logits(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    out, lse = attended(q, k, v)
    return out * torch.sigmoid(torch.sub(lse, sinks.view(1, -1, 1), alpha=2)).unsqueeze(-1)


@CASES.near_miss(with_lse, inputs=given)
def divided_by_the_factor(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    out, lse = attended(q, k, v)
    return out / torch.sigmoid(lse - sinks.view(1, -1, 1)).unsqueeze(-1)


@CASES.near_miss(with_lse, inputs=given)
def another_exponential(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    out, lse = attended(q, k, v)
    lse = lse.unsqueeze(-1)
    return out * torch.exp2(lse - joined(lse, sinks.view(1, -1, 1, 1).expand(BATCH, HEADS, LENGTH, 1)))


@CASES.near_miss(with_lse, inputs=given)
def a_logsumexp_of_another_base(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    out, lse = attended(q, k, v)
    return out * torch.sigmoid(lse / math.log(2) - sinks.view(1, -1, 1)).unsqueeze(-1)


@CASES.near_miss(with_lse, inputs=given)
def two_columns(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    out, lse = attended(q, k, v)
    lse = lse.unsqueeze(-1)
    return out * torch.exp(lse - joined(lse, sinks.view(1, -1, 1, 1).expand(BATCH, HEADS, LENGTH, 2)))


@CASES.near_miss(with_lse, inputs=given)
def summed_over_the_queries(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    out, lse = attended(q, k, v)
    column = sinks.view(1, -1, 1).expand(BATCH, HEADS, 1)
    return out * torch.exp(lse - joined(lse, column)).unsqueeze(-1)


@CASES.near_miss(described("sinks"), inputs=lambda: given(BATCH, 1, 1))
def logits_of_the_heads_where_those_of_the_batch_would_be(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """There are as many heads as batch rows, so that no size tells the two apart. It broadcasts over the heads."""
    out, lse = attended(*(x[:, :BATCH] for x in (q, k, v)))
    return out * torch.sigmoid(lse.unsqueeze(-1) - sinks)


@CASES.near_miss(with_lse, inputs=lambda: given(HEAD_DIM))
def a_logit_for_each_element(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    out, lse = attended(q, k, v)
    return out * torch.sigmoid(lse.unsqueeze(-1) - sinks)


@CASES.near_miss(with_lse, inputs=lambda: given(1, 1, LENGTH))
def a_logit_for_each_query(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    out, lse = attended(q, k, v)
    return out * torch.sigmoid(lse - sinks).unsqueeze(-1)


@CASES.near_miss(with_lse, inputs=given)
def a_logsumexp_that_is_returned(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = attended(q, k, v)
    return out * torch.sigmoid(lse - sinks.view(1, -1, 1)).unsqueeze(-1), lse


@CASES.near_miss(with_lse, inputs=given)
def a_factor_that_is_returned(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = attended(q, k, v)
    factor = torch.sigmoid(lse - sinks.view(1, -1, 1)).unsqueeze(-1)
    return out * factor, factor


@CASES.near_miss(with_lse, inputs=given)
def an_attention_that_is_read_without_its_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    out, lse = attended(q, k, v)
    return out * torch.sigmoid(lse - sinks.view(1, -1, 1)).unsqueeze(-1) + out


@CASES.near_miss(with_lse, inputs=given)
def keys_that_are_written_before_the_factor(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    keys = k + 1
    out, lse = attended(q, keys, v)
    keys.mul_(2.0)
    return out * torch.sigmoid(lse - sinks.view(1, -1, 1)).unsqueeze(-1) + keys.mean()


@CASES.near_miss(with_lse, inputs=given)
def logits_of_the_logsumexp(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    out, lse = attended(q, k, v)
    return out * torch.sigmoid(lse - (sinks.view(1, -1, 1) + lse.mean(-1, keepdim=True))).unsqueeze(-1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_flex_sinks(case: Case) -> None:
    check(case)
