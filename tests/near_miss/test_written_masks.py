"""Masks written to in place after they were made, in whole or in part: read with what was written, or not at all (see masks.py)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.near_miss.checking import BATCH, normal
from tests.near_miss.masks import KEYS, MaskCases, S, causal, check, columns, rows, whole

LOWEST = torch.finfo(torch.float32).min
PADDING = whole([1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0])

CASES = MaskCases()
near_miss = CASES.near_miss


def lowest_above_the_diagonal() -> Tensor:
    return torch.full((S, S), LOWEST).triu(1)


def padded(mask: Tensor, attention_mask: Tensor) -> Tensor:
    """A step of transformers 4.57 in OPT, Bloom and Falcon: what is masked twice stays as it is."""
    length = attention_mask.shape[-1]
    padding = mask[:, :, :, :length] + attention_mask[:, None, None, :]
    return mask[:, :, :, :length].masked_fill(padding == 0, LOWEST)


def expanded() -> Tensor:
    return lowest_above_the_diagonal()[None, None].expand(BATCH, 1, -1, -1)


# ---- written in whole -------------------------------------------------------------------------------------------------


@near_miss("causal ∧ key padding attention_mask[b, k]", attention_mask=PADDING)
def padding_written_into_a_clone(attention_mask: Tensor) -> Tensor:
    mask = expanded().clone()
    mask[:, :, :, : attention_mask.shape[-1]] = padded(mask, attention_mask)
    return mask


@near_miss("causal", other=lambda: normal(S, S, seed=5) > -1)
def all_written_over(other: Tensor) -> Tensor:
    mask = other.clone()
    mask.copy_(causal())
    return mask


@near_miss("causal", attention_mask=PADDING)
def used_before_it_is_written_to(attention_mask: Tensor) -> Tensor:
    mask = expanded().clone()
    before = mask * 1
    mask[:, :, :, :S] = padded(mask, attention_mask)
    return before


@near_miss("causal", attention_mask=PADDING)
def only_a_clone_is_written_to(attention_mask: Tensor) -> Tensor:
    mask = expanded().clone()
    other = mask.clone()
    other[:, :, :, :S] = padded(mask, attention_mask)
    return mask


@near_miss("causal ∧ key padding attention_mask[b, k]", attention_mask=PADDING)
def an_older_view_sees_what_is_written(attention_mask: Tensor) -> Tensor:
    mask = expanded().clone()
    view = mask.view(BATCH, 1, S, S)
    mask[:, :, :, :S] = padded(mask, attention_mask)
    return view


@near_miss("key padding attention_mask[b, k]", attention_mask=PADDING)
def the_last_of_two_writes_counts(attention_mask: Tensor) -> Tensor:
    mask = causal()[None, None].repeat(BATCH, 1, 1, 1)
    mask.copy_(columns() >= 0)
    mask &= attention_mask[:, None, None, :].bool()
    return mask


@near_miss("causal", attention_mask=PADDING)
def the_same_writes_the_other_way_round(attention_mask: Tensor) -> Tensor:
    mask = columns().ge(0).expand(BATCH, 1, S, S).clone()
    mask &= attention_mask[:, None, None, :].bool()
    mask.copy_(causal())
    return mask


@near_miss("causal")
def numbers_that_become_truth_values() -> Tensor:
    mask = torch.zeros(S, S, dtype=torch.bool)
    mask.copy_(causal().long() * 300)
    return mask


@near_miss(unproved="other is an input of the graph", other=lambda: normal(S, S, seed=5) > -1)
def the_users_own_mask_is_copied(other: Tensor) -> Tensor:
    mask = causal().clone()
    mask.copy_(other)
    return mask


# ---- written in part --------------------------------------------------------------------------------------------------


@near_miss("causal ∨ (k = 2 ∧ q = 0)")
def one_more_pair() -> Tensor:
    mask = causal().clone()
    mask[0, 2] = True
    return mask


@near_miss("causal ∨ (k + 6·q <= 3 ∧ 2 <= k + 6·q)")
def some_more_pairs_through_a_flat_view() -> Tensor:
    mask = causal().clone()
    mask.view(-1)[2:4].fill_(True)
    return mask


@near_miss("causal after a prefix of 3")
def a_prefix() -> Tensor:
    mask = causal().clone()
    mask[:, :3] = True
    return mask


@near_miss("causal ∧ k ≠ 5")
def the_last_key_is_hidden() -> Tensor:
    mask = causal().clone()
    mask[:, -1] = False
    return mask


@near_miss("causal ∧ keys up to 0 ∨ ((k - 1) % 2) ≠ 0")
def every_second_key() -> Tensor:
    mask = causal().clone()
    mask[:, 1::2] = False
    return mask


@near_miss("causal ∧ keys where (attention_mask[b, k] ≠ 0 ∨ 6 <= k)", keys=KEYS, attention_mask=PADDING)
def padding_of_the_first_keys_alone(attention_mask: Tensor) -> Tensor:
    """The padding mask ends before the keys do: it may not be read beyond its end."""
    mask = (columns(KEYS) <= rows()).expand(BATCH, 1, S, KEYS).clone()
    mask[:, :, :, :S] &= attention_mask[:, None, None, :].bool()
    return mask


@near_miss("causal from 3 ∧ keys where (attention_mask[b, k - 2] ≠ 0 ∨ k <= 1)", keys=KEYS, attention_mask=PADDING)
def padding_of_the_last_keys_alone(attention_mask: Tensor) -> Tensor:
    mask = (columns(KEYS) <= rows() + 3).expand(BATCH, 1, S, KEYS).clone()
    mask[:, :, :, KEYS - S :].logical_and_(attention_mask[:, None, None, :].bool())
    return mask


@near_miss("(causal ∧ b ≠ 1) ∨ (key padding attention_mask[1, k] ∧ b = 1)", attention_mask=PADDING)
def one_example_is_written_to(attention_mask: Tensor) -> Tensor:
    mask = causal().expand(BATCH, 1, S, S).clone()
    mask[1, :, :, :] = attention_mask[1, None, None, :].bool()
    return mask


# ---- not read -----------------------------------------------------------------------------------------------------------


@near_miss(unproved="is written in place, by fill__1")
def a_diagonal() -> Tensor:
    mask = causal().clone()
    mask.diagonal().fill_(False)
    mask[:, 0] = True
    return mask


# index_fill_ from torch 2.15 on.
@near_miss("causal", unproved="is written in place, by index_", rows_kept=whole(0, 1, 1, 2, 4, 5))
def rows_by_number(rows_kept: Tensor) -> Tensor:
    mask = causal().clone()
    mask[rows_kept] = True
    return mask & causal()


@near_miss("causal", unproved="mask is an input of the graph", mask=lambda: normal(S, S, seed=5) > -1)
def the_users_own_mask_is_written_to(mask: Tensor) -> Tensor:
    mask &= causal()
    return mask


@pytest.mark.parametrize("name", CASES)
def test_near_misses(name: str) -> None:
    check(CASES[name])
