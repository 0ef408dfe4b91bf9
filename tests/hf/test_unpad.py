"""Padding is out of Hugging Face's models as they are, in inference and in training, or stays for a reason that is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import attn_compiler
from attn_compiler.passes.unpad import packing
from attn_compiler.reporting.facts import UnpadReport
from tests.thinned import in_full

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 99,
    "max_position_embeddings": 64,
    "attn_implementation": "sdpa",
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODERN = {
    "pad_token_id": 0,
    "local_attention": 8,
    "global_attn_every_n_layers": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
LENGTH = 16


def model_of(name: str) -> nn.Module:
    """A tiny model with random weights, that draws no random numbers."""
    torch.manual_seed(0)
    match name:
        case "bert":
            return transformers.BertModel(transformers.BertConfig(**SIZES, **NO_DROPOUT))
        case "bert mlm":
            return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **NO_DROPOUT))
        case "xlm-r":
            return transformers.XLMRobertaModel(transformers.XLMRobertaConfig(**SIZES, **NO_DROPOUT, pad_token_id=1))
        case "distilbert":
            sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "vocab_size": 99}
            nothing = {"dropout": 0.0, "attention_dropout": 0.0, "attn_implementation": "sdpa"}
            return transformers.DistilBertModel(transformers.DistilBertConfig(**sizes, **nothing))
        case "modernbert":
            ids = {"bos_token_id": 1, "eos_token_id": 2}
            return transformers.ModernBertModel(transformers.ModernBertConfig(**SIZES, **MODERN, **ids))
        case "llama":
            config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, use_cache=False)
            return transformers.LlamaForCausalLM(config)
        case "gpt2":
            sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "n_positions": 64, "use_cache": False}
            nothing = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "attn_implementation": "sdpa"}
            return transformers.GPT2Model(transformers.GPT2Config(**sizes, **nothing))
    raise KeyError(name)


def batch(*, left: bool = False, labels: bool = False) -> dict[str, torch.Tensor]:
    at = torch.arange(LENGTH)
    mask = torch.stack([at >= LENGTH - n if left else at < n for n in (5, 16, 11)]).long()
    ids = torch.randint(3, 99, mask.shape, generator=torch.Generator().manual_seed(0)) * mask + (1 - mask)
    given = {"input_ids": ids, "attention_mask": mask}
    return given | ({"labels": ids.masked_fill(mask == 0, -100)} if labels else {})


def compiled(model: nn.Module, **further: Any) -> Any:
    torch._dynamo.reset()
    attn_compiler.reset()
    options = {"unpad": True, "strict": True, "inner": "eager", **further}
    return torch.compile(model, backend="attn_compiler", options=options)


def report() -> UnpadReport:
    found = attn_compiler.reports()[-1].unpad
    assert found is not None
    return found


def outputs(found: Any, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    tensors = {name: x for name, x in found.items() if isinstance(x, torch.Tensor)}
    return {n: x * mask[..., None] if x.dim() == 3 else x for n, x in tensors.items()}


def gradients(model: nn.Module, found: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    total = found.get("loss")
    if total is None:
        total = torch.stack([(x * torch.randn(x.shape, generator=generator)).sum() for x in found.values()]).sum()
    made = torch.autograd.grad(total, list(model.parameters()), allow_unused=True)
    return [torch.zeros(()) if x is None else x for x in made]


def check(model: nn.Module, given: dict[str, torch.Tensor], function: Any) -> UnpadReport:
    mask = given["attention_mask"]
    expected, found = outputs(model(**given), mask), outputs(function(**given), mask)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(gradients(model, found), gradients(model, expected), atol=2e-5, rtol=1e-4)
    return report()


# AOTAutograd takes longer than all the rest: one encoder and one loss have it by default.
_ENCODERS = [
    (name, inner) for name in ("bert", "xlm-r", "distilbert", "modernbert", "gpt2") for inner in ("eager", "aot_eager")
]
_LOSSES = [(name, inner) for name in ("bert mlm", "llama") for inner in ("eager", "aot_eager")]
_TRACED = {"modernbert", "llama"}


def _is_quick(way: tuple[str, str]) -> bool:
    return (way[0] in _TRACED) == (way[1] == "aot_eager")


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("way", in_full(_ENCODERS, daily=_is_quick), ids=" · ".join)
def test_encoders_with_gradients(way: tuple[str, str]) -> None:
    name, inner = way
    model = model_of(name)
    function = compiled(model, inner=inner)
    assert check(model, batch(), function).kept is None
    assert report().last[-1].failed == ()
    assert len(report().zeroed) == 1


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("way", in_full(_LOSSES, daily=_is_quick), ids=" · ".join)
def test_losses(way: tuple[str, str]) -> None:
    name, inner = way
    model = model_of(name)
    function = compiled(model, inner=inner)
    found = check(model, batch(labels=True), function)
    assert found.kept is None
    assert found.last[-1].failed == ()


def test_left_padding_with_labels() -> None:
    """The loss shifts labels: the last padding of a row has the first token as its label."""
    model = model_of("llama")
    function = compiled(model)
    found = check(model, batch(left=True, labels=True), function)
    assert found.last[-1].failed == ()


def test_gradient_checkpointing() -> None:
    model = model_of("llama").train()
    model.gradient_checkpointing_enable()
    function = compiled(model)
    found = check(model, batch(left=True, labels=True), function)
    assert found.kept is None
    assert found.last[-1].failed == ()


@pytest.mark.further
def test_left_padding_without_labels() -> None:
    found = check(model := model_of("llama"), batch(left=True), compiled(model))
    assert found.kept is None
    assert found.last[-1].failed == ()


@pytest.mark.further
def test_a_pooler_on_left_padding_is_the_models_own() -> None:
    model = model_of("bert")
    found = check(model, batch(left=True), compiled(model))
    assert "first token" in found.last[-1].failed[0]


@pytest.mark.further
def test_verified() -> None:
    model = model_of("bert mlm")
    assert check(model, batch(labels=True), compiled(model, verify=True)).kept is None


def t5() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 99}
    config = transformers.T5Config(**sizes, dropout_rate=0.0, attn_implementation="sdpa")
    return transformers.T5EncoderModel(config)


@pytest.mark.further
def test_t5s_bias_goes_with_the_tokens() -> None:
    model = t5()
    function = compiled(model)
    for left in (False, True):
        found = check(model, batch(left=left), function)
        assert found.kept is None
        assert found.last[-1].failed == ()
    (site,) = attn_compiler.reports()[-1].sites
    assert site.decision.lowering == "triton"
    assert [type(kind).__name__ for kind in site.spec.score.proved] == ["RelativeBias"]


@pytest.mark.further
def test_t5_keeps_its_padding_where_no_kernel_adds_its_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a CPU there is but one that leaves out other rows; Triton's interpreter stands in for the others here.
    monkeypatch.setattr(packing, "LEAVING_OUT", ("rows",))
    kept = check(model := t5(), batch(), compiled(model)).kept
    assert kept is not None
    assert "a kernel leaves out pairs" in kept.rule


def test_a_model_with_a_cache_keeps_its_padding() -> None:
    model = model_of("llama")
    model.config.use_cache = True
    with torch.no_grad():
        compiled(model)(**batch())
    assert report().kept is not None
