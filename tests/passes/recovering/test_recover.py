"""The spec of a site: shapes, strides and dtypes as a kernel would see them, and what the mask was proved to be."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_compiler.index_expr import Expr
from attn_compiler.passes.recovering import reading
from attn_compiler.reasons.errors import AttnCompilerWarning
from attn_compiler.reporting.facts import SiteReport
from attn_compiler.spec.added_scores import Alibi
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.masks import Causal, Dense, Flag, MaskSpec
from attn_compiler.spec.scores import DenseBias, Sinks, Softcap
from tests.passes.compiling import CPU_FLASH, Compiled, compiled, mark

B, H, HKV, S, D = 2, 4, 2, 6, 8
sdpa = F.scaled_dot_product_attention


def _run(function: Callable[..., Tensor], *inputs: Tensor) -> Compiled:
    run = compiled(function)
    close = 2e-2 if inputs[0].dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(run(*inputs), function(*inputs), atol=close, rtol=close)
    return run


def _site(function: Callable[..., Tensor], *inputs: Tensor) -> SiteReport:
    return _run(function, *inputs).site


def _spec(function: Callable[..., Tensor], *inputs: Tensor) -> AttentionSpec:
    return _site(function, *inputs).spec


def _q() -> Tensor:
    return torch.randn(B, H, S, D)


# ---- tensors ------------------------------------------------------------------------------------------------------


def test_operands_in_logical_order_with_the_strides_they_have() -> None:
    spec = _spec(lambda x, y: sdpa(x.transpose(1, 2), y, y), torch.randn(B, S, H, D), torch.randn(B, H, 9, D))
    assert spec.q.shape == (B, H, S, D)
    assert spec.q.strides == (S * H * D, D, H * D, 1)
    assert spec.k.shape == spec.v.shape == (B, H, 9, D)
    assert (spec.seqlen_q, spec.seqlen_kv, spec.head_dim_qk, spec.head_dim_v) == (S, 9, D, D)
    assert (spec.device, spec.dtype, spec.out_dtype) == ("cpu", "float32", "float32")


def test_what_guards_say_of_a_symbolic_length() -> None:
    """A table of positions has an end: a longer call compiles anew."""
    table = torch.randn(64, D)

    def bounded(q: Tensor) -> Tensor:
        at = q + table[: q.shape[2]]
        return sdpa(at, at, at, is_causal=True)

    for function, ranges in ((bounded, (2, 64)), (lambda q: sdpa(q, q, q, is_causal=True), None)):
        q = _q()
        torch._dynamo.mark_dynamic(q, 2)
        spec = _spec(function, q)
        assert isinstance(spec.seqlen_q, str)
        assert [(one.size, one.least, one.most) for one in spec.ranges] == (
            [] if ranges is None else [(spec.seqlen_q, *ranges)]
        )
    assert _spec(bounded, _q()).ranges == ()


def test_gradients_of_each_operand() -> None:
    q, k = _q().requires_grad_(), _q()
    spec = _spec(lambda q, k: sdpa(q, k, k), q, k)
    assert (spec.needs_grad, spec.q.requires_grad, spec.k.requires_grad) == (True, True, False)


def test_symbolic_sizes_have_their_names_and_equal_ones_the_same() -> None:
    x = mark(torch.randn(3, 9, H * D), [3, 9])
    spec = _spec(lambda x: sdpa(*[x.unflatten(-1, (H, D)).transpose(1, 2)] * 3), x)
    batch, heads, length, dim = spec.q.shape
    assert isinstance(batch, str)
    assert isinstance(length, str)
    assert (heads, dim) == (H, D)
    assert spec.k.shape == spec.q.shape
    assert spec.q.strides[2] == H * D


def test_layers_that_agree_share_one_spec_and_those_that_do_not_have_their_own() -> None:
    def function(q: Tensor) -> Tensor:
        return sdpa(sdpa(q, q, q), q, q) + sdpa(q, q, q, is_causal=True)

    run = _run(function, _q())
    assert [len(site.modules) for site in run.report.sites] == [2, 1]
    texts = [site.spec.to_text() for site in run.report.sites]
    assert len(set(texts)) == 2
    assert [AttentionSpec.from_text(text) for text in texts] == [site.spec for site in run.report.sites]


# ---- scores -------------------------------------------------------------------------------------------------------


def test_dtype_of_the_models_softmax() -> None:
    q = _q().bfloat16()
    spec = _spec(lambda q: F.softmax(q @ q.mT, -1, dtype=torch.float32).to(q.dtype) @ q, q)
    assert (spec.dtype, spec.score.softmax_dtype) == ("bfloat16", "float32")
    assert _spec(lambda q: F.softmax(q @ q.mT, -1) @ q, q).score.softmax_dtype == "bfloat16"


def test_softcap_sinks_bias_and_dropout_are_described() -> None:
    sinks, bias = torch.randn(H, requires_grad=True), torch.randn(1, H, S, S, requires_grad=True)

    def function(q: Tensor, sinks: Tensor, bias: Tensor) -> Tensor:
        scores = torch.tanh(q @ q.mT / 30.0) * 30.0 + bias
        column = sinks.view(1, H, 1, 1).expand(B, H, S, 1)
        return F.dropout(F.softmax(torch.cat([scores, column], -1), -1)[..., :-1], 0.0) @ q

    score = _spec(function, _q(), sinks, bias).score
    assert score.softcap == 30.0
    assert score.sinks == Sinks(requires_grad=True)
    assert score.bias == DenseBias(shape=(1, H, S, S), dtype="float32")
    assert {type(change) for change in score.changes} == {Softcap, Sinks, DenseBias}


# ---- masks --------------------------------------------------------------------------------------------------------


def test_a_causal_mask_made_in_the_graph_becomes_the_kernels_own_flag() -> None:
    def function(q: Tensor) -> Tensor:
        allowed = torch.ones(q.size(2), q.size(2), dtype=torch.bool).tril()
        return sdpa(q, q, q, attn_mask=allowed)

    run = _run(function, _q())
    assert run.site.spec.mask == MaskSpec(kinds=(Causal(),), flag=Flag.READ)
    assert "tril" not in run.calls
    assert any("not needed" in note for note in run.site.notes)


def test_an_additive_causal_mask_made_in_the_graph() -> None:
    def function(q: Tensor) -> Tensor:
        mask = torch.full((S, S), torch.finfo(q.dtype).min).triu(1)
        return F.softmax(q @ q.mT * 0.25 + mask, -1) @ q

    assert _spec(function, _q()).mask == MaskSpec(kinds=(Causal(),), flag=Flag.READ)


def test_a_mask_that_lets_everything_through_is_dropped() -> None:
    def function(q: Tensor) -> Tensor:
        return sdpa(q, q, q, attn_mask=torch.zeros(S, S))

    run = _run(function, _q())
    assert run.site.spec.mask.kinds == ()
    assert CPU_FLASH in run.calls


def test_a_causal_mask_with_more_keys_than_queries_stays_a_tensor() -> None:
    """PyTorch's is_causal starts top left in a rectangle; this one does not, and only a proof may say so."""

    def function(q: Tensor, k: Tensor) -> Tensor:
        rows = torch.arange(S)[:, None] + 3
        return sdpa(q, k, k, attn_mask=torch.arange(S + 3) <= rows)

    site = _site(function, _q(), torch.randn(B, H, S + 3, D))
    assert isinstance(site.spec.mask.dense, Dense)
    assert not site.spec.mask.is_causal


def test_a_mask_from_outside_is_a_tensor_whatever_it_holds() -> None:
    """A causal one too: the next call may bring another."""
    site = _site(lambda q, mask: sdpa(q, q, q, mask), _q(), torch.ones(S, S, dtype=torch.bool).tril())
    assert (site.spec.mask.kinds, site.spec.mask.dense) == ((), Dense(shape=(1, 1, S, S), dtype="bool"))


def test_a_bias_that_wants_a_gradient_is_never_read_as_a_mask() -> None:
    bias = torch.zeros(S, S, requires_grad=True)
    spec = _spec(lambda q, bias: sdpa(q, q, q, attn_mask=bias * 1.0), _q(), bias)
    assert spec.mask.dense is None
    assert spec.score.bias is not None


def test_several_masks_are_one_tensor() -> None:
    def function(q: Tensor, a: Tensor, b: Tensor, allowed: Tensor) -> Tensor:
        return F.softmax((q @ q.mT * 0.25 + a + b).masked_fill(~allowed, -torch.inf), -1) @ q

    allowed = torch.ones(B, 1, S, S, dtype=torch.bool).tril()
    spec = _spec(function, _q(), torch.randn(1, H, S, S), torch.randn(S), allowed)
    assert spec.mask.dense == Dense(shape=(B, H, S, S), dtype="float32", terms=3)


# ---- what is added ------------------------------------------------------------------------------------------------


def _alibi(q: Tensor, slopes: Tensor) -> Tensor:
    positions = torch.arange(q.size(2))
    return slopes[:, None, None] * (positions[None, :] - positions[:, None])


def test_a_bias_and_a_mask_in_one_tensor_are_described_apart_and_stay_dense() -> None:
    def function(q: Tensor, slopes: Tensor) -> Tensor:
        causal = torch.ones(q.size(2), q.size(2), dtype=torch.bool).tril()
        return sdpa(q, q, q, attn_mask=_alibi(q, slopes).masked_fill(~causal, torch.finfo(q.dtype).min))

    spec = _spec(function, _q(), torch.rand(H))
    assert spec.mask.dense == Dense(shape=(1, H, S, S), dtype="float32")
    assert (spec.mask.kinds, spec.mask.flag) == ((Causal(),), None)
    assert spec.score.changes == ()
    assert [type(kind) for kind in spec.score.proved] == [Alibi]
    assert AttentionSpec.from_text(spec.to_text()) == spec


def test_a_learned_bias_is_described_and_keeps_its_gradient() -> None:
    slopes = torch.rand(H, requires_grad=True)
    spec = _spec(lambda q, slopes: sdpa(q, q, q, attn_mask=_alibi(q, slopes)), _q(), slopes)
    assert spec.score.bias == DenseBias(shape=(1, H, S, S), dtype="float32")
    (kind,) = spec.score.proved
    assert isinstance(kind, Alibi)
    assert kind.requires_grad


def test_a_mask_that_wants_a_gradient_is_not_dropped() -> None:
    zeros = torch.zeros(1, requires_grad=True)

    def function(q: Tensor, zeros: Tensor) -> Tensor:
        causal = torch.ones(S, S, dtype=torch.bool).tril()
        return sdpa(q, q, q, attn_mask=torch.where(causal, zeros, -torch.inf))

    spec = _spec(function, _q(), zeros)
    assert not spec.mask.is_causal
    assert spec.mask.read == (Causal(),)
    assert spec.score.bias is not None


def test_layers_with_tables_of_their_own_share_a_spec() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(2 * S - 1, H))

        def forward(self, q: Tensor) -> Tensor:
            positions = torch.arange(S)
            bias = self.table[positions[None, :] - positions[:, None] + S - 1].permute(2, 0, 1)
            return sdpa(q, q, q, attn_mask=bias)

    layers = torch.nn.Sequential(Layer(), Layer()).requires_grad_(False)
    (site,) = _run(layers, _q()).report.sites
    assert len(site.modules) == 2
    assert site.spec.score.added == "relative bias table[f(k - q), h]"


def test_a_learned_bias_is_left_whole() -> None:
    """Its gradient is the model's own to sum over the queries."""

    def function(q: Tensor, bias: Tensor) -> Tensor:
        return sdpa(q, q, q, attn_mask=bias + 0.0 * torch.arange(S)[:, None])

    bias = torch.randn(1, H, 1, S)
    spec = compiled(function, lowering="untouched")
    spec(_q(), bias.requires_grad_())
    assert spec.site.spec.score.bias == DenseBias(shape=(1, H, S, S), dtype="float32")
    assert spec.site.spec.score.proved[0].words.startswith("bias")


# ---- what breaks while a mask is read --------------------------------------------------------------------------------


def _two_masks(q: Tensor, m: Tensor) -> Tensor:
    """A causal mask, and one that a rule of reading stumbles over."""
    positions = torch.arange(S)
    first = sdpa(q, q, q, attn_mask=positions[:, None] >= positions[None, :])
    return sdpa(first, q, q, attn_mask=(m.remainder(3) == 0)[None, :])


def _broken(error: Exception) -> mock._patch[object]:
    def rule(*_: object) -> Expr | None:
        raise error

    return mock.patch.dict(reading.READERS, {torch.ops.aten.remainder.Scalar: rule})


@pytest.mark.parametrize("error", [KeyError("q"), ZeroDivisionError()])
def test_an_exception_while_a_mask_is_read_costs_that_mask(error: Exception) -> None:
    q, m = torch.randn(1, 2, S, D), torch.arange(S)
    run = compiled(_two_masks, strict=False)
    with _broken(error), pytest.warns(AttnCompilerWarning, match=type(error).__name__) as warned:
        torch.testing.assert_close(run(q, m), _two_masks(q, m))
    assert len(warned) == 1
    first, second = (site.spec.mask for site in run.report.sites)
    assert first.is_causal
    assert second.dense is not None
    assert second.kinds == ()
    assert type(error).__name__ in str(second.reason)
    assert str(error) in str(second.reason)


def test_a_full_stack_while_a_mask_is_read_is_a_reason() -> None:
    q, m = torch.randn(1, 2, S, D), torch.arange(S)
    run = compiled(_two_masks)
    with _broken(RecursionError("maximum recursion depth exceeded")):
        torch.testing.assert_close(run(q, m), _two_masks(q, m))
    first, second = (site.spec.mask for site in run.report.sites)
    assert first.is_causal
    assert second.dense is not None
    assert "stack" in str(second.reason)


def test_layers_with_one_broken_mask_warn_once() -> None:
    def function(q: Tensor, m: Tensor) -> Tensor:
        for _ in range(3):
            q = sdpa(q, q, q, attn_mask=(m.remainder(3) == 0)[None, :])
        return q

    run = compiled(function, strict=False)
    with _broken(KeyError("q")), pytest.warns(AttnCompilerWarning) as warned:
        run(torch.randn(1, 2, S, D), torch.arange(S))
    assert len(warned) == 1
    assert sum(len(site.modules) for site in run.report.sites) == 3


def test_an_exception_while_a_mask_is_read_is_raised_if_strict() -> None:
    run = compiled(_two_masks)
    with _broken(KeyError("q")), pytest.raises(Exception, match=r"recover.*KeyError"):
        run(torch.randn(1, 2, S, D), torch.arange(S))
