from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.passes.compiling import compiled
from tests.passes.matching.patterns import forms
from tests.passes.matching.patterns.forms import HKV, KEYS, B, Collection, D, Form, H, S, dense

LOWEST = torch.finfo(torch.float32).min
FORMS = Collection()
form = FORMS.form


# ---- the scale ----------------------------------------------------------------------------------------------------


@form()
def scale_by_division(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) / 4, -1) @ v


@form(score="scale 1")
def no_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


@form()
def scale_on_q(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul(q * 0.25, k.transpose(2, 3)).softmax(dim=-1).matmul(v)


@form()
def scale_on_k(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ (k / 4).swapaxes(2, 3), dim=-1) @ v


@form()
def scale_split(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax((q * 0.5) @ (0.5 * k).permute(0, 1, 3, 2), -1) @ v


@form()
def scale_by_full_tensor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k.mT / torch.full([], k.size(-1) ** 0.5, dtype=v.dtype, device=v.device), -1) @ v


@form()
def scale_by_made_tensor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k.mT * torch.tensor(0.25), -1) @ v


@form()
def scale_by_root_of_tensor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k.mT / torch.sqrt(torch.tensor(k.size(-1), dtype=q.dtype)), -1) @ v


@form(score=f"scale {1 / math.sqrt(S):.6g}", if_dynamic={"score": "scale 1 × run-time factor"})
def scale_by_length(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k.mT / math.sqrt(q.size(2)), -1) @ v


@form(score="scale 0.25 × run-time factor", trainable=("temperature",))
def learned_scale(q: Tensor, k: Tensor, v: Tensor, temperature: Tensor) -> Tensor:
    return F.softmax(q @ k.mT * 0.25 * temperature, -1) @ v


# ---- what leaves the weights what they are ------------------------------------------------------------------------


@form()
def scores_plus_a_number(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax((q @ k.mT + 8.0) * 0.25 - 3, -1) @ v


@form()
def scores_plus_a_weighed_number(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(torch.add(q @ k.mT * 0.25, 2.0, alpha=-3), -1) @ v


@form()
def weights_times_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (F.softmax(q @ k.mT * 0.25, -1) * 1.0 / 1) @ v


# ---- masks and biases ---------------------------------------------------------------------------------------------


@form(mask=dense(B, 1, S, S))
def added_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.softmax(q @ k.mT * 0.25 + mask, -1) @ v


@form(mask=dense(B, 1, S, S))
def added_mask_first(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.softmax(mask + q @ k.mT * 0.25, -1) @ v


@form(mask=dense(B, 1, S, S))
def mask_before_scale(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.softmax((q @ k.mT + mask) * 0.25, -1) @ v


@form(mask=dense(1, H, S, S))
def subtracted_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.softmax(q @ k.mT * 0.25 - bias, -1) @ v


@form(mask=dense(1, H, S, S))
def added_twice_the_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.softmax(torch.add(q @ k.mT * 0.25, bias, alpha=2), -1) @ v


@form(mask=dense(1, H, S, S))
def unsqueezed_bias(q: Tensor, k: Tensor, v: Tensor, position_bias: Tensor) -> Tensor:
    return F.softmax(q @ k.mT * 0.25 + position_bias[None], -1) @ v


@form(mask=dense(1, H, S, S))
def bias_of_lower_rank(q: Tensor, k: Tensor, v: Tensor, position_bias: Tensor) -> Tensor:
    return F.softmax(q @ k.mT * 0.25 + position_bias, -1) @ v


@form(mask=dense(B, 1, S, S, dtype="bool"))
def where_mask(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    return F.softmax(torch.where(allowed, q @ k.mT * 0.25, LOWEST), -1) @ v


@form(mask=dense(B, 1, S, S, dtype="bool"))
def where_mask_turned(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    scores = q @ k.mT * 0.25
    lowest = torch.full([], LOWEST, dtype=scores.dtype)
    return F.softmax(torch.where(~allowed, lowest, scores), -1) @ v


@form(mask=dense(B, 1, S, S, dtype="bool"))
def masked_fill(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    return F.softmax((q @ k.mT * 0.25).masked_fill(~allowed, -torch.inf), -1) @ v


@form(mask=dense(B, 1, S, S, dtype="bool"))
def masked_fill_in_place(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    return F.softmax((q @ k.mT * 0.25).masked_fill_(~allowed, -torch.inf), -1) @ v


@form(mask=dense(B, 1, 1, S, dtype="bool"))
def key_padding(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    return F.softmax((q @ k.mT * 0.25).masked_fill(~padding[:, None, None, :], -torch.inf), -1) @ v


@form(mask=dense(B, 1, 1, S, dtype="bool"))
def expanded_key_padding(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    scores = q @ k.mT * 0.25
    return (
        F.softmax(
            scores.masked_fill((padding == 0).view(q.size(0), 1, 1, -1).expand_as(scores), torch.finfo(q.dtype).min), -1
        )
        @ v
    )


@form(mask=dense(B, H, S, S, terms=3))
def bias_and_two_masks(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, allowed: Tensor, mask: Tensor) -> Tensor:
    return F.softmax((q @ k.mT * 0.25 + bias).masked_fill(~allowed, -torch.inf) + mask, -1) @ v


@form(mask=dense(1, H, S, S))
def scale_and_bias_in_place(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = q @ k.mT
    scores *= 0.25
    scores += bias
    return F.softmax(scores, -1) @ v


@form(mask=dense(B, 1, S, S))
def floored_at_the_lowest_number(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.max(q @ k.mT * 0.25 + mask, torch.tensor(torch.finfo(q.dtype).min))
    return F.softmax(scores, -1) @ v


@form(mask=dense(B, 1, S, S))
def clamped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.softmax((q @ k.mT * 0.25 + mask).clamp(torch.finfo(q.dtype).min, torch.finfo(q.dtype).max), -1) @ v


# ---- the softmax --------------------------------------------------------------------------------------------------


@form(mask=dense(B, 1, S, S))
def softmax_in_float32(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.softmax(q @ k.mT * 0.25 + mask, dim=-1, dtype=torch.float32).to(q.dtype) @ v


@form(mask=dense(B, 1, S, S))
def scores_in_float32(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax((q @ k.mT).float() * 0.25 + mask, -1).type_as(v) @ v


@form()
def softmax_module_and_inactive_dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.nn.Softmax(dim=3)(q @ k.mT * 0.25)
    return F.dropout(weights, p=0.1, training=False) @ v


@form()
def largest_score_subtracted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * 0.25
    return F.softmax(scores - scores.amax(-1, keepdim=True).detach(), -1) @ v


@form()
def largest_score_subtracted_by_max(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * 0.25
    return F.softmax(scores - scores.max(dim=-1, keepdim=True)[0], -1) @ v


@form(mask=dense(B, 1, S, S), score="scale 0.25, softcap 5", lowering="untouched")
def softcap(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.tanh(q @ k.mT * 0.25 / 5.0) * 5.0
    return F.softmax(scores + mask, -1) @ v


@form(mask=dense(B, 1, S, S), score="scale 0.25, sinks", lowering="untouched", trainable=("sinks",))
def sink_column(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
    scores = q @ k.mT * 0.25 + mask
    joined = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(scores.size(0), -1, scores.size(2), -1)], dim=-1)
    joined = joined - joined.max(dim=-1, keepdim=True).values
    return F.softmax(joined, dim=-1, dtype=joined.dtype)[..., :-1] @ v


@form(k=(B, HKV, S, D), mask=dense(B, 1, S, S), score="scale 0.25, sinks", lowering="untouched", trainable=("sinks",))
def sink_column_beside_repeated_heads(q: Tensor, kv: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
    k = kv[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2)
    scores = q @ k.mT * 0.25 + mask
    joined = torch.cat([scores, sinks.view(1, H, 1, 1).expand(scores.size(0), H, scores.size(2), 1)], dim=-1)
    return F.softmax(joined, dim=-1)[..., :-1] @ k


@form(lowering="untouched", returns_weights=True)
def returned_weights(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = F.softmax(q @ k.mT * 0.25, -1)
    return weights @ v, weights


# ---- the products -------------------------------------------------------------------------------------------------


@form(mask=dense(B, 1, S, S))
def bmm(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    batch, heads, length, _ = q.shape
    q, k, v = (t.reshape(batch * heads, length, -1) for t in (q, k, v))
    scores = torch.bmm(q * 0.25, k.transpose(1, 2)).view(batch, heads, length, length) + mask
    weights = F.softmax(scores.view(batch * heads, length, length), -1)
    out = torch.bmm(weights, v).view(batch, heads, length, -1)
    return out.transpose(1, 2).reshape(batch, length, -1)


@form(mask=dense(B, H, S, S, terms=2))
def baddbmm(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    batch, heads, length, _ = q.shape
    q, k, v = (t.reshape(batch * heads, length, -1) for t in (q, k, v))
    repeated = bias.expand(batch, -1, -1, -1).reshape(batch * heads, length, length)
    scores = repeated.baddbmm(batch1=q, batch2=k.transpose(1, 2), beta=1.0, alpha=0.25)
    scores = scores.view(batch, heads, length, length) + mask
    return torch.bmm(F.softmax(scores, -1).view(batch * heads, length, length), v)


@form()
def baddbmm_into_nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    batch, heads, length, _ = q.shape
    q, k, v = (t.reshape(batch * heads, length, -1) for t in (q, k, v))
    empty = torch.empty(batch * heads, length, length, dtype=q.dtype)
    scores = torch.baddbmm(empty, q, k.transpose(1, 2), beta=0, alpha=0.25)
    return torch.bmm(scores.softmax(-1), v).unflatten(0, (batch, heads))


@form(mask=dense(B, 1, S, S))
def einsum(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.25 + mask
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


@form()
def einsum_with_ellipsis(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("...qd,...kd->...qk", q, k) * 0.25
    return torch.einsum("...qk,...kd->...qd", scores.softmax(-1), v)


@form()
def keys_before_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhkq", q, k) * 0.25
    return torch.einsum("bhkq,bhkd->bhqd", scores.softmax(2), v)


@form()
def transposed_throughout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = F.softmax(k @ q.mT * 0.25, dim=-2)
    return (v.mT @ weights).mT


@form(q=(1, 1, S, D), k=(1, 1, S, D))
def one_head_of_matrices(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t[0, 0] for t in (q, k, v))
    return torch.mm(F.softmax(torch.mm(q, k.t()) * 0.25, -1), v)


# ---- heads --------------------------------------------------------------------------------------------------------


@form(k=(B, HKV, S, D))
def repeated_by_expand(q: Tensor, kv: Tensor) -> Tensor:
    batch, heads, length, dim = kv.shape
    k = kv[:, :, None, :, :].expand(batch, heads, 2, length, dim).reshape(batch, heads * 2, length, dim)
    return F.softmax(q @ k.mT * 0.25, -1) @ k


@form(k=(B, HKV, S, D))
def repeated_by_repeat_interleave(q: Tensor, kv: Tensor) -> Tensor:
    k = kv.repeat_interleave(2, dim=1)
    return F.softmax(q @ k.mT * 0.25, -1) @ torch.repeat_interleave(kv, repeats=2, dim=1)


@form(q=(B * 2, HKV, S, D), k=(B * 2, HKV, S, D))
def repeated_by_tiling(q: Tensor, kv: Tensor) -> Tensor:
    k = kv.repeat(1, 2, 1, 1)
    return F.softmax(q @ k.mT * 0.25, -1) @ k


@form(k=(B, HKV, S, D), mask=dense(B, 1, S, S))
def grouped_by_broadcasting(q: Tensor, kv: Tensor, mask: Tensor) -> Tensor:
    grouped = q.unflatten(1, (HKV, -1))
    k = kv[:, :, None]
    return (F.softmax(grouped @ k.mT * 0.25 + mask[:, :, None], -1) @ k).flatten(1, 2)


@form(k=(B, 1, S, D), mask=dense(B, 1, S, S))
def one_key_head(q: Tensor, one_kv: Tensor, mask: Tensor) -> Tensor:
    return F.softmax(q @ one_kv.mT * 0.25 + mask, -1) @ one_kv


@form(
    q=(1, B, H * S, D),
    k=(1, B, S, D),
    mask=dense(1, B, H * S, S),
    if_dynamic={"q": (B, 1, H * S, D), "k": (B, 1, S, D), "mask": dense(B, 1, H * S, S)},
)
def one_key_head_with_flat_queries(q: Tensor, one_kv: Tensor, mask: Tensor) -> Tensor:
    batch, heads, length, dim = q.shape
    k = one_kv.squeeze(1)
    scores = torch.bmm(q.reshape(batch, heads * length, dim), k.transpose(1, 2)).view(batch, heads, length, length)
    weights = F.softmax(scores * 0.25 + mask, -1).view(batch, heads * length, length)
    return torch.bmm(weights, k).view(batch, heads, length, dim)


@form(q=(B, H, S, D), k=(B, H, KEYS, D), lowering="untouched")
def cross_with_another_value_dim(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return F.softmax(q @ keys.mT * 0.25, -1) @ values


@form(k=(B, H, KEYS, D))
def cross(q: Tensor, keys: Tensor) -> Tensor:
    return F.softmax(q @ keys.mT * 0.25, -1) @ keys


@form()
def heads_of_one_projection(x: Tensor) -> Tensor:
    heads = x.view(x.size(0), -1, H, D).transpose(1, 2)
    out = F.softmax(heads @ heads.transpose(2, 3) * 0.25, -1) @ heads
    return out.transpose(1, 2).contiguous().view(x.shape)


@form()
def fused_qkv_by_permute(qkv: Tensor) -> Tensor:
    q, k, v = qkv.view(qkv.size(0), -1, 3, H, D).permute(2, 0, 3, 1, 4)
    out = F.softmax(q @ k.mT * 0.25, -1) @ v
    return out.permute(0, 2, 1, 3).flatten(2)


@form()
def fused_qkv_by_chunk(qkv: Tensor) -> Tensor:
    q, k, v = (t.unflatten(-1, (H, D)).transpose(1, 2) for t in qkv.chunk(3, dim=-1))
    return F.softmax(q @ k.mT * 0.25, -1) @ v


@form(mask=dense(B, H, S, S, terms=2))
def windows_of_rank_five(q: Tensor, bias: Tensor, allowed: Tensor) -> Tensor:
    batch, heads, length, _ = q.shape
    scores = q @ q.mT * 0.25 + bias
    outside = torch.where(allowed, 0.0, -100.0).to(q.dtype)
    scores = scores.view(1, batch, heads, length, length) + outside.unsqueeze(0)
    return scores.view(-1, heads, length, length).softmax(-1) @ q


#: forms whose tensors are reached in different ways: enough where the whole list would only repeat itself
CROSS_SECTION = (
    scale_on_q,
    learned_scale,
    scale_by_length,
    added_mask,
    where_mask,
    masked_fill_in_place,
    bias_and_two_masks,
    softmax_in_float32,
    scores_in_float32,
    sink_column,
    returned_weights,
    bmm,
    baddbmm,
    einsum,
    repeated_by_expand,
    grouped_by_broadcasting,
    fused_qkv_by_permute,
)
SOME = [f for f in FORMS.forms if f.function in CROSS_SECTION]


def _name(spelling: Form) -> str:
    return spelling.name


@pytest.mark.in_turns
@pytest.mark.parametrize("backward", [False, True], ids=["inference", "backward"])
@pytest.mark.parametrize("spelling", FORMS.forms, ids=_name)
def test_form(spelling: Form, backward: bool) -> None:
    forms.check(spelling, dynamic=False, backward=backward)


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("spelling", FORMS.forms, ids=_name)
def test_form_in_symbolic_sizes(spelling: Form) -> None:
    forms.check(spelling, dynamic=True, backward=True)


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("spelling", SOME, ids=_name)
def test_form_in_symbolic_sizes_without_gradients(spelling: Form) -> None:
    forms.check(spelling, dynamic=True, backward=False)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("spelling", [f for f in SOME if f.lowering != "untouched"], ids=_name)
def test_form_in_bfloat16(spelling: Form) -> None:
    forms.check_bfloat16(spelling)


@pytest.mark.parametrize("backward", [False, True], ids=["inference", "backward"])
@pytest.mark.parametrize(
    "spelling", [f for f in FORMS.forms if f.lowering == "untouched" and not f.returns_weights], ids=_name
)
def test_form_on_the_reference(spelling: Form, backward: bool) -> None:
    """What no kernel does yet is still understood well enough to be computed from its spec alone."""
    tensors = forms.inputs(spelling, backward=backward)
    run = compiled(spelling.function, lowering="reference")
    forms.assert_same(forms.results(run, tensors), forms.results(spelling.function, tensors))
    assert run.calls.count("reference") == 1
    assert "softmax" not in run.calls


def test_learned_bias_on_the_reference_gets_its_gradient() -> None:
    spelling = dataclasses.replace(next(f for f in FORMS.forms if f.name == "bias_and_two_masks"), trainable=("bias",))
    tensors = forms.inputs(spelling, backward=True)
    run = compiled(spelling.function, lowering="reference")
    forms.assert_same(forms.results(run, tensors), forms.results(spelling.function, tensors))
    assert run.site.spec.score.bias is not None


@pytest.mark.parametrize("lowering", ["sdpa_cpu_flash", "reference"])
def test_dropout_in_training_is_described_and_left_to_the_model(lowering: str) -> None:
    def function(q: Tensor) -> Tensor:
        return F.dropout(F.softmax(q @ q.mT * 0.25, -1), p=0.5, training=True) @ q

    run = compiled(function, lowering=lowering)
    q = torch.randn(B, H, S, D)
    torch.manual_seed(3)
    got = run(q)
    torch.manual_seed(3)
    torch.testing.assert_close(got, function(q))
    assert run.site.spec.score.dropout_p == 0.5
    assert run.site.decision.lowering == "untouched"


def capped(q: Tensor, cap: float) -> Tensor:
    return F.softmax(torch.tanh(q @ q.mT * 0.25 / cap) * cap, -1) @ q


def with_alpha(q: Tensor, alpha: float) -> Tensor:
    q = q.flatten(0, 1)
    return F.softmax(torch.baddbmm(q.new_ones(1, 1, 1), q, q.mT, alpha=alpha), -1) @ q


def with_alpha_in_checkpoint(q: Tensor, alpha: float) -> Tensor:
    return checkpoint(with_alpha, q, alpha, use_reentrant=False)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("function", [capped, with_alpha, with_alpha_in_checkpoint])
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_a_symbolic_number_that_a_kernel_is_made_with_is_fixed(function: Callable[..., Tensor], inner: str) -> None:
    """dynamic=True makes symbols of a model's own numbers: without that, Gemma 2 kept its attention as it was."""
    run = compiled(function, dynamic=True, lowering="reference", inner=inner)
    q = torch.randn(B, H, S, D)
    for number in (5.0, 3.0, 5.0):
        torch.testing.assert_close(run(q, number), function(q, number), rtol=1e-4, atol=1e-5)
    found = [(site.decision.lowering, site.spec.score.words) for report in run.reports for site in report.sites]
    end = "softcap {}" if function is capped else "scale {}"
    assert [(lowering, words.endswith(end.format(n))) for (lowering, words), n in zip(found, (5, 3), strict=True)] == [
        ("reference", True)
    ] * 2


def test_a_number_made_of_sizes_is_not_fixed() -> None:
    """Lengths would be fixed by it."""

    def function(q: Tensor) -> Tensor:
        return F.softmax(torch.tanh(q @ q.mT) * q.size(2) ** 0.5, -1) @ q

    run = compiled(function, dynamic=True)
    for length in (5, 6):
        q = torch.randn(2, 2, length, 4)
        torch.testing.assert_close(run(q), function(q))
    assert "a run-time scale after" in run.site.spec.score.words


def test_two_dropouts_are_refused() -> None:
    def function(q: Tensor) -> Tensor:
        return F.dropout(F.dropout(F.softmax(q @ q.mT, -1), 0.5), 0.5) @ q

    run = compiled(function)
    run(torch.randn(B, H, S, D))
    assert run.report.num_misses == 1


def test_ways_up_that_meet_again_are_not_tried_in_every_combination() -> None:
    """Either side of each sum could carry the scores: 2 to the 30 ways, none of which leads to a product."""

    def function(x: Tensor) -> Tensor:
        y = x
        for _ in range(30):
            y = y + y * 0.01
        return F.softmax(y, -1) @ x.mT

    run = compiled(function)
    x = torch.randn(B, H, S, D)
    torch.testing.assert_close(run(x), function(x))
    assert run.report.num_misses == 1
    assert run.report.total_seconds < 10


def test_baddbmm_with_beta_zero_is_left_alone_where_its_addend_wants_a_gradient() -> None:
    """The gradient is zero, and a caller may ask for it."""

    def attention(m: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.baddbmm(m, q, k.mT, beta=0).softmax(-1) @ v

    q, k, v = (torch.randn(2, 3, 4) for _ in range(3))
    m = torch.randn(2, 3, 3, requires_grad=True)

    def of_values(m: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.baddbmm(m, (q @ k.mT).softmax(-1), v, beta=0)

    for function, added in ((attention, m), (of_values, torch.randn(2, 3, 4, requires_grad=True))):
        out = compiled(function, strict=True)(added, q, k, v)
        (gradient,) = torch.autograd.grad(out.sum(), added)
        assert not gradient.any()
