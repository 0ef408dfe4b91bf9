"""One thing changed between the product q kᵀ and the softmax."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.near_miss.checking import (
    BATCH,
    HEAD_DIM,
    HEADS,
    LENGTH,
    SHAPE,
    Case,
    Cases,
    check,
    condition,
    described,
    missed,
    normal,
    plain,
    qkv,
    refused,
    tensors,
)

CASES = Cases()
STEPS = "between the product q kᵀ and the softmax stand only"
FOLLOWED = "every axis and every step of the scores can be followed"
READERS = "nothing besides the softmax takes a gradient to the scores"


def joined(scores: Tensor, sink: Tensor) -> Tensor:
    """The scores with a sink column, one logit a head."""
    return torch.cat([scores, sink.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], dim=-1)


# ---- the good ones, which each other case changes in one place ------------------------------------------------------


@CASES.near_miss(described("scale 0.353553"))
def good(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(HEAD_DIM)).softmax(-1) @ v


@CASES.near_miss(described("dense additive float32[1, 1, 6, 6]"), inputs=lambda: qkv(normal(LENGTH, LENGTH)))
def good_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 + bias).softmax(-1) @ v


@CASES.near_miss(described("dense bool[1, 1, 6, 6]"), inputs=lambda: qkv(condition(LENGTH, LENGTH)))
def good_fill(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).masked_fill(~kept, -math.inf).softmax(-1) @ v


@CASES.near_miss(described("softcap 5", "scale 0.3", lowering="reference", because="no softcap"))
def good_softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (5 * (q @ k.mT * 0.3 / 5).tanh()).softmax(-1) @ v


@CASES.near_miss(
    described("sinks", lowering="reference", because="no attention sinks"), inputs=lambda: qkv(normal(HEADS, grad=True))
)
def good_sinks(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    scores = joined(q @ k.mT * 0.3, sink)
    return (scores - scores.amax(-1, keepdim=True)).softmax(-1)[..., :-1] @ v


@CASES.near_miss(described("dense additive"), inputs=lambda: qkv(normal(BATCH, HEADS, LENGTH, 2, 3), grad=False))
def a_bias_in_the_shape_of_the_scores(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """SAM: the scores are asked for their shape alone."""
    scores = q @ k.mT * 0.3
    return (scores + bias.reshape_as(scores)).softmax(-1) @ v


@CASES.near_miss(missed(STEPS, "cat"))
def scores_of_two_blocks_of_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.cat([q @ k[:, :, :2].mT, q @ k[:, :, 2:].mT], dim=-1)
    return (scores * 0.3).softmax(-1) @ v


@CASES.near_miss(described("scale 0.3"), inputs=lambda: qkv(normal(BATCH, HEADS, LENGTH, 2, 3), grad=False))
def the_scores_in_the_shape_of_a_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = q @ k.mT * 0.3
    return scores.softmax(-1) @ v, scores.reshape_as(bias) + bias


# ---- what masks, and what only looks like it ------------------------------------------------------------------------


@CASES.near_miss(described("dense bool"), inputs=lambda: qkv(condition(LENGTH, LENGTH)))
def filled_with_minus_ten_thousand(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).masked_fill(~kept, -1e4).softmax(-1) @ v


@CASES.near_miss(described("dense bool"), inputs=lambda: qkv(condition(LENGTH, LENGTH)))
def filled_from_a_tensor_of_one_number(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    scores = q @ k.mT * 0.3
    return torch.where(kept, scores, torch.full_like(scores, -1e9)).softmax(-1) @ v


@CASES.near_miss(missed(STEPS, "where"), inputs=lambda: qkv(condition(LENGTH, LENGTH), grad=False))
def filled_from_a_tensor_that_was_written_to(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    scores = q @ k.mT * 0.3
    fill = torch.full_like(scores, -1e9)
    fill[..., 3] = 0.5
    return torch.where(kept, scores, fill).softmax(-1) @ v


@CASES.near_miss(
    described("scale -0.3", lowering="reference"),
    inputs=lambda: qkv(normal(LENGTH, LENGTH, grad=True)),
)
def scores_subtracted_from_a_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (bias - q @ k.mT * 0.3).softmax(-1) @ v


@CASES.near_miss(missed(STEPS, "masked_fill"), inputs=lambda: qkv(condition(LENGTH, LENGTH)))
def filled_with_zero(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).masked_fill(~kept, 0).softmax(-1) @ v


@CASES.near_miss(missed(STEPS, "masked_fill"), inputs=lambda: plain(condition(LENGTH, LENGTH)))
def filled_with_plus_infinity(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).masked_fill(~kept, math.inf).softmax(-1) @ v


@CASES.near_miss(missed(STEPS, "where"), inputs=lambda: qkv(condition(LENGTH, LENGTH), normal(*SHAPE[:3], LENGTH)))
def where_with_other_scores(q: Tensor, k: Tensor, v: Tensor, kept: Tensor, other: Tensor) -> Tensor:
    return torch.where(kept, q @ k.mT * 0.3, other).softmax(-1) @ v


@CASES.near_miss(described("dense bool"), inputs=lambda: qkv(~condition(LENGTH, LENGTH)))
def where_inverted(q: Tensor, k: Tensor, v: Tensor, masked: Tensor) -> Tensor:
    lowest = torch.finfo(q.dtype).min
    return torch.where(masked, lowest, q @ k.mT * 0.3).softmax(-1) @ v


@CASES.near_miss(missed(FOLLOWED, "multiplies scores that are masked"), inputs=lambda: qkv(condition(LENGTH, LENGTH)))
def fill_times_a_negative_number(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    return ((q @ k.mT).masked_fill(~kept, -1e9) * -0.3).softmax(-1) @ v


@CASES.near_miss(missed(FOLLOWED, "multiplies scores that are masked"), inputs=lambda: qkv(condition(LENGTH, LENGTH)))
def fill_scaled_away(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    return ((q @ k.mT * 3e8).masked_fill(~kept, -1e9) * 1e-9).softmax(-1) @ v


@CASES.near_miss(described("scale 0.3"), inputs=lambda: qkv(condition(LENGTH, LENGTH)))
def fill_before_a_usual_scale(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    return ((q @ k.mT).masked_fill(~kept, -1e9) * 0.3).softmax(-1) @ v


@CASES.near_miss(missed(STEPS, "clamp"))
def clamped_where_it_shows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).clamp(min=-1.0).softmax(-1) @ v


@CASES.near_miss(described("scale 0.3"))
def a_number_that_all_scores_get(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 + 5.0).softmax(-1) @ v


@CASES.near_miss(missed(STEPS, "add"))
def a_number_that_takes_digits_from_the_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 + 5e6).softmax(-1) @ v


@CASES.near_miss(refused("tanh after"))
def a_number_inside_the_tanh(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (5 * ((q @ k.mT * 0.3 + 2.0) / 5).tanh()).softmax(-1) @ v


@CASES.near_miss(refused("a sink column beside"), inputs=lambda: plain(normal(HEADS)))
def a_number_that_sinks_do_not_get(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    return joined(q @ k.mT * 0.3 + 2.0, sink).softmax(-1)[..., :-1] @ v


@CASES.near_miss(missed(FOLLOWED, "differ from key to key"), inputs=lambda: qkv(condition(LENGTH, LENGTH).float()))
def mask_multiplied_instead_of_added(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 * kept).softmax(-1) @ v


@CASES.near_miss(described("dense additive float32"), inputs=lambda: qkv(condition(LENGTH, LENGTH)))
def bool_added_as_a_number(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 + kept).softmax(-1) @ v


@CASES.near_miss(described("dense additive float32"), inputs=lambda: qkv(condition(LENGTH, LENGTH).long()))
def whole_numbers_added(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 + bias).softmax(-1) @ v


@CASES.near_miss(
    missed(STEPS, "add"),
    inputs=lambda: [*tensors((1, *SHAPE[1:]), (1, *SHAPE[1:]), SHAPE), normal(BATCH, 1, LENGTH, LENGTH)],
)
def mask_that_makes_the_scores_larger(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 + mask).softmax(-1) @ v


@CASES.near_miss(missed(STEPS, "add"), inputs=lambda: [*tensors(*[SHAPE[1:]] * 3), normal(1, 1, LENGTH, LENGTH)])
def mask_of_a_higher_rank(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 + mask).softmax(-1) @ v


@CASES.near_miss(
    missed("can be brought into", "has no place"),
    inputs=lambda: [*tensors(*[(BATCH, 1, LENGTH, HEAD_DIM)] * 2, SHAPE), normal(1, HEADS, LENGTH, LENGTH)],
)
def scores_expanded_over_heads_with_a_mask_each(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return ((q @ k.mT * 0.3).expand(BATCH, HEADS, LENGTH, LENGTH) + mask).softmax(-1) @ v


# ---- scales ---------------------------------------------------------------------------------------------------------


@CASES.near_miss(described("run-time factor"), inputs=lambda: qkv(normal(HEADS, 1, 1, grad=True)))
def temperature_of_each_head(q: Tensor, k: Tensor, v: Tensor, temperature: Tensor) -> Tensor:
    return (q @ k.mT * temperature).softmax(-1) @ v


@CASES.near_miss(
    refused("wider dtype than the float16 scores"),
    inputs=lambda: qkv(torch.full((HEADS, 1, 1), 1e5), grad=False, dtype=torch.float16),
)
def temperature_that_float16_does_not_hold(q: Tensor, k: Tensor, v: Tensor, temperature: Tensor) -> Tensor:
    return (q @ k.mT * temperature * 1e-5).softmax(-1).to(v.dtype) @ v


@CASES.near_miss(described("run-time factor"), inputs=lambda: qkv(normal(BATCH, 1, LENGTH, 1, grad=True)))
def temperature_of_each_query(q: Tensor, k: Tensor, v: Tensor, temperature: Tensor) -> Tensor:
    return (q @ k.mT / (temperature.abs() + 0.5)).softmax(-1) @ v


@CASES.near_miss(missed(FOLLOWED, "differ from key to key"), inputs=lambda: qkv(normal(LENGTH, grad=True)))
def temperature_of_each_key(q: Tensor, k: Tensor, v: Tensor, temperature: Tensor) -> Tensor:
    return (q @ k.mT * temperature).softmax(-1) @ v


@CASES.near_miss(
    described("run-time factor"),
    inputs=lambda: qkv(normal(HEADS, 1, 1, grad=True), normal(HEADS, LENGTH, LENGTH, grad=True)),
)
def cosine_attention(q: Tensor, k: Tensor, v: Tensor, temperature: Tensor, bias: Tensor) -> Tensor:
    scores = torch.nn.functional.normalize(q, dim=-1) @ torch.nn.functional.normalize(k, dim=-1).mT
    return (scores * temperature.clamp(max=4.6).exp() + bias).softmax(-1) @ v


@CASES.near_miss(missed(FOLLOWED, "written in place"), inputs=lambda: plain(normal(HEADS, 1, 1)))
def temperatures_written_before_the_values(q: Tensor, k: Tensor, v: Tensor, temperature: Tensor) -> Tensor:
    weights = (q @ k.mT * temperature).softmax(-1)
    temperature.mul_(3)
    return weights @ v


@CASES.near_miss(described("run-time factor"), inputs=lambda: qkv(normal(grad=True)))
def learned_temperature(q: Tensor, k: Tensor, v: Tensor, temperature: Tensor) -> Tensor:
    return (q @ k.mT * temperature).softmax(-1) @ v


@CASES.near_miss(refused("a run-time scale after"), inputs=lambda: qkv(normal(grad=True), condition(LENGTH, LENGTH)))
def learned_temperature_after_the_mask(q: Tensor, k: Tensor, v: Tensor, temperature: Tensor, kept: Tensor) -> Tensor:
    return ((q @ k.mT).masked_fill(~kept, -1e9) * temperature.abs()).softmax(-1) @ v


@CASES.near_miss(missed(FOLLOWED, "written in place"), inputs=lambda: plain(torch.tensor(0.3)))
def temperature_written_before_the_values(q: Tensor, k: Tensor, v: Tensor, temperature: Tensor) -> Tensor:
    weights = (q @ k.mT * temperature).softmax(-1)
    temperature.mul_(3)
    return weights @ v


@CASES.near_miss(described("scale 1 × run-time factor"))
def constant_that_was_written_to(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scale = torch.ones(1)
    scale[0] = 0.2
    return (q @ k.mT * scale).softmax(-1) @ v


@CASES.near_miss(missed(STEPS, "mul"), inputs=lambda: tensors(*[SHAPE[1:]] * 3))
def scale_of_a_higher_rank(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax over axis 2 of four: the queries."""
    return (q @ k.mT * torch.full((1, 1, 1, 1), 0.3)).softmax(2) @ v


@CASES.near_miss(described("scale -0.3", lowering="reference", because="the scale is positive"))
def negative_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * -0.3).softmax(-1) @ v


@CASES.near_miss(described("scale 0.3", lowering="reference", because="observed float64"))
def softmax_in_double(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT * 0.3).softmax(-1, dtype=torch.float64)).float() @ v


@CASES.near_miss(described("scale 0.3"))
def softmax_in_half_of_the_scores_precision(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The kernel is more precise than the model; here all weights are 1/4, which bfloat16 holds."""
    return (q * 0 @ k[:, :, :4].mT * 0.3).bfloat16().softmax(-1).float() @ v[:, :, :4]


# ---- softcap --------------------------------------------------------------------------------------------------------


@CASES.near_miss(described("softcap 1", "scale 0.3", lowering="reference"))
def tanh_without_a_factor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).tanh().softmax(-1) @ v


@CASES.near_miss(described("softcap 7", "scale 0.42", lowering="reference"))
def two_different_caps(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (7 * (q @ k.mT * 0.3 / 5).tanh()).softmax(-1) @ v


@CASES.near_miss(refused("tanh after"), inputs=lambda: qkv(normal(LENGTH, LENGTH)))
def bias_inside_the_tanh(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (5 * ((q @ k.mT * 0.3 + bias) / 5).tanh()).softmax(-1) @ v


@CASES.near_miss(refused("tanh after"), inputs=lambda: qkv(condition(LENGTH, LENGTH)))
def mask_inside_the_tanh(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    return (5 * ((q @ k.mT * 0.3).masked_fill(~kept, -math.inf) / 5).tanh()).softmax(-1) @ v


@CASES.near_miss(missed(STEPS, "sigmoid"))
def sigmoid_as_the_cap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (5 * (q @ k.mT * 0.3).sigmoid()).softmax(-1) @ v


@CASES.near_miss(missed(STEPS, "abs"))
def absolute_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).abs().softmax(-1) @ v


# ---- the subtracted maximum -----------------------------------------------------------------------------------------


@CASES.near_miss(described("scale 0.3"))
def maximum_subtracted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * 0.3
    return (scores - scores.max(-1, keepdim=True)[0].detach()).softmax(-1) @ v


@CASES.near_miss(described("scale 0.3"))
def maximum_put_back(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """LayoutLMv3: smaller by a number, shifted by their maximum, larger again."""
    scores = q @ k.mT * 0.3 / 32
    return ((scores - scores.amax(dim=-1).unsqueeze(-1)) * 32).softmax(-1) @ v


@CASES.near_miss(missed(READERS, "amax"))
def maximum_put_back_along_another_axis(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * 0.3
    return (scores - scores.amax(dim=-1).unsqueeze(-2)).softmax(-1) @ v


@CASES.near_miss(missed(FOLLOWED, "taken along another axis"))
def maximum_over_the_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = k @ q.mT * 0.3
    return (scores - scores.amax(-1, keepdim=True)).softmax(-2).mT @ v


@CASES.near_miss(refused("tanh after"))
def maximum_subtracted_inside_the_tanh(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * 0.3
    return (5 * ((scores - scores.amax(-1, keepdim=True)) / 5).tanh()).softmax(-1) @ v


@CASES.near_miss(missed(READERS, "amin"))
def minimum_subtracted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * 0.3
    return (scores - scores.amin(-1, keepdim=True)).softmax(-1) @ v


# ---- sinks ----------------------------------------------------------------------------------------------------------


@CASES.near_miss(
    missed("the sink column is dropped again"),
    inputs=lambda: [*tensors(SHAPE, SHAPE, (BATCH, HEADS, LENGTH + 1, HEAD_DIM)), normal(HEADS, grad=True)],
)
def sink_not_dropped(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    return joined(q @ k.mT * 0.3, sink).softmax(-1) @ v


@CASES.near_miss(missed(FOLLOWED, "something else than the sink"), inputs=lambda: qkv(normal(HEADS, grad=True)))
def first_column_dropped_instead_of_the_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    return joined(q @ k.mT * 0.3, sink).softmax(-1)[..., 1:] @ v


@CASES.near_miss(described("sinks"), inputs=lambda: qkv(normal(HEADS, grad=True)))
def sink_as_the_first_column(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    column = sink.view(1, HEADS, 1, 1).expand(BATCH, HEADS, LENGTH, 1)
    return torch.cat([column, q @ k.mT * 0.3], dim=-1).softmax(-1)[..., 1:] @ v


@CASES.near_miss(missed(FOLLOWED, "something else than the sink"), inputs=lambda: qkv(normal(HEADS, grad=True)))
def last_column_dropped_instead_of_the_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    column = sink.view(1, HEADS, 1, 1).expand(BATCH, HEADS, LENGTH, 1)
    return torch.cat([column, q @ k.mT * 0.3], dim=-1).softmax(-1)[..., :-1] @ v


@CASES.near_miss(described("sinks"), inputs=lambda: qkv(normal(HEADS, grad=True)))
def sink_narrowed_off(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    return joined(q @ k.mT * 0.3, sink).softmax(-1).narrow(-1, 0, LENGTH) @ v


@CASES.near_miss(described("sinks"), inputs=lambda: qkv(normal(HEADS, grad=True)))
def sink_split_off(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    weights, _ = joined(q @ k.mT * 0.3, sink).softmax(-1).split([LENGTH, 1], dim=-1)
    return weights @ v


@CASES.near_miss(missed(FOLLOWED, "something else than the sink"), inputs=lambda: qkv(normal(HEADS, grad=True)))
def the_wrong_part_of_a_split(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    _, weights = joined(q @ k.mT * 0.3, sink).softmax(-1).split([1, LENGTH], dim=-1)
    return weights @ v


@CASES.near_miss(described("sinks"))
def softmax_plus_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([q @ k.mT * 0.3, q.new_zeros(BATCH, HEADS, LENGTH, 1)], dim=-1).softmax(-1)[..., :-1] @ v


@CASES.near_miss(described("sinks"))
def softmax_plus_a_number(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.pad(q @ k.mT * 0.3, (1, 0), value=1.5).softmax(-1)[..., 1:] @ v


@CASES.near_miss(missed(STEPS, "pad"))
def softmax_plus_a_number_that_masks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """In a row whose keys are all masked by -1e9 the column has weight, too."""
    scores = (q @ k.mT * 0.3).masked_fill(torch.arange(LENGTH)[:, None] == 1, -1e9)
    return torch.nn.functional.pad(scores, (0, 1), value=-1e9).softmax(-1)[..., :-1] @ v


@CASES.near_miss(missed(STEPS, "cat"))
def a_column_of_minus_infinity(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    column = q.new_full((BATCH, HEADS, LENGTH, 1), -math.inf)
    return torch.cat([q @ k.mT * 0.3, column], dim=-1).softmax(-1)[..., :-1] @ v


@CASES.near_miss(missed(STEPS, "pad"), inputs=lambda: tensors(SHAPE, SHAPE, (BATCH, HEADS, LENGTH + 2, HEAD_DIM)))
def two_columns_of_zeros(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.pad(q @ k.mT * 0.3, (0, 2)).softmax(-1) @ v


@CASES.near_miss(missed("can be brought into", "has no place"), inputs=lambda: qkv(grad=False))
def a_column_that_was_written_to(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    column = q.new_zeros(BATCH, HEADS, LENGTH, 1)
    column[:, :, 1] = 2.0
    return torch.cat([q @ k.mT * 0.3, column], dim=-1).softmax(-1)[..., :-1] @ v


@CASES.near_miss(missed(FOLLOWED, "after the sink column"), inputs=lambda: qkv(normal(HEADS, grad=True)))
def two_sink_columns(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    return joined(joined(q @ k.mT * 0.3, sink), sink).softmax(-1)[..., :-2] @ v


@CASES.near_miss(missed(STEPS, "cat"), inputs=lambda: qkv(normal(*SHAPE, seed=7)))
def scores_joined_by_other_scores(q: Tensor, k: Tensor, v: Tensor, other: Tensor) -> Tensor:
    return torch.cat([q @ k.mT * 0.3, q @ other.mT * 0.3], dim=-1).softmax(-1)[..., :LENGTH] @ v


@CASES.near_miss(missed("can be brought into", "has no place"), inputs=lambda: qkv(normal(*SHAPE[:3], 1, grad=True)))
def sink_of_each_query(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    return torch.cat([q @ k.mT * 0.3, sink], dim=-1).softmax(-1)[..., :-1] @ v


@CASES.near_miss(refused("add after the sink column"), inputs=lambda: qkv(normal(HEADS), normal(LENGTH, 1)))
def row_bias_after_the_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, bias: Tensor) -> Tensor:
    """Added to a whole row, sink included, it changes nothing; added to the scores alone it would."""
    return (joined(q @ k.mT * 0.3, sink) + bias).softmax(-1)[..., :-1] @ v


@CASES.near_miss(refused("tanh after the sink column"), inputs=lambda: qkv(normal(HEADS)))
def cap_on_scores_and_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    return (5 * (joined(q @ k.mT * 0.3, 9 * sink) / 5).tanh()).softmax(-1)[..., :-1] @ v


@CASES.near_miss(refused("scale after the sink column"), inputs=lambda: qkv(normal(HEADS)))
def scale_on_scores_and_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    return (joined(q @ k.mT, sink) * 0.3).softmax(-1)[..., :-1] @ v


@CASES.near_miss(refused("keep after the sink column"), inputs=lambda: plain(normal(HEADS)))
def mask_on_scores_and_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    """Every other query may see nothing, not even the sink: its weights are all the same."""
    rows = (torch.arange(LENGTH) % 2 == 0)[:, None]
    return joined(q @ k.mT * 0.3, sink).masked_fill(rows, -1e9).softmax(-1)[..., :-1] @ v


@CASES.near_miss(refused("a sink column beside scores"), inputs=lambda: qkv(normal(HEADS, grad=True)))
def maximum_subtracted_before_the_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    scores = q @ k.mT * 0.3
    return joined(scores - scores.amax(-1, keepdim=True), sink).softmax(-1)[..., :-1] @ v


@CASES.near_miss(missed(FOLLOWED, "sink column"), inputs=lambda: qkv(normal(HEADS)))
def sink_as_a_further_query(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    return joined(k @ q.mT * 0.3, sink).softmax(-2)[..., :-1].mT @ v


# ---- other readers of the scores ------------------------------------------------------------------------------------


@CASES.near_miss(missed(READERS, "the graph returns"))
def scores_returned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = q @ k.mT * 0.3
    return scores.softmax(-1) @ v, scores


@CASES.near_miss(described("scale 0.3"))
def largest_score_logged(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = q @ k.mT * 0.3
    return scores.softmax(-1) @ v, scores.detach().max()


@CASES.near_miss(missed(READERS, "topk"))
def only_the_best_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * 0.3
    return scores.masked_fill(scores < scores.topk(3, -1).values[..., -1:], -math.inf).softmax(-1) @ v


@CASES.near_miss(missed(READERS, "view"), inputs=plain)
def view_of_the_scores_read_after_they_were_written(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = q @ k.mT
    flat = scores.view(-1)
    scores.mul_(0.3)
    return scores.softmax(-1) @ v, flat * 2


@CASES.near_miss(missed(READERS, "select"), inputs=plain)
def scores_written_through_a_view(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * 0.3
    scores[..., 0].mul_(2)
    return scores.softmax(-1) @ v


@CASES.near_miss(described("scale 0.3"), inputs=plain)
def scores_scaled_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).mul_(0.3).softmax(-1) @ v


@CASES.near_miss(missed(STEPS, "dropout"))
def dropout_on_the_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.dropout(q @ k.mT * 0.3, 0.5, True).softmax(-1) @ v


# ---- sums of two products -------------------------------------------------------------------------------------------


@CASES.near_miss(
    described("bias[2, 4, 6, 6] with gradient", lowering="reference"), inputs=lambda: qkv(normal(*SHAPE, grad=True))
)
def disentangled(q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
    return ((q @ k.mT + q @ position.mT) * 0.3).softmax(-1) @ v


@CASES.near_miss(described("dense additive float32[2, 4, 6, 6]"), inputs=lambda: plain(normal(*SHAPE, seed=7)))
def disentangled_without_gradients(q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
    return ((q @ k.mT - q @ position.mT) * 0.3).softmax(-1) @ v


@CASES.near_miss(missed(STEPS, "placeholder"), inputs=plain)
def forty_sums_that_meet(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """No product above; two ways up from each sum, so 2^40 paths."""
    for _ in range(20):
        q = q + q.tanh()
    return q.softmax(-1) @ v.mT


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_scores(case: Case) -> None:
    check(case)
