"""torch.nn's own attention: calls that hide the whole computation in one node, in training and on the inference fast path."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_compiler.passes.spelling import expand
from tests.passes.compiling import CPU_FLASH, Compiled, captured, compiled

B, S, E, H = 2, 6, 16, 4
FUSED = ("multi_head_attention_forward", "_native_multi_head_attention", "_transformer_encoder_layer_fwd")


def _x(*shape: int) -> Tensor:
    return torch.randn(shape or (B, S, E), generator=torch.Generator().manual_seed(0))


def _mha(**kwargs: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    return nn.MultiheadAttention(E, H, **{"batch_first": True, **kwargs})


def _outputs(result: Any) -> list[Tensor]:
    return [t for t in (result if isinstance(result, tuple) else (result,)) if t is not None]


def _check(module: nn.Module, *args: Any, train: bool = False, **kwargs: Any) -> Compiled:
    """Outputs equal eager's; in training also every parameter's gradient. No fused call is left.

    On the inference fast path PyTorch's own compilers give other strides than eager, too.
    """
    module.train(train)
    run = compiled(lambda *a, **k: module(*a, **k))
    with torch.set_grad_enabled(train):
        wanted, got = _outputs(module(*args, **kwargs)), _outputs(run(*args, **kwargs))
    for mine, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, right, atol=2e-5, rtol=2e-5)
        assert not train or mine.stride() == right.stride()
    if train:
        parameters = [p for p in module.parameters() if p.requires_grad]
        grads = [torch.autograd.grad(out[0].sin().sum(), parameters, allow_unused=True) for out in (got, wanted)]
        for mine, right in zip(*grads, strict=True):
            torch.testing.assert_close(mine, right, atol=2e-5, rtol=2e-5)
    assert not set(FUSED).intersection(run.calls)
    return run


TRAIN = pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])


# ---- nn.MultiheadAttention ----------------------------------------------------------------------------------------


@TRAIN
def test_self_attention(train: bool) -> None:
    run = _check(_mha(), *[_x()] * 3, train=train, need_weights=False)
    assert run.site.spec.q.shape == (B, H, S, E // H)
    assert run.site.spec.needs_grad == train
    assert run.calls.count(CPU_FLASH) == 1


@TRAIN
@pytest.mark.parametrize("average", [True, False])
def test_weights_that_are_returned(train: bool, average: bool) -> None:
    run = _check(_mha(), *[_x()] * 3, train=train, need_weights=True, average_attn_weights=average)
    assert run.site.spec.returns_weights
    assert run.site.decision.lowering == "untouched"


def test_weights_that_are_computed_and_dropped_count_as_not_returned() -> None:
    module = _mha().eval()
    run = compiled(lambda x: module(x, x, x, need_weights=True)[0])
    x = _x()
    torch.testing.assert_close(run(x), module(x, x, x)[0])
    assert not run.site.spec.returns_weights
    assert CPU_FLASH in run.calls


@TRAIN
def test_sequence_first(train: bool) -> None:
    run = _check(_mha(batch_first=False), *[_x(S, B, E)] * 3, train=train, need_weights=False)
    assert run.calls.count(CPU_FLASH) == 1


@TRAIN
def test_unbatched(train: bool) -> None:
    run = _check(_mha(), *[_x(S, E)] * 3, train=train, need_weights=False)
    assert run.site.spec.q.shape == (1, H, S, E // H)
    assert run.calls.count(CPU_FLASH) == 1


@TRAIN
def test_cross_attention_with_dimensions_of_its_own(train: bool) -> None:
    module = _mha(kdim=12, vdim=10)
    run = _check(module, _x(), _x(B, 9, 12), _x(B, 9, 10), train=train, need_weights=False)
    assert run.site.spec.seqlen_kv == 9
    assert run.calls.count(CPU_FLASH) == 1


@TRAIN
@pytest.mark.parametrize("bias", [True, False])
def test_self_attention_without_biases(train: bool, bias: bool) -> None:
    run = _check(_mha(bias=bias), *[_x()] * 3, train=train, need_weights=False)
    assert run.calls.count(CPU_FLASH) == 1


def _padding() -> Tensor:
    return torch.arange(S) >= torch.tensor([[S], [S - 2]])


@pytest.mark.in_turns(2)
@TRAIN
@pytest.mark.parametrize(
    "masks",
    [
        {"key_padding_mask": _padding()},
        {"attn_mask": torch.ones(S, S, dtype=torch.bool).triu(1)},
        {"attn_mask": torch.zeros(S, S).masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -torch.inf)},
        {"attn_mask": torch.ones(S, S, dtype=torch.bool).triu(1), "is_causal": True},
        {"attn_mask": torch.ones(S, S, dtype=torch.bool).triu(1), "key_padding_mask": _padding()},
        {"attn_mask": torch.ones(B * H, S, S, dtype=torch.bool).triu(1)},
    ],
    ids=["padding", "bool", "additive", "causal", "padding and bool", "a mask for every head"],
)
def test_masks(masks: dict[str, Any], train: bool) -> None:
    run = _check(_mha(), *[_x()] * 3, train=train, need_weights=False, **masks)
    assert run.site.spec.mask.words != "none"
    assert run.calls.count(CPU_FLASH) == 1


def test_bias_kv_and_zero_attention() -> None:
    run = _check(_mha(add_bias_kv=True, add_zero_attn=True), *[_x()] * 3, train=True, need_weights=False)
    assert run.site.spec.seqlen_kv == S + 2


def test_dropout_in_training() -> None:
    module = _mha(dropout=0.5).train()
    run = compiled(lambda x: module(x, x, x, need_weights=False)[0])
    x = _x()
    torch.manual_seed(1)
    got = run(x)
    torch.manual_seed(1)
    torch.testing.assert_close(got, module(x, x, x, need_weights=False)[0])
    assert run.site.spec.score.dropout_p == 0.5


# ---- nn.TransformerEncoder ----------------------------------------------------------------------------------------


def _layer(**kwargs: Any) -> nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(E, H, 24, **{"batch_first": True, "dropout": 0.0, **kwargs})


@pytest.mark.in_turns
@TRAIN
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_encoder_layer(train: bool, norm_first: bool, activation: str) -> None:
    run = _check(_layer(norm_first=norm_first, activation=activation), _x(), train=train)
    assert run.calls.count(CPU_FLASH) == 1


@pytest.mark.in_turns(2)
@TRAIN
@pytest.mark.parametrize(
    "masks",
    [
        {"src_key_padding_mask": _padding()},
        {"src_mask": torch.ones(S, S, dtype=torch.bool).triu(1)},
        {"src_mask": nn.Transformer.generate_square_subsequent_mask(S), "is_causal": True},
        {"src_mask": torch.ones(S, S, dtype=torch.bool).triu(1), "src_key_padding_mask": _padding()},
    ],
    ids=["padding", "bool", "causal", "both"],
)
def test_encoder_layer_with_masks(masks: dict[str, Any], train: bool) -> None:
    run = _check(_layer(), _x(), train=train, **masks)
    assert run.site.spec.mask.words != "none"
    assert run.calls.count(CPU_FLASH) == 1


@TRAIN
def test_encoder_of_two_layers_shares_one_spec(train: bool) -> None:
    encoder = nn.TransformerEncoder(_layer(), 2, enable_nested_tensor=False)
    run = _check(encoder, _x(), train=train)
    assert len(run.site.modules) == 2
    assert run.calls.count(CPU_FLASH) == 2


def test_decoder_layer_has_two_attentions() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(E, H, 24, dropout=0.0, batch_first=True)
    run = _check(layer, _x(), _x(B, 9, E), train=True)
    assert {site.spec.seqlen_kv for site in run.report.sites} == {S, 9}


def test_encoder_layer_in_autocast() -> None:
    layer = _layer().eval()

    def function(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x)

    x = _x()
    run = compiled(function)
    with torch.no_grad():
        # PyTorch's own aot_eager gives float32 here too, where eager gives bfloat16: its fast path and autocast differ.
        torch.testing.assert_close(run(x).float(), function(x).float(), atol=3e-2, rtol=3e-2)
    assert run.calls.count(CPU_FLASH) == 1
    assert run.site.spec.dtype == "bfloat16"


# ---- the expansion itself -----------------------------------------------------------------------------------------


def test_only_calls_in_the_table_are_expanded_and_values_are_carried_on() -> None:
    module = _mha().train()
    gm, _ = captured(lambda x: module(x, x, x, need_weights=False)[0].sin(), _x())
    (call,) = expand.expand_calls(gm)
    assert "multi_head_attention_forward" in call
    gm.graph.lint()
    added = [n for n in gm.graph.nodes if n.op == "call_function" and isinstance(n.target, torch._ops.OpOverload)]
    assert torch.ops.aten.scaled_dot_product_attention.default in {n.target for n in added}
    attention = next(n for n in added if n.target is torch.ops.aten.scaled_dot_product_attention.default)
    assert attention.meta["example_value"].requires_grad
    assert expand.expand_calls(gm) == []


@pytest.mark.parametrize(
    ("fused", "plain"),
    [
        (torch._native_multi_head_attention, expand.native_multi_head_attention),
        (torch._transformer_encoder_layer_fwd, expand.transformer_encoder_layer),
    ],
)
def test_expansions_take_the_same_arguments(fused: Callable[..., Any], plain: Callable[..., Any]) -> None:
    schema = torch._C._jit_get_schemas_for_operator(f"aten::{fused.__name__}")[0]
    assert [a.name for a in schema.arguments] == list(inspect.signature(plain).parameters)
