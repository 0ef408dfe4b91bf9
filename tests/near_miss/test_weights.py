"""One thing changed at the softmax, or between it and the product with v."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.near_miss.checking import (
    BATCH,
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
    nothing,
    qkv,
    refused,
    tensors,
)

CASES = Cases()
WRITTEN = "the softmax of an attention is one call"
AFTER = "the softmax is followed by a product with v"
FOLLOWED = "every axis and every step of the scores can be followed"
GRADIENT = "the gradient of the output reaches the scores"
RETURNED = "they are returned"


def weigh(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).softmax(-1)


# ---- another function than the softmax ------------------------------------------------------------------------------


CASES.add("relu", nothing, lambda q, k, v: (q @ k.mT * 0.3).relu() @ v)
CASES.add("sigmoid", nothing, lambda q, k, v: (q @ k.mT * 0.3).sigmoid() @ v)
CASES.add("gelu", nothing, lambda q, k, v: F.gelu(q @ k.mT * 0.3) @ v)
CASES.add("log_softmax", nothing, lambda q, k, v: (q @ k.mT * 0.3).log_softmax(-1) @ v)


@CASES.near_miss(described("scale -0.3", lowering="reference"))
def negated_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).neg().softmax(-1) @ v


@CASES.near_miss(described("scale 0.3"))
def softmax_written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT * 0.3).exp()
    return weights / weights.sum(-1, keepdim=True) @ v


@CASES.near_miss(described("scale 0.3"))
def softmax_written_out_less_the_largest(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * 0.3
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return weights / (weights.sum(-1, keepdim=True) + 1e-9) @ v


@CASES.near_miss(described("scale 0.3"), inputs=lambda: qkv(grad=False, dtype=torch.float64))
def softmax_by_its_logarithm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).log_softmax(-1).exp() @ v


@CASES.near_miss(described("scale 0.3"))
def softmax_written_out_over_keys_that_come_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (k @ q.mT * 0.3).exp()
    return (weights / weights.sum(-2, keepdim=True)).mT @ v


@CASES.near_miss(nothing)
def softmax_written_out_over_the_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT * 0.3).exp()
    return (weights / weights.sum(-2, keepdim=True)) @ v


@CASES.near_miss(described("sinks"))
def softmax_plus_one_written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT * 0.3).exp()
    return weights / (weights.sum(-1, keepdim=True) + 1) @ v


@CASES.near_miss(missed(WRITTEN, "exp and a division by its sum"))
def a_sum_without_gradient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT * 0.3).exp()
    return weights / weights.sum(-1, keepdim=True).detach() @ v


@CASES.near_miss(missed(FOLLOWED, "read elsewhere, too"))
def weights_written_out_that_are_returned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q @ k.mT * 0.3).exp()
    return weights / weights.sum(-1, keepdim=True) @ v, weights


CASES.add("a_temperature_beside_a_logarithm", nothing, lambda q, k, v: ((q @ k.mT * 0.3).log_softmax(-1) * 2).exp() @ v)
CASES.add("function_on_the_weights", missed(AFTER, "softmax is used by relu"), lambda q, k, v: weigh(q, k).relu() @ v)


# ---- changed weights ------------------------------------------------------------------------------------------------


CASES.add("weights_times_a_number", missed(AFTER, "softmax is used by mul"), lambda q, k, v: (weigh(q, k) * 1.0001) @ v)


@CASES.near_miss(missed(AFTER, "softmax is used by mul"), inputs=lambda: qkv(torch.tensor([1.0, 0.0, 1.0, 1.0])))
def head_mask(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    return (weigh(q, k) * kept[:, None, None]) @ v


@CASES.near_miss(missed(FOLLOWED, "another mask"), inputs=lambda: qkv(condition(LENGTH, LENGTH)))
def weights_masked_afterwards(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    return weigh(q, k).masked_fill(~kept, 0) @ v


@CASES.near_miss(described("dense bool"), inputs=lambda: qkv(condition(LENGTH, LENGTH)))
def masked_before_and_afterwards(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    weights = (q @ k.mT * 0.3).masked_fill(~kept, -1e9).softmax(-1)
    return weights.masked_fill(kept.logical_not(), 0.0) @ v


@CASES.near_miss(described("dense bool"), inputs=lambda: qkv(condition(BATCH, 1, LENGTH, LENGTH)))
def masked_before_and_multiplied_afterwards(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    weights = torch.where(kept, q @ k.mT * 0.3, -torch.inf).softmax(-1)
    return (weights * kept.to(weights.dtype)) @ v


def padded(q: Tensor, k: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Scores that are masked, and the mask, made anew."""
    kept = torch.arange(LENGTH)[None, :] < lengths[:, None]
    return (q @ k.mT * 0.3).masked_fill(~kept[:, None, None, :], -torch.inf), kept


@CASES.near_miss(described("right padding"), inputs=lambda: qkv(torch.tensor([4, 0])))
def masked_twice_by_masks_that_are_made_alike(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """The second row has no key."""
    scores, _ = padded(q, k, lengths)
    again = torch.arange(LENGTH)[None, :] < lengths[:, None]
    return scores.softmax(-1).masked_fill(~again[:, None, None, :], 0.0) @ v


@CASES.near_miss(missed(FOLLOWED, "another mask"), inputs=lambda: qkv(torch.tensor([4, 2])))
def masked_twice_and_one_key_less(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    scores, _ = padded(q, k, lengths)
    again = torch.arange(LENGTH)[None, :] < lengths[:, None] - 1
    return scores.softmax(-1).masked_fill(~again[:, None, None, :], 0.0) @ v


@CASES.near_miss(missed(FOLLOWED, "another mask"), inputs=lambda: qkv(torch.tensor([4, 2]), grad=False))
def lengths_are_written_in_between(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    scores, _ = padded(q, k, lengths)
    lengths.sub_(1)
    again = torch.arange(LENGTH)[None, :] < lengths[:, None]
    return scores.softmax(-1).masked_fill(~again[:, None, None, :], 0.0) @ v


@CASES.near_miss(missed(FOLLOWED, "another mask"), inputs=lambda: qkv(grad=False))
def two_draws(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    first, second = (torch.rand(LENGTH, LENGTH) < 0.7 for _ in range(2))
    return (q @ k.mT * 0.3).masked_fill(~first, -1e9).softmax(-1).masked_fill(~second, 0.0) @ v


@CASES.near_miss(missed(FOLLOWED, "another mask"), inputs=lambda: qkv(condition(LENGTH, LENGTH)))
def masked_before_and_the_rest_afterwards(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).masked_fill(~kept, -1e9).softmax(-1).masked_fill(kept, 0.0) @ v


@CASES.near_miss(missed(FOLLOWED, "another mask"), inputs=lambda: qkv(condition(LENGTH, LENGTH)))
def masked_before_and_transposed_afterwards(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    weights = (q @ k.mT * 0.3).masked_fill(~kept, -1e9).softmax(-1)
    return weights.mT.masked_fill(~kept, 0.0).mT @ v


@CASES.near_miss(missed(FOLLOWED, "another mask"), inputs=lambda: qkv(condition(LENGTH, LENGTH), grad=False))
def the_mask_is_written_before_it_masks_again(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    weights = (q @ k.mT * 0.3).masked_fill(kept, -1e9).softmax(-1)
    kept[:, 1:] = True
    return weights.masked_fill(kept, 0.0) @ v


@CASES.near_miss(described("dense bool"), inputs=lambda: qkv(condition(BATCH, 1, LENGTH, LENGTH)))
def a_row_without_keys_is_masked_afterwards(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    kept = kept & (torch.arange(LENGTH) != 2)[:, None]
    lowest = torch.finfo(q.dtype).min
    return (q @ k.mT * 0.3).masked_fill(~kept, lowest).softmax(-1).masked_fill(~kept, 0.0) @ v


@CASES.near_miss(missed(FOLLOWED, "another mask"), inputs=lambda: qkv(condition(LENGTH, LENGTH)))
def a_negation_is_written_before_it_masks_again(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    out = ~kept
    out[:, 0] = True
    return (q @ k.mT * 0.3).masked_fill(~kept, -1e9).softmax(-1).masked_fill(out, 0.0) @ v


@CASES.near_miss(missed(FOLLOWED, "another mask"), inputs=lambda: qkv(condition(LENGTH, LENGTH)))
def a_negation_is_of_an_older_mask(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    kept = kept.clone()
    out = ~kept
    kept[:, 0] = True
    return (q @ k.mT * 0.3).masked_fill(~kept, -1e9).softmax(-1).masked_fill(out, 0.0) @ v


@CASES.near_miss(missed(FOLLOWED, "another mask"), inputs=lambda: qkv(condition(LENGTH, LENGTH)))
def truth_values_as_numbers_are_written_before_they_mask_again(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    numbers = kept.to(q.dtype)
    numbers[:, 0] = 0.5
    return ((q @ k.mT * 0.3).masked_fill(~kept, -1e9).softmax(-1) * numbers) @ v


@CASES.near_miss(missed(FOLLOWED, "another mask"), inputs=lambda: qkv(condition(LENGTH, LENGTH)))
def a_negation_of_whole_numbers_masks_again(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    """~1 is -2, which is as true as ~0."""
    out = torch.logical_not(~kept.int())
    return (q @ k.mT * 0.3).masked_fill(~kept, -1e9).softmax(-1).masked_fill(out, 0.0) @ v


@CASES.near_miss(missed(AFTER, "softmax is used by"))
def weights_made_to_add_up_again(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = weigh(q, k)
    return weights / (weights.sum(-1, keepdim=True) + 1e-3) @ v


@CASES.near_miss(missed(FOLLOWED, "takes a part of the weights"), inputs=lambda: tensors(SHAPE, SHAPE, (2, 4, 5, 8)))
def last_weight_sliced_off(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weigh(q, k)[..., :-1] @ v


CASES.add(
    "only_the_first_queries", missed(FOLLOWED, "takes a part of the weights"), lambda q, k, v: weigh(q, k)[:, :, :2] @ v
)


@CASES.near_miss(missed(AFTER, "softmax is used by add"))
def weights_plus_identity(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (weigh(q, k) + torch.eye(LENGTH)) @ v


@CASES.near_miss(missed("the product with v contracts the axis"), inputs=lambda: qkv(normal(HEADS, HEADS, grad=True)))
def heads_mixed_before_the_values(q: Tensor, k: Tensor, v: Tensor, mix: Tensor) -> Tensor:
    return torch.einsum("bhqk,hg->bgqk", weigh(q, k), mix) @ v


@CASES.near_miss(missed(AFTER, "softmax is used by to"))
def weights_as_whole_numbers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (5 * q @ k.mT).softmax(-1).to(torch.int64) @ (v * 10).to(torch.int64)


@CASES.near_miss(missed(FOLLOWED, "two dropouts"))
def dropout_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.dropout(torch.dropout(weigh(q, k), 1.0, True), 1.0, True) @ v


@CASES.near_miss(described("scale 0.3"))
def dropout_switched_off(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.dropout_(torch.dropout_(torch.dropout(weigh(q, k), 0.5, False), 0.5, False), 0.0, True) @ v


# No lowering here has dropout, so the random numbers stay eager's.
CASES.add("dropout_left_alone", refused("0.5"), lambda q, k, v: torch.dropout(weigh(q, k), 0.5, True) @ v)


@CASES.near_miss(missed(AFTER, "softmax is used by dropout_"), inputs=lambda: qkv(grad=False))
def dropout_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.dropout_(weigh(q, k), 0.5, True) @ v


@CASES.near_miss(missed(AFTER, "softmax is used by"))
def alpha_dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.alpha_dropout(weigh(q, k), 0.5, True) @ v


@CASES.near_miss(
    refused("q bfloat16, k bfloat16, v float32"),
    inputs=lambda: [*tensors(SHAPE, SHAPE, dtype=torch.bfloat16), normal(*SHAPE)],
)
def values_more_precise_than_the_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).float().softmax(-1) @ v


@CASES.near_miss(described("scale 0.3"), inputs=lambda: tensors(SHAPE, SHAPE, SHAPE, dtype=torch.bfloat16))
def values_less_precise_than_the_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q.float() @ k.float().mT * 0.3).softmax(-1).bfloat16() @ v


# ---- other readers of the weights -----------------------------------------------------------------------------------


@CASES.near_miss(refused(RETURNED))
def weights_returned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = weigh(q, k)
    return weights @ v, weights


@CASES.near_miss(refused(RETURNED))
def entropy_of_the_weights(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = weigh(q, k)
    return weights @ v, -(weights * weights.log()).sum(-1).mean()


@CASES.near_miss(refused(RETURNED))
def weights_used_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = weigh(q, k)
    return weights @ v + weights @ v.flip(2)


@CASES.near_miss(refused(RETURNED))
def weights_written_through_a_view(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = weigh(q.detach(), k.detach())
    weights.view(-1)[0] = 0
    return weights @ v


@CASES.near_miss(described("scale 0.3", lowering="reference"))
def weights_times_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The weights are their own values: right, if not useful."""
    weights = weigh(q, k)
    return weights @ weights


# ---- gradients that are stopped -------------------------------------------------------------------------------------


CASES.add("q_detached", described("scale 0.3"), lambda q, k, v: weigh(q.detach(), k) @ v)


@CASES.near_miss(described("scale 0.3"))
def k_detached_between_its_views(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weigh(q, k.transpose(1, 2).contiguous().detach().transpose(1, 2).contiguous()) @ v


CASES.add("v_detached", described("scale 0.3"), lambda q, k, v: weigh(q, k) @ v.detach())
CASES.add("weights_detached", missed(AFTER, "softmax is used by detach"), lambda q, k, v: weigh(q, k).detach() @ v)


@CASES.near_miss(missed("between the product q kᵀ and the softmax", "detach"))
def scores_detached(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).detach().softmax(-1) @ v


@CASES.near_miss(missed(GRADIENT))
def weights_without_gradients(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        weights = weigh(q, k)
    return weights @ v


@CASES.near_miss(missed(GRADIENT))
def softmax_without_gradients(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * 0.3
    with torch.no_grad():
        weights = scores.softmax(-1)
    return weights @ v


@CASES.near_miss(described("scale 0.3"))
def product_with_v_without_gradients(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = weigh(q, k)
    with torch.no_grad():
        return weights @ v


@CASES.near_miss(described("scale 0.3"))
def k_made_contiguous_without_gradients(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        k = k.transpose(1, 2).contiguous()
    return weigh(q, k.transpose(1, 2)) @ v


@CASES.near_miss(described("scale 0.3"))
def k_scaled_without_a_gradient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Its constant factor is not folded: that would read k itself, with its gradient."""
    with torch.no_grad():
        k = k * 0.5
    return weigh(q, k) @ v


@CASES.near_miss(described("scale 0.6"))
def everything_read_without_a_gradient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The output has none, so the kernel may read above the scales and copies, and must not bring one back."""
    with torch.no_grad():
        q, k, v = q * 2, k.clone(), v.clone()
    return weigh(q, k) @ v


@CASES.near_miss(described("scale 0.45"))
def scores_without_a_gradient_times_values_without(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * 0.3
    with torch.no_grad():
        scores = scores * 1.5
    return scores.softmax(-1) @ v.detach()


@CASES.near_miss(described("dense additive"), inputs=lambda: qkv(normal(1, HEADS, LENGTH, LENGTH, grad=True)))
def bias_expanded_without_gradients(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    with torch.no_grad():
        bias = bias.expand(2, -1, -1, -1).contiguous()
    return (q @ k.mT * 0.3 + bias).softmax(-1) @ v


# ---- transforms -----------------------------------------------------------------------------------------------------

TRANSFORM = "the attention is not inside a transform of torch.func"


@CASES.near_miss(missed(TRANSFORM), inputs=lambda: qkv(grad=False))
def under_vmap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.func.vmap(lambda q, k, v: weigh(q, k) @ v)(q, k, v)


@CASES.near_miss(missed(TRANSFORM), inputs=lambda: qkv(grad=False))
def under_vmap_over_the_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.func.vmap(F.scaled_dot_product_attention, in_dims=1, out_dims=1)(q, k, v)


@CASES.near_miss(missed(TRANSFORM), inputs=lambda: qkv(grad=False))
def under_vmap_with_the_keys_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.func.vmap(lambda q, k, v: (k @ q.mT * 0.3).softmax(-2).mT @ v)(q, k, v)


@CASES.near_miss(missed(TRANSFORM), inputs=lambda: qkv(grad=False))
def under_grad(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.func.grad(lambda q, k, v: (weigh(q, k) @ v).square().sum())(q, k, v)


@CASES.near_miss(missed(TRANSFORM), inputs=lambda: qkv(grad=False))
def under_jvp(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return torch.func.jvp(lambda q, k: weigh(q, k) @ v, (q, k), (k, q))


@CASES.near_miss(described("scale 0.353553"), inputs=lambda: qkv(grad=False))
def mask_under_vmap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    positions = torch.arange(LENGTH)
    kept = torch.func.vmap(lambda i: positions <= i)(positions)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=kept)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_weights(case: Case) -> None:
    check(case)
