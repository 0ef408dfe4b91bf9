from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_compiler.reporting.facts import MissReport
from attn_compiler.spec.masks import Causal
from tests.passes.compiling import CPU_FLASH, compiled, mark
from tests.passes.matching.patterns import forms
from tests.passes.matching.patterns.forms import HKV, KEYS, B, Collection, D, Form, H, S, dense

FORMS = Collection()
form = FORMS.form
sdpa = F.scaled_dot_product_attention


@form()
def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k, v)


@form()
def by_keyword(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(value=v, key=k, query=q, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False)


@form(mask=(Causal(),))
def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k, v, None, 0.0, True)


@form(score="scale 0.125")
def other_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k, v, scale=0.125)


@form(score="scale 0.125")
def scale_left_to_q(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q * 0.125, k, v, scale=1.0)


@form(mask=dense(B, 1, S, S, dtype="bool"))
def bool_mask(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    return sdpa(q, k, v, allowed)


@form(mask=dense(B, 1, S, S))
def additive_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return sdpa(q, k, v, attn_mask=mask)


@form(mask=dense(B, 1, S, S))
def expanded_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return sdpa(q, k, v, attn_mask=mask.expand(-1, q.size(1), -1, -1).contiguous())


@form(mask=dense(B, 1, 1, S, dtype="bool"))
def key_padding(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    return sdpa(q, k, v, attn_mask=padding[:, None, None, :])


@form(mask=dense(1, H, S, S))
def bias_of_lower_rank(q: Tensor, k: Tensor, v: Tensor, position_bias: Tensor) -> Tensor:
    return sdpa(q, k, v, attn_mask=position_bias)


@form(k=(B, HKV, S, D), mask=dense(B, 1, S, S, dtype="bool"))
def grouped(q: Tensor, kv: Tensor, allowed: Tensor) -> Tensor:
    return sdpa(q, kv, kv, allowed, enable_gqa=True)


@form(k=(B, HKV, S, D), mask=(Causal(),))
def repeated_by_expand(q: Tensor, kv: Tensor) -> Tensor:
    batch, heads, length, dim = kv.shape
    k = kv[:, :, None].expand(-1, -1, 2, -1, -1).reshape(batch, heads * 2, length, dim)
    return sdpa(q, k, k, is_causal=True)


@form(k=(B, HKV, S, D), mask=(Causal(),))
def repeated_by_repeat_interleave(q: Tensor, kv: Tensor) -> Tensor:
    k = kv.repeat_interleave(2, 1)
    return sdpa(q, k, k, is_causal=True)


@form(k=(B, 1, S, D))
def broadcast_single_head(q: Tensor, one_kv: Tensor) -> Tensor:
    return sdpa(q, one_kv, one_kv)


@form(k=(B, 1, S, D))
def expanded_single_head(q: Tensor, one_kv: Tensor) -> Tensor:
    k = one_kv.expand(-1, q.size(1), -1, -1)
    return sdpa(q, k, k)


@form(q=(1, H, S, D), k=(1, H, S, D), mask=(Causal(),))
def three_dimensions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q[0], k[0], v[0], is_causal=True)


@form(q=(B * HKV, 2, S, D), k=(B * HKV, 2, S, D), mask=dense(B * HKV, 1, S, S, dtype="bool"))
def five_dimensions(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    q, k, v = (t.unflatten(1, (HKV, 2)) for t in (q, k, v))
    return sdpa(q, k, v, attn_mask=allowed[:, :, None])


@form(k=(B, HKV, S, D))
def five_dimensions_with_grouped_heads(q: Tensor, kv: Tensor) -> Tensor:
    k = kv[:, :, None]
    return sdpa(q.unflatten(1, (HKV, 2)), k, k).flatten(1, 2)


@form(k=(B, H, KEYS, D), lowering="untouched")
def cross_with_another_value_dim(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return sdpa(q, keys, values)


@form(k=(B, H, KEYS, D))
def cross(q: Tensor, keys: Tensor) -> Tensor:
    return sdpa(q, keys, keys)


@form()
def fused_qkv_by_permute(qkv: Tensor) -> Tensor:
    q, k, v = qkv.view(qkv.size(0), -1, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)
    return sdpa(q, k, v).transpose(1, 2).flatten(2)


@form()
def fused_qkv_by_split(qkv: Tensor) -> Tensor:
    q, k, v = (t.view(t.size(0), -1, H, D).transpose(1, 2) for t in qkv.split(H * D, dim=-1))
    return sdpa(q.contiguous(), k.contiguous(), v).transpose(1, 2).reshape(qkv.size(0), -1, H * D)


@form()
def heads_between_batch_and_length_in_memory(x: Tensor) -> Tensor:
    heads = x.unflatten(-1, (H, D)).transpose(1, 2)
    out = sdpa(heads, heads, heads)
    return out.transpose(1, 2).contiguous().view(x.shape)


def _name(spelling: Form) -> str:
    return spelling.name


@pytest.mark.in_turns
@pytest.mark.parametrize("backward", [False, True], ids=["inference", "backward"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("spelling", FORMS.forms, ids=_name)
def test_form(spelling: Form, dynamic: bool, backward: bool) -> None:
    forms.check(spelling, dynamic=dynamic, backward=backward)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("spelling", [f for f in FORMS.forms if f.lowering != "untouched"], ids=_name)
def test_form_in_bfloat16(spelling: Form) -> None:
    forms.check_bfloat16(spelling)


# ---- what the call says beyond its tensors ------------------------------------------------------------------------


def test_scale_of_a_symbolic_length_is_guarded_by_pytorch_and_right_at_every_length() -> None:
    def function(q: Tensor) -> Tensor:
        return sdpa(q, q, q, scale=1 / q.size(2))

    run = compiled(function, dynamic=True)
    for length in (20, 13):
        q = torch.randn(B, H, length, D)
        torch.testing.assert_close(run(q), function(q))
    assert [report.sites[0].spec.score.scale for report in run.reports] == [1 / 20, 1 / 13]


def test_scale_from_an_item_is_taken_at_run_time() -> None:
    def function(q: Tensor, scale: Tensor) -> Tensor:
        return sdpa(q * scale, q, q, scale=1.0)

    run = compiled(function)
    q = torch.randn(B, H, S, D)
    for scale in (0.1, 0.7):
        torch.testing.assert_close(run(q, torch.tensor(scale)), function(q, torch.tensor(scale)))
    assert len(run.reports) == 1


def test_symbolic_head_dim_without_a_scale_is_refused() -> None:
    run = compiled(sdpa)
    q = torch.randn(B, H, S, D)
    torch.testing.assert_close(run(mark(q, [D]), q, q), sdpa(q, q, q))
    assert _miss(run.report.misses).reason.rule == "the default scale needs a static head dim"


def _miss(misses: tuple[MissReport, ...]) -> MissReport:
    (miss,) = misses
    return miss


def test_dropout_in_training_is_described_and_left_to_the_model() -> None:
    run = compiled(lambda q: sdpa(q, q, q, dropout_p=0.5))
    q = torch.randn(B, H, S, D)
    torch.manual_seed(3)
    got = run(q)
    torch.manual_seed(3)
    torch.testing.assert_close(got, sdpa(q, q, q, dropout_p=0.5))
    assert run.site.spec.score.dropout_p == 0.5
    assert run.site.decision.lowering == "untouched"


def test_mask_that_wants_a_gradient_is_a_bias_and_gets_it() -> None:
    def function(q: Tensor, bias: Tensor) -> Tensor:
        return sdpa(q, q, q, attn_mask=bias)

    run = compiled(function)
    q, bias = torch.randn(B, H, S, D), torch.randn(1, H, S, S, requires_grad=True)
    (wanted,) = torch.autograd.grad(function(q, bias).sum(), bias)
    (got,) = torch.autograd.grad(run(q, bias).sum(), bias)
    torch.testing.assert_close(got, wanted)
    assert run.site.spec.score.bias is not None
    assert run.site.spec.mask.dense is None


def test_row_without_any_allowed_key_gives_zero() -> None:
    allowed = torch.ones(S, S, dtype=torch.bool)
    allowed[5] = False
    q = torch.randn(B, H, S, D)
    got = compiled(sdpa)(q, q, q, allowed)
    torch.testing.assert_close(got, sdpa(q, q, q, allowed))
    assert not got[:, :, 5].any()


def test_causal_from_the_top_left_with_more_keys_than_queries() -> None:
    def function(q: Tensor, k: Tensor) -> Tensor:
        return sdpa(q, k, k, is_causal=True)

    run = compiled(function)
    q, k = torch.randn(B, H, S, D), torch.randn(B, H, KEYS, D)
    torch.testing.assert_close(run(q, k), function(q, k))
    assert run.site.decision.lowering == "sdpa_cpu_flash"


def test_independent_batches_become_one_size_by_a_guard() -> None:
    """The call compares no sizes while compiling; a kernel that took them for equal would read past the end."""
    run = compiled(sdpa)
    q, k, v = torch.randn(B, H, S, D), torch.randn(B, H, KEYS, D), torch.randn(B, H, KEYS, D)
    torch.testing.assert_close(run(*(mark(t, [B, S, KEYS]) for t in (q, k, v))), sdpa(q, k, v))
    spec = run.site.spec
    assert isinstance(spec.batch, str)
    assert spec.batch == spec.k.shape[0] == spec.v.shape[0]
    assert spec.seqlen_kv == spec.v.shape[2] != spec.seqlen_q
    assert CPU_FLASH in run.calls


def test_two_dimensional_inputs_have_one_head() -> None:
    run = compiled(sdpa)
    q = torch.randn(S, D)
    torch.testing.assert_close(run(q, q, q), sdpa(q, q, q))
    assert (run.site.spec.batch, run.site.spec.num_heads_q) == (1, 1)


def test_score_bias_of_every_head_repeats_no_key() -> None:
    """Strides of zero in the mask stay: it is never written out."""
    run = compiled(lambda q, bias: sdpa(q, q, q, attn_mask=bias.expand(q.size(0), -1, -1, -1)))
    q, bias = torch.randn(B, H, S, D), torch.randn(1, H, S, S)
    run(q, bias)
    assert run.site.spec.mask.dense is not None
    assert run.site.spec.mask.dense.shape == (1, H, S, S)
