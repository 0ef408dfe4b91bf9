"""Quantised weights and LoRA: every attention of a model is found whatever its linear layers are, and gives the numbers that it gave."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import numerics
from tests.passes.compiling import compiled

transformers = pytest.importorskip("transformers")
quantization = pytest.importorskip("torchao.quantization")

LAYERS, SEQLEN = 2, 32
_PROVED = "causal ∧ key padding attention_mask[b, k] (proved)"


def _model(impl: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=LAYERS,
        intermediate_size=128,
        vocab_size=128,
        attn_implementation=impl,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config).to(dtype).eval()
    return model


def _results(model: Any) -> list[Tensor]:
    """Logits of real tokens, and the gradients of what is trained."""
    ids = torch.randint(0, 128, (2, SEQLEN), generator=torch.Generator().manual_seed(0))
    padding = (torch.arange(SEQLEN) < torch.tensor([[23], [SEQLEN]])).long()
    logits: Tensor = model(input_ids=ids, attention_mask=padding, use_cache=False).logits[padding.bool()]
    trained = [p for p in model.parameters() if p.requires_grad] if logits.requires_grad else []
    return [logits.detach(), *(torch.autograd.grad(logits.sin().sum(), trained) if trained else ())]


def _check(model: nn.Module) -> None:
    """Against eager, with the rounding of one op in the dtype of the logits, and of a sum over all layers."""
    wanted = _results(model)
    run = compiled(model)
    run.parameters = model.parameters  # type: ignore[attr-defined]
    found = _results(run)
    for mine, right in zip(found, wanted, strict=True):
        floor = numerics.FLOOR_ULPS[mine.dtype] * torch.finfo(mine.dtype).eps * float(right.abs().max())
        assert float((mine - right).abs().max()) <= floor
    sites = [site for report in run.reports for site in report.sites]
    assert not [miss for report in run.reports for miss in report.misses]
    assert sum(len(site.modules) for site in sites) == LAYERS
    assert all(site.spec.mask.words.startswith(_PROVED) for site in sites)


@pytest.mark.in_turns
@pytest.mark.parametrize("impl", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"]
)
def test_weights_of_torchao(config: str, impl: str) -> None:
    model = _model(impl, torch.float32 if config == "Int8WeightOnlyConfig" else torch.bfloat16)
    quantization.quantize_(model, getattr(quantization, config)())
    weight: Any = model.get_parameter("model.layers.0.self_attn.q_proj.weight")
    assert type(weight.data) is not Tensor
    with torch.no_grad():
        _check(model)


@pytest.mark.parametrize("quantised", [False, True])
def test_lora(quantised: bool) -> None:
    peft = pytest.importorskip("peft")
    model = _model("sdpa", torch.float32)
    if quantised:
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False)
    _check(peft.get_peft_model(model, config).train())
