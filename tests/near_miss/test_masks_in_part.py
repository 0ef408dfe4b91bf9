"""Masks of which a part can not be read: that part alone stays a tensor, and nothing more is said than holds (see masks.py)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.near_miss.checking import BATCH, normal
from tests.near_miss.masks import KEYS, MaskCases, S, causal, check, columns, rows, whole

LOWEST = torch.finfo(torch.float32).min
UNREAD = "was made by scatter in a way that can not be read, and holds an element for each query and key"

CASES = MaskCases()
near_miss = CASES.near_miss

PADDING = whole([1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0])


def chosen() -> Tensor:
    """Three keys for each query."""
    return normal(BATCH, S, S, seed=7).topk(3, -1).indices


def numbers() -> Tensor:
    return normal(S, S, seed=8)


def left_out(indices: Tensor, keys: int = S) -> Tensor:
    """True where a key is not chosen, as DeepSeek V3.2 writes it."""
    return torch.ones(BATCH, S, keys, dtype=torch.bool).scatter(-1, indices, False)[:, None]


# ---- each part that can be read is kept -----------------------------------------------------------------------------


@near_miss("causal", unproved=UNREAD, indices=chosen)
def chosen_keys_up_to_the_diagonal(indices: Tensor) -> Tensor:
    return causal() & ~left_out(indices)


@near_miss("causal ∧ key padding mask[b, k]", unproved=UNREAD, indices=chosen, mask=PADDING)
def chosen_keys_that_are_no_padding(indices: Tensor, mask: Tensor) -> Tensor:
    return causal() & (mask != 0)[:, None, None, :] & ~left_out(indices)


@near_miss("causal ∧ key padding mask[b, k]", unproved=UNREAD, indices=chosen, mask=PADDING)
def one_not_of_all_that_is_left_out(indices: Tensor, mask: Tensor) -> Tensor:
    return ~(~causal() | (mask == 0)[:, None, None, :] | left_out(indices))


@near_miss("causal ∧ key padding mask[b, k]", unproved=UNREAD, indices=chosen, mask=PADDING)
def lowest_numbers_are_filled_in_twice(indices: Tensor, mask: Tensor) -> Tensor:
    positions = torch.where(causal() & (mask != 0)[:, None, None, :], 0.0, -torch.inf)
    return positions.masked_fill(left_out(indices), -torch.inf)


@near_miss("window (2 back)", unproved=UNREAD, indices=chosen)
def a_window_of_chosen_keys(indices: Tensor) -> Tensor:
    return (rows() - columns() <= 2) & ~left_out(indices)


@near_miss("keys up to position", unproved=UNREAD, keys=KEYS, indices=chosen, position=lambda: torch.tensor(5))
def keys_of_a_cache(indices: Tensor, position: Tensor) -> Tensor:
    return (columns(KEYS) <= position) & ~left_out(indices, KEYS)


@near_miss("causal", unproved="other is an input of the graph", other=lambda: normal(S, S, seed=5) > -1)
def a_tensor_of_the_users(other: Tensor) -> Tensor:
    return other & causal()


@near_miss("causal", unproved="compares numbers that are rounded", x=numbers)
def a_threshold_on_rounded_numbers(x: Tensor) -> Tensor:
    return causal() & (x * 0.1 > -0.05)


@near_miss("causal", unproved="masks by numbers that are rounded", x=numbers)
def a_threshold_on_rounded_numbers_that_is_added(x: Tensor) -> Tensor:
    return torch.where(causal() & (x * 0.1 > -0.05), 0.0, -torch.inf)


@near_miss("causal", unproved="compares numbers that are rounded", x=numbers)
def a_threshold_on_rounded_numbers_of_keys(x: Tensor) -> Tensor:
    return causal() & (x[:1] * 0.1 > -0.15)


@near_miss("causal", unproved="masks by numbers that are rounded", x=numbers)
def a_threshold_on_rounded_numbers_of_keys_that_is_added(x: Tensor) -> Tensor:
    return torch.where(causal() & (x[:1] * 0.1 > -0.15), 0.0, -torch.inf)


@near_miss("causal ∨ keys from 4", unproved=UNREAD, indices=chosen)
def chosen_keys_behind_the_others(indices: Tensor) -> Tensor:
    """As DeepSeek V4, whose last keys are summaries."""
    return torch.where(columns() < 4, causal(), ~left_out(indices))


@near_miss("window (2 back)", unproved=UNREAD, indices=chosen)
def two_ways_in_of_which_one_is_not_read(indices: Tensor) -> Tensor:
    window = rows() - columns() <= 2
    return (window & causal()) | (window & ~left_out(indices))


# ---- what only looks like it -----------------------------------------------------------------------------------------


@near_miss(unproved=UNREAD, indices=chosen)
def chosen_keys_beyond_the_diagonal_too(indices: Tensor) -> Tensor:
    return causal() | ~left_out(indices)


@near_miss("causal", unproved=UNREAD, indices=chosen, mask=PADDING)
def padding_or_chosen(indices: Tensor, mask: Tensor) -> Tensor:
    return causal() & ((mask != 0)[:, None, None, :] | ~left_out(indices))


@near_miss(unproved=UNREAD, indices=chosen)
def the_diagonal_for_keys_that_are_not_chosen(indices: Tensor) -> Tensor:
    return torch.where(left_out(indices), causal(), True)


@near_miss("causal ∨ (k = 4 ∧ q = 1)", unproved=UNREAD, indices=chosen)
def one_pair_is_let_through_behind_both(indices: Tensor) -> Tensor:
    return (causal() & ~left_out(indices)) | ((rows() == 1) & (columns() == 4))


@near_miss(is_bias=True, indices=chosen)
def numbers_that_undo_the_diagonal(indices: Tensor) -> Tensor:
    return torch.where(left_out(indices), torch.where(causal(), 0.0, LOWEST), -LOWEST) * 0.5


@near_miss(unproved=UNREAD, indices=chosen)
def all_but_the_chosen_ones(indices: Tensor) -> Tensor:
    return left_out(indices) | (rows() == columns())


@pytest.mark.parametrize("name", CASES)
def test_near_misses(name: str) -> None:
    check(CASES[name])
