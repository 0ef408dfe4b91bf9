"""Finite numbers that mask, and what else happens to the same scores: only what nothing lifts is shut out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.near_miss.checking import LENGTH, Case, Cases, check, described, missed, plain, qkv, refused

LOWEST = torch.finfo(torch.float32).min
CASES = Cases()
MAY_BE_UNDONE = "masks by"


def rows() -> Tensor:
    return torch.arange(LENGTH)[:, None]


def columns() -> Tensor:
    return torch.arange(LENGTH)[None, :]


def later() -> Tensor:
    return columns() > rows()


def scores(q: Tensor, k: Tensor, scale: float = 0.5) -> Tensor:
    return q @ k.mT * scale


# ---- what is added lifts it -------------------------------------------------------------------------------------------


@CASES.near_miss(refused(MAY_BE_UNDONE))
def a_later_sum_lifts_a_fill(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    filled = scores(q, k).masked_fill(later(), -1e9)
    return (filled + torch.where(columns() == rows() + 2, 1e9, 0.0)).softmax(-1) @ v


@CASES.near_miss(refused(MAY_BE_UNDONE))
def a_difference_lifts_a_fill(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    filled = torch.where(later(), -1e9, scores(q, k))
    return (filled - torch.where(columns() == rows() + 1, -1e9, 0.0)).softmax(-1) @ v


@CASES.near_miss(refused(MAY_BE_UNDONE))
def positions_times_a_number_lift_a_fill(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (scores(q, k).masked_fill(later(), -1e5) + (columns() * 30_000).float()).softmax(-1) @ v


@CASES.near_miss(refused(MAY_BE_UNDONE))
def a_clamped_distance_lifts_a_fill(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    far = torch.clamp((columns() - rows() - 2).float() * 1e9, min=0.0)
    return (scores(q, k).masked_fill(later(), -1e9) + far).softmax(-1) @ v


@CASES.near_miss(refused(MAY_BE_UNDONE))
def the_addend_of_the_product_is_lifted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    flat_q, flat_k, flat_v = (x.flatten(0, 1) for x in (q, k, v))
    fill = torch.where(later(), -1e9, 0.0)[None]
    added = torch.baddbmm(fill, flat_q, flat_k.mT, beta=1, alpha=0.5)
    lifted = added + torch.where(columns() == rows() + 1, 1e9, 0.0)
    return (lifted.softmax(-1) @ flat_v).view_as(q)


@CASES.near_miss(refused(MAY_BE_UNDONE), inputs=lambda: qkv(torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0, 0.0])))
def a_loaded_mask_the_wrong_way_round(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (scores(q, k).masked_fill(later(), -1e9) + mask * 1e9).softmax(-1) @ v


@CASES.near_miss(refused(MAY_BE_UNDONE), inputs=lambda: plain(torch.randn(LENGTH)))
def what_every_key_gets_brings_them_down_to_the_fill(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """A filled key that is lifted is as high as one that is not filled, and lower by 1e5."""
    filled = scores(q, k).masked_fill(later(), -1e5)
    lifted = filled + torch.where(columns() == rows() + 1, 1e5, 0.0)
    return (lifted + (bias - 1e5)).softmax(-1) @ v


@CASES.near_miss(described("dense additive float32[1, 1, 6, 6]"), inputs=plain)
def a_number_that_half_precision_lacks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch multiplies by the number itself: 0 times 1e5 is 0, not 0 times infinity."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=((later().half()) * -1e5).float())


@CASES.near_miss(described("dense additive float32[1, 1, 6, 6]"), inputs=plain)
def lifted_within_one_tensor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """It holds numbers, and every kernel adds them."""
    fill = torch.where(later(), -1e9, 0.0) + torch.where(columns() == rows() + 1, 1e9, 0.0)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=fill)


@CASES.near_miss(described("dense additive float32[1, 1, 1, 6]"), inputs=lambda: plain(torch.eye(LENGTH)[0]))
def a_loaded_mask_less_a_number(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """-1e9 for all keys masks none."""
    return (scores(q, k) + (mask * 1e9 - 1e9)).softmax(-1) @ v


@CASES.near_miss(described("dense additive"), inputs=plain)
def a_number_for_all_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.full((1, LENGTH), -1e9))


# ---- what does not lift it --------------------------------------------------------------------------------------------


@CASES.near_miss(described("causal (proved)", "dense additive"), inputs=plain)
def a_penalty_beside_a_fill(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    near = torch.where(columns() < 3, -100.0, 0.0)
    return (scores(q, k) + near).masked_fill(later(), -1e9).softmax(-1) @ v


@CASES.near_miss(described("causal (proved)", "dense additive"), inputs=plain)
def a_bonus_beside_a_fill(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (scores(q, k).masked_fill(later(), -1e9) + torch.where(columns() < 3, 50.0, 0.0)).softmax(-1) @ v


@CASES.near_miss(described("causal (proved)", "dense additive"), inputs=plain)
def known_distances_beside_the_lowest_half(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    away = (rows() - columns()).abs().float() * -0.5
    return (scores(q, k) + away).masked_fill(later(), -65504.0).softmax(-1) @ v


@CASES.near_miss(described("causal"), inputs=lambda: plain(torch.ones(LENGTH)))
def a_loaded_mask_of_lowest_numbers(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (scores(q, k).masked_fill(later(), -1e9) + (1.0 - mask) * LOWEST).softmax(-1) @ v


@CASES.near_miss(described("causal", "softcap 30", lowering="reference"), inputs=plain)
def a_fill_behind_a_softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((scores(q, k) / 30).tanh() * 30).masked_fill(later(), -65504.0).softmax(-1) @ v


@CASES.near_miss(described("causal"), inputs=plain)
def a_fill_that_is_scaled_and_still_masks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (scores(q, k, 1.0).masked_fill(later(), -1e9) / 32).softmax(-1) @ v


@CASES.near_miss(missed("every axis and every step", "multiplies scores that are masked by now"), inputs=plain)
def a_fill_that_is_scaled_and_masks_no_more(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (scores(q, k, 1e6).masked_fill(later(), -1e9) * 1e-6).softmax(-1) @ v


# ---- a number that is near --------------------------------------------------------------------------------------------


@CASES.near_miss(described("causal"))
def ten_thousand_below_beside_small_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k, 0.25).masked_fill(later(), -1e4).softmax(-1) @ v


@CASES.near_miss(described("causal"), inputs=lambda: qkv(grad=False, dtype=torch.float64))
def ten_thousand_below_by_a_choice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.where(later(), torch.tensor(-1e4, dtype=q.dtype), scores(q, k, 0.25)).softmax(-1) @ v


@CASES.near_miss(described("scale 0.25"))
def ten_thousand_below_for_all_keys_of_some_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Those get the mean of v, as of any other number."""
    return scores(q, k, 0.25).masked_fill(later() | (rows() == 3), -1e4).softmax(-1) @ v


@CASES.near_miss(refused(MAY_BE_UNDONE))
def ten_thousand_below_beside_large_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (20.0 * scores(q, k)).masked_fill(later(), -1e4).softmax(-1) @ v


@CASES.near_miss(refused(MAY_BE_UNDONE))
def ten_thousand_below_beside_a_bonus(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raised = scores(q, k, 0.25) + torch.where(columns() == rows() + 1, 1e4, 0.0)
    return (raised.masked_fill(later(), -1e4) + torch.where(columns() == rows() + 1, 1e4, 0.0)).softmax(-1) @ v


@CASES.near_miss(refused(MAY_BE_UNDONE))
def ten_thousand_below_and_the_lowest(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The third row has none without a fill: all the weight is where the smaller one is."""
    filled = scores(q, k, 0.25).masked_fill(later(), -1e4)
    return filled.masked_fill((rows() == 3) & (columns() <= 3) & (columns() != 1), LOWEST).softmax(-1) @ v


@CASES.near_miss(refused(MAY_BE_UNDONE))
def two_hundred_below(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k, 0.25).masked_fill(later(), -200.0).softmax(-1) @ v


# ---- several fills ----------------------------------------------------------------------------------------------------


@CASES.near_miss(refused(MAY_BE_UNDONE))
def fills_of_two_sizes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The third row has none without a fill: all the weight is where the smaller one is."""
    filled = scores(q, k).masked_fill(later(), -1e9)
    return filled.masked_fill((rows() == 3) & (columns() <= 3), -1e6).softmax(-1) @ v


@CASES.near_miss(refused(MAY_BE_UNDONE))
def added_fills_of_two_sizes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    first, second = torch.where(later(), -1e9, 0.0), torch.where(columns() < 5, -1e8, 0.0)
    return (scores(q, k) + first + second).softmax(-1) @ v


@CASES.near_miss(described("causal"), inputs=plain)
def two_fills_of_one_size(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).masked_fill(later(), -1e9).masked_fill(columns() > 4, -1e9).softmax(-1) @ v


# ---- large scores -----------------------------------------------------------------------------------------------------


@CASES.near_miss(refused(MAY_BE_UNDONE), inputs=plain)
def scores_beyond_a_fill(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k, 1e7).masked_fill(later(), -1e9).softmax(-1) @ v


@CASES.near_miss(refused(MAY_BE_UNDONE), inputs=plain)
def a_cap_beyond_a_fill(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((scores(q, k, 1e5) / 1e6).tanh() * 1e6).masked_fill(later(), -65504.0).softmax(-1) @ v


@CASES.near_miss(described("dense additive"), inputs=plain)
def a_scale_beyond_a_fill(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    fill = torch.where(later(), -65504.0, 0.0)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=fill, scale=1e5)


@CASES.near_miss(described("causal"), inputs=plain)
def large_scores_beside_the_lowest_number(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k, 1e3).masked_fill(later(), LOWEST).softmax(-1) @ v


# ---- clamps -----------------------------------------------------------------------------------------------------------


@CASES.near_miss(refused("a clamp to"), inputs=plain)
def a_clamp_that_scores_pass(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k, 1e5).clamp(min=-1e5, max=1e5).softmax(-1) @ v


@CASES.near_miss(refused("a clamp to"), inputs=plain)
def a_floor_that_scores_pass(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.maximum(scores(q, k, 1e5), torch.tensor(-7e4)).softmax(-1) @ v


@CASES.near_miss(refused("a clamp to"), inputs=plain)
def a_clamp_that_a_bonus_passes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raised = scores(q, k) + torch.where(columns() < 3, 2e5, 0.0)
    return raised.clamp(max=1e5).masked_fill(later(), float("-inf")).softmax(-1) @ v


@CASES.near_miss(refused(MAY_BE_UNDONE), inputs=plain)
def a_floor_that_raises_a_fill(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k, 4.0).masked_fill(later(), -1e9).clamp(min=-65600.0).softmax(-1) @ v


@CASES.near_miss(described("causal"), inputs=plain)
def a_clamp_to_all_that_the_dtype_holds(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k, 1e5).masked_fill(later(), float("-inf")).clamp(LOWEST, -LOWEST).softmax(-1) @ v


@CASES.near_miss(described("causal"), inputs=plain)
def a_clamp_that_no_score_reaches(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).clamp(-1e5, 1e5).masked_fill(later(), -1e9).softmax(-1) @ v


# ---- with gradients ---------------------------------------------------------------------------------------------------


@CASES.near_miss(described("dense additive", lowering="reference", because="1e+09"))
def a_bonus_too_large_for_an_lse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (scores(q, k) + torch.where(later(), 1e9, 0.0)).softmax(-1) @ v


@CASES.near_miss(described("dense additive", lowering="reference", because="-1e+09"))
def a_fill_that_is_subtracted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (scores(q, k) - torch.where(later(), 1e9, 0.0)).softmax(-1) @ v


@CASES.near_miss(described("dense additive", lowering="reference", because="-1e+09"))
def a_number_for_all_keys_with_gradients(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (scores(q, k) + torch.full((1, LENGTH), -1e9)).softmax(-1) @ v


@CASES.near_miss(described("dense additive", lowering="sdpa_cpu_flash"))
def a_bonus_that_an_lse_holds(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (scores(q, k) + torch.where(later(), 10.0, 0.0)).softmax(-1) @ v


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fills(case: Case) -> None:
    check(case)


@CASES.near_miss(described("dense additive"), inputs=plain)
def a_penalty_by_rounded_positions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """In bfloat16 all of these positions are -65536."""
    shifted = (x.to(torch.bfloat16) - 65504.0 for x in (rows(), columns()))
    near = (next(shifted) <= next(shifted)) | (rows() == columns())
    return (scores(q, k) + torch.where(near, 0.0, -100.0)).softmax(-1) @ v
