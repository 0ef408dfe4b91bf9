"""Masks of whole numbers that wrap around in their dtype, or come just short of it, and of floats that round (see masks.py)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.near_miss.masks import MaskCases, S, causal, check, columns, rows, whole

INT64, INT32 = torch.iinfo(torch.int64), torch.iinfo(torch.int32)
DENSE = "and holds an element for each query and key"

CASES = MaskCases()
near_miss = CASES.near_miss


def positions(dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.arange(S, dtype=dtype)


# ---- arithmetic that wraps --------------------------------------------------------------------------------------------


@near_miss(unproved=DENSE)
def differences_times_a_factor_beyond_int32() -> Tensor:
    apart = positions(torch.int32)[:, None] - positions(torch.int32)[None, :]
    return apart * 1_500_000_000 >= 0


@near_miss("causal")
def differences_times_a_factor_within_int32() -> Tensor:
    apart = positions(torch.int32)[:, None] - positions(torch.int32)[None, :]
    return apart * 400_000_000 >= 0


@near_miss("causal")
def differences_times_a_factor_within_int64() -> Tensor:
    return (rows() - columns()) * 1_500_000_000 >= 0


@near_miss(unproved=DENSE)
def differences_times_a_factor_beyond_int64() -> Tensor:
    return (rows() - columns()) * (2**62) >= 0


@near_miss("document (add[q] % 3) = (add[k] % 3)")
def a_hash_in_int32() -> Tensor:
    hashed = (positions(torch.int32) * 1_103_515_245 + 12345) % 3
    return hashed[:, None] == hashed[None, :]


@near_miss("causal ∨ key padding ge[0, k]")
def a_hash_in_int64_above_zero() -> Tensor:
    hashed = positions() * 6_364_136_223_846_793_005 + 1_442_695_040_888_963_407
    return (hashed[None, :] >= 0) | causal()


@near_miss("causal ∨ key padding ge[0, k]")
def positions_behind_the_largest_number() -> Tensor:
    return (torch.full((S,), INT64.max)[None, :] + columns() >= 0) | causal()


@near_miss(unproved=DENSE)
def positions_behind_a_fill() -> Tensor:
    """The fill and one more is the lowest number, which is below all others: not where a difference is asked."""
    place = torch.where(positions() < 3, positions(), INT64.max) + 1
    return (place[None, :] <= place[:, None]) | (columns() == rows())


@near_miss("causal ∨ keys where 0 <= neg[0, k]")
def the_negative_of_the_lowest_number() -> Tensor:
    lowest = positions(torch.int8) - 128
    return (-lowest[None, :] >= 0) | causal()


@near_miss("causal ∨ keys where 0 <= size[k]")
def the_size_of_the_lowest_number() -> Tensor:
    size = torch.full((S,), INT32.min, dtype=torch.int32).abs() + positions(torch.int32)
    return (size[None, :] >= 0) | causal()


@near_miss(unproved=DENSE)
def products_of_positions_in_int32() -> Tensor:
    far = positions(torch.int32) * 50_000
    return far[:, None] * far[None, :] >= 0


@near_miss("causal ∨ keys where 0 <= lshift[k]")
def shifted_bits() -> Tensor:
    return ((positions(torch.int32) << 30)[None, :] >= 0) | causal()


@near_miss("far[k] <= far[q]")
def sums_beyond_int16() -> Tensor:
    far = positions(torch.int16) + 32_765
    return far[None, :] <= far[:, None]


@near_miss("causal")
def sums_within_int16() -> Tensor:
    far = positions(torch.int16) + 32_760
    return far[None, :] <= far[:, None]


@near_miss("causal")
def differences_within_int8() -> Tensor:
    return positions(torch.int8)[None, :] - positions(torch.int8)[:, None] <= 0


@near_miss("causal ∨ keys where sub[k] <= 9")
def a_number_less_bytes() -> Tensor:
    return ((3 - positions(torch.uint8))[None, :] < 10) | causal()


@near_miss("causal ∨ keys where 101 <= diff[k]")
def differences_of_neighbours_in_bytes() -> Tensor:
    falling = torch.arange(S, 0, -1).to(torch.uint8)
    return (torch.diff(falling, prepend=torch.zeros(1, dtype=torch.uint8))[None, :] > 100) | causal()


@near_miss("causal ∨ keys where (sub[k] // 2) <= 2")
def halves_of_what_wrapped() -> Tensor:
    return (((positions(torch.uint8) - 3) // 2)[None, :] <= 2) | causal()


@near_miss("floordiv_1[q] <= floordiv[k]")
def floor_division_by_a_negative_number() -> Tensor:
    return (positions() // -2)[None, :] >= (positions() // -2)[:, None]


@near_miss("mod[k] <= mod_1[q]")
def remainders_of_a_negative_number() -> Tensor:
    return (positions() % -4)[None, :] <= (positions() % -4)[:, None]


# ---- casts, truth values, running sums --------------------------------------------------------------------------------


@near_miss("causal ∨ keys where 1 <= to[k]")
def a_cast_to_int32_that_wraps() -> Tensor:
    return ((positions() * 2**31).to(torch.int32)[None, :] > 0) | causal()


@near_miss("causal ∨ key padding to[k]")
def truth_of_bytes_that_wrapped() -> Tensor:
    return (positions() * 256).to(torch.uint8).bool()[None, :] | causal()


@near_miss("2 <= (k <= q ? 1 : 0) + (k <= 2 ? 1 : 0)")
def sums_of_truth_values_as_numbers() -> Tensor:
    return causal().int() + (columns() < 3).int() > 1


@near_miss("causal")
def running_sums_of_truth_values() -> Tensor:
    """They are int64."""
    count = torch.ones(S, dtype=torch.bool).cumsum(0)
    return count[None, :] <= count[:, None]


@near_miss("count[k] <= count[q]")
def running_sums_that_wrap() -> Tensor:
    count = torch.full((S,), 100, dtype=torch.uint8).cumsum(0, dtype=torch.uint8)
    return count[None, :] <= count[:, None]


@near_miss("causal")
def running_sums_of_bytes() -> Tensor:
    """Without a dtype, they are int64."""
    count = torch.full((S,), 100, dtype=torch.uint8).cumsum(0)
    return count[None, :] <= count[:, None]


# ---- what is loaded ---------------------------------------------------------------------------------------------------

LARGE = whole(2**31 - 1, 3, 2**31 - 2, 5, 0, 7)
HUGE = whole(2**62, 3, -(2**62), 5, 2**61 + 1, 7)


def in_32_bits() -> Tensor:
    return LARGE().int()


@near_miss("causal ∨ keys where 1 <= ids.add[k]", ids=in_32_bits)
def loaded_in_32_bits_and_one_more(ids: Tensor) -> Tensor:
    return ((ids + 1)[None, :] > 0) | causal()


@near_miss(unproved=DENSE, ids=in_32_bits)
def distances_of_what_is_loaded_in_32_bits(ids: Tensor) -> Tensor:
    return ids[:, None] * 2 - ids[None, :] < 3


@near_miss("ids[k] <= ids[q]", ids=in_32_bits)
def an_order_of_what_is_loaded_in_32_bits(ids: Tensor) -> Tensor:
    return ids[None, :] <= ids[:, None]


@near_miss("ids[k] <= ids[q] + 2", ids=LARGE)
def distances_of_what_is_loaded_in_64_bits(ids: Tensor) -> Tensor:
    return ids[:, None] - ids[None, :] > -3


@near_miss("causal ∨ key padding ids.ge[0, k]", ids=HUGE)
def four_times_what_is_loaded_in_64_bits(ids: Tensor) -> Tensor:
    """Numbers from 2 ** 61 on wrap, and nothing says that there are none."""
    return ((ids * 4)[None, :] >= 0) | causal()


@near_miss("document ids[q] = ids[k]", ids=HUGE)
def documents_of_any_number(ids: Tensor) -> Tensor:
    return ids[:, None] == ids[None, :]


# ---- floats -----------------------------------------------------------------------------------------------------------


@near_miss("((getitem[0, k] = getitem_1[q, 0]) ∨ (getitem[0, k] < getitem_1[q, 0]))")
def positions_beyond_float16() -> Tensor:
    place = torch.arange(2046, 2046 + S).half()
    return place[None, :] <= place[:, None]


@near_miss("((getitem[0, k] = getitem_1[q, 0]) ∨ (getitem[0, k] < getitem_1[q, 0]))")
def positions_beyond_float32() -> Tensor:
    place = torch.arange(S).float() + 2.0**24
    return place[None, :] <= place[:, None]


@near_miss(unproved="numbers that are rounded")
def a_choice_and_positions_in_bfloat16() -> Tensor:
    """1000 + 1 is 1000."""
    far = torch.where(columns() % 2 == 0, 1000.0, 0.0).bfloat16() + columns().bfloat16()
    return (far > 1001.0) | causal()


@near_miss(unproved="numbers that are rounded")
def two_choices_that_add_up_in_bfloat16() -> Tensor:
    """-1e9 - 1 is -1e9."""
    fill = torch.where(columns() > rows(), -1e9, 0.0).bfloat16()
    return (fill + torch.where(columns() % 2 == 0, -1.0, 0.0).bfloat16() != -1e9) | (columns() == rows())


@near_miss("causal ∧ ((k % 2) ≠ 0 ∨ k = q)")
def two_fills_that_add_up() -> Tensor:
    lowest = torch.finfo(torch.float32).min
    both = torch.where(columns() > rows(), lowest, 0.0) + torch.where(columns() % 2 == 0, lowest, 0.0)
    return (both > -1e38) | (columns() == rows())


# ---- the check --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_near_misses(name: str) -> None:
    check(CASES[name])
