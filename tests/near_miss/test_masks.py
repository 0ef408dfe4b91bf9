"""Masks that are one thing off from a kind, or are of a kind for some inputs only (see masks.py)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.near_miss.checking import BATCH, HEADS, normal
from tests.near_miss.masks import KEYS, MaskCases, S, causal, check, columns, rows, whole

LOWEST = torch.finfo(torch.float32).min

CASES = MaskCases()
near_miss = CASES.near_miss


# ---- what a user passes ---------------------------------------------------------------------------------------------

PACKED = whole([0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5])
PADDING = whole([1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0])
IDS = whole([0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1])


def documents(positions: Tensor) -> Tensor:
    """As transformers finds packed sequences."""
    return (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)


@near_miss("causal ∧ document position_ids.cumsum[b, q] = position_ids.cumsum[b, k]", position_ids=PACKED)
def packed_by_positions_of_the_user(position_ids: Tensor) -> Tensor:
    ids = documents(position_ids)
    return (ids[:, None, :, None] == ids[:, None, None, :]) & causal()


@near_miss("causal")
def packed_by_positions_of_the_graph() -> Tensor:
    ids = documents(torch.arange(S)[None])
    return (ids[:, None, :, None] == ids[:, None, None, :]) & causal()


@near_miss(
    "causal ∧ document position_ids.cumsum[0, q] = position_ids.cumsum[0, k]", position_ids=whole([0, 1, 2, 0, 1, 2])
)
def packed_by_one_row_of_positions(position_ids: Tensor) -> Tensor:
    ids = documents(position_ids)
    return (ids[:, None, :, None] == ids[:, None, None, :]) & causal()


@near_miss("position_ids[b, k] <= position_ids[b, q]", position_ids=PACKED)
def causal_by_positions_of_the_user(position_ids: Tensor) -> Tensor:
    return position_ids[:, None, None, :] <= position_ids[:, None, :, None]


@near_miss(
    unproved="is an input of the graph, and holds an element for each query and key",
    mask=lambda: torch.ones(S, S, dtype=torch.bool).tril(),
)
def causal_only_by_what_the_mask_holds(mask: Tensor) -> Tensor:
    return mask & True


@near_miss("ids[b, k] = other[b, q]", ids=IDS, other=IDS)
def documents_of_two_tensors(ids: Tensor, other: Tensor) -> Tensor:
    return ids[:, None, None, :] == other[:, None, :, None]


@near_miss("(ids[b, k] ≠ ids[b, q] ∨ k = q)", ids=IDS)
def documents_inverted(ids: Tensor) -> Tensor:
    return (ids[:, None, None, :] != ids[:, None, :, None]) | (columns() == rows())


CASES.add("padding_along_the_queries", lambda mask: mask[:, None, :, None] != 0, "mask[b, q] ≠ 0", mask=PADDING)
CASES.add("padding_along_the_keys", lambda mask: mask[:, None, None, :] != 0, "key padding mask[b, k]", mask=PADDING)
CASES.add(
    "padding_inverted", lambda mask: mask[:, None, None, :] == 0, "key padding ¬mask[b, k]", mask=lambda: 1 - PADDING()
)


@near_miss("keys where mask[b, k] = 1", mask=whole([1, 1, 2, 1, 1, 0], [1, 1, 1, 1, 0, -1]))
def padding_that_has_to_be_one(mask: Tensor) -> Tensor:
    return mask[:, None, None, :] == 1


@near_miss("mask[b, h, 0, k]", mask=lambda: normal(BATCH, HEADS, 1, S, seed=3) > -1)
def padding_of_each_head(mask: Tensor) -> Tensor:
    return mask & True


@near_miss("key padding mask[b, 0, 0, k]", mask=lambda: PADDING()[:, None, None, :].bool())
def padding_ready_made(mask: Tensor) -> Tensor:
    return mask & True


@near_miss("right padding, keys up to lengths[b] - 1", lengths=whole(6, 4))
def keys_below_a_length(lengths: Tensor) -> Tensor:
    return (columns() < lengths[:, None])[:, None, None, :]


@near_miss("right padding, keys up to lengths[b]", lengths=whole(5, 3))
def keys_up_to_a_length(lengths: Tensor) -> Tensor:
    return (columns() <= lengths[:, None])[:, None, None, :]


@near_miss("left padding, keys from starts[b]", starts=whole(0, 2))
def keys_from_a_start(starts: Tensor) -> Tensor:
    return (columns() >= starts[:, None])[:, None, None, :]


@near_miss("causal after a prefix of prefix[b]", prefix=whole(2, 4))
def prefix_below_a_length(prefix: Tensor) -> Tensor:
    return causal() | (columns() < prefix[:, None])[:, None, None, :]


@near_miss("causal after a prefix of prefix[b] + 1", prefix=whole(2, 4))
def prefix_up_to_a_length(prefix: Tensor) -> Tensor:
    return causal() | (columns() <= prefix[:, None])[:, None, None, :]


@near_miss("causal ∧ q <= k + size[0]", size=whole(2))
def window_of_a_run_time_size(size: Tensor) -> Tensor:
    return causal() & (columns() >= rows() - size[0])


# ---- one node off ---------------------------------------------------------------------------------------------------


CASES.add("strictly_below", lambda: columns() < rows(), "strictly causal")
CASES.add("one_diagonal_more", lambda: torch.ones(S, S, dtype=torch.bool).tril(diagonal=1), "causal from 1")
CASES.add("window_without_its_edge", lambda: causal() & (columns() > rows() - 3), "causal ∧ window (2 back)")
CASES.add("window_with_its_edge", lambda: causal() & (columns() >= rows() - 3), "causal ∧ window (3 back)")
CASES.add("causal_transposed", lambda: causal().mT, "window (0 back)")


@near_miss("window (0 back)")
def causal_of_positions_backwards() -> Tensor:
    backwards = S - 1 - torch.arange(S)
    return backwards[None, :] <= backwards[:, None]


CASES.add("causal_inverted", lambda: ~causal(), "q + 1 <= k")
CASES.add("causal_from_the_top_left", lambda: columns(KEYS) <= rows(), "causal", keys=KEYS)


@near_miss("causal (bottom-right)", keys=KEYS)
def causal_from_the_bottom_right() -> Tensor:
    return torch.ones(S, KEYS, dtype=torch.bool).tril(diagonal=KEYS - S)


@near_miss("causal from 1", keys=KEYS)
def causal_from_neither_corner() -> Tensor:
    return torch.ones(S, KEYS, dtype=torch.bool).tril(diagonal=1)


CASES.add("causal_of_each_head", lambda: columns() <= rows() + torch.arange(HEADS)[:, None, None], "k <= h + q")
CASES.add(
    "causal_in_one_batch_row", lambda: causal() | (torch.arange(BATCH) == 1)[:, None, None, None], "causal ∨ b = 1"
)
CASES.add("causal_but_for_one_pair", lambda: causal() | ((rows() == 1) & (columns() == 3)), "causal ∨ (k = 3 ∧ q = 1)")
CASES.add("causal_in_other_steps", lambda: 2 * columns() <= 3 * rows(), "2·k <= 3·q")
CASES.add("chunks_of_two_sizes", lambda: rows() // 2 == columns() // 3, "(k // 3) = (q // 2)")
CASES.add("chunks_with_shifted_keys", lambda: rows() // 2 == (columns() + 1) // 2, "(q // 2) = ((k + 1) // 2)")
CASES.add("every_other_pair", lambda: (rows() + columns()) % 2 == 0, "((k + q) % 2) = 0")


# ---- dtypes that don't hold the positions -----------------------------------------------------------------------------


@near_miss("positions[k] <= positions[q]")
def positions_that_overflow() -> Tensor:
    positions = (torch.arange(S) * 60).to(torch.uint8)
    return positions[None, :] <= positions[:, None]


@near_miss(unproved="sub was made by sub in a way that can not be read, and holds an element for each query and key")
def differences_that_wrap() -> Tensor:
    positions = torch.arange(S).to(torch.uint8)
    return positions[:, None] - positions[None, :] <= 2


@near_miss("((getitem[0, k] = getitem_1[q, 0]) ∨ (getitem[0, k] < getitem_1[q, 0]))")
def positions_beyond_bfloat16() -> Tensor:
    positions = torch.arange(255, 255 + S).bfloat16()
    return positions[None, :] <= positions[:, None]


@near_miss("((getitem[0, k] = getitem_1[q, 0]) ∨ (getitem[0, k] < getitem_1[q, 0]))")
def positions_beyond_float32() -> Tensor:
    positions = torch.arange(2**24 - 2, 2**24 - 2 + S).float()
    return positions[None, :] <= positions[:, None]


@near_miss("((positions[k] = positions[q]) ∨ (positions[k] < positions[q]))")
def an_arange_of_bfloat16() -> Tensor:
    positions = torch.arange(255, 255 + S, dtype=torch.bfloat16)
    return positions[None, :] <= positions[:, None]


@near_miss("causal")
def positions_within_float32() -> Tensor:
    positions = torch.arange(S).float()
    return positions[None, :] <= positions[:, None]


@near_miss(unproved="numbers that are rounded")
def a_threshold_that_is_rounded() -> Tensor:
    return torch.full((S, S), 0.1) + (rows() - columns()) * 0.1 >= 0.1


# ---- numbers that are added ---------------------------------------------------------------------------------------------


CASES.add("added_zeros_and_lowest", lambda: torch.where(causal(), 0.0, LOWEST), "causal")


@near_miss("causal ∧ key padding mask[b, k]", mask=PADDING)
def added_twice(mask: Tensor) -> Tensor:
    padding = torch.where(mask.bool(), 0.0, LOWEST)[:, None, None, :]
    return torch.where(causal(), 0.0, LOWEST) + padding


CASES.add("added_minus_ten_thousand", lambda: torch.where(causal(), 0.0, -1e4), is_bias=True)
CASES.add("added_one_where_it_is_allowed", lambda: torch.where(columns() == 2, 1.0, 0.0).expand(S, S), is_bias=True)


@near_miss(is_bias=True, mask=PADDING)
def added_lowest_times_what_is_missing(mask: Tensor) -> Tensor:
    """Padding, as long as the tensor holds nothing but zeros and ones."""
    return ((1.0 - mask.float()) * LOWEST)[:, None, None, :]


@near_miss(is_bias=True, bias=lambda: torch.zeros(S, S).masked_fill(~causal(), -1e9).requires_grad_())
def added_and_learned(bias: Tensor) -> Tensor:
    return bias * 1.0


# ---- sizes that are symbolic --------------------------------------------------------------------------------------------


@near_miss("causal", dynamic=True, like=lambda: torch.zeros(S, S))
def causal_of_symbolic_sizes(like: Tensor) -> Tensor:
    return torch.ones_like(like, dtype=torch.bool).tril()


@near_miss("causal (bottom-right)", keys=KEYS, dynamic=True, like=lambda: torch.zeros(S, KEYS))
def bottom_right_of_symbolic_sizes(like: Tensor) -> Tensor:
    queries, keys = like.shape
    return torch.arange(keys)[None, :] <= torch.arange(queries)[:, None] + (keys - queries)


@near_miss("causal", keys=KEYS, dynamic=True, like=lambda: torch.zeros(S, KEYS))
def top_left_of_symbolic_sizes(like: Tensor) -> Tensor:
    queries, keys = like.shape
    return torch.arange(keys)[None, :] <= torch.arange(queries)[:, None]


# ---- the check --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_near_misses(name: str) -> None:
    check(CASES[name])
