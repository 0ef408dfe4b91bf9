"""Models with layers of linear attention: their functions are taken, in training, in prompts and in decoding, and are told where not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

import attn_compiler
from attn_compiler.reasons.codes import Code
from tests.thinned import further

_SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
_LAYERS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
_OF_GATED_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_hidden_layers": 4,
    "layer_types": _LAYERS,
    "head_dim": 16,
}


def qwen3_next() -> Any:
    experts = {"mlp_only_layers": [0, 1, 2, 3], "num_experts": 4, "moe_intermediate_size": 32}
    config = transformers.Qwen3NextConfig(**_SMALL, **_OF_GATED_DELTA, **experts, shared_expert_intermediate_size=32)
    return transformers.Qwen3NextForCausalLM(config)


def qwen3_5() -> Any:
    return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**_SMALL, **_OF_GATED_DELTA))


def kimi_linear() -> Any:
    latents = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    linear = {"linear_num_heads": 4, "linear_head_dim": 16, "num_hidden_layers": 4, "layer_types": _LAYERS}
    plain = {"moe_intermediate_size": 32, "mlp_layer_types": ["dense"] * 4, "bos_token_id": 1, "eos_token_id": 2}
    sizes = {**_SMALL, "num_key_value_heads": 4}
    return transformers.KimiLinearForCausalLM(transformers.KimiLinearConfig(**sizes, **latents, **linear, **plain))


def bamba() -> Any:
    mamba = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 16}
    config = transformers.BambaConfig(**_SMALL, num_hidden_layers=4, attn_layer_indices=[3], mamba_expand=2, **mamba)
    return transformers.BambaForCausalLM(config)


def nemotron_h() -> Any:
    mamba = {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "chunk_size": 16}
    layers = ["mamba", "mamba", "mamba", "attention"]
    config = transformers.NemotronHConfig(**_SMALL, **mamba, head_dim=16, expand=2, layers_block_type=layers)
    return transformers.NemotronHForCausalLM(config)


FAMILIES: tuple[tuple[Callable[[], Any], str, str], ...] = (
    (qwen3_next, "torch_chunk_gated_delta_rule", "flash-linear-attention"),
    (qwen3_5, "torch_chunk_gated_delta_rule", "flash-linear-attention"),
    (kimi_linear, "chunk_kimi_delta_attention", "flash-linear-attention"),
    (bamba, "mamba2_chunk_scan", "mamba-ssm"),
    (nemotron_h, "mamba2_chunk_scan", "mamba-ssm"),
)


_OPTIONS = {"inner": "eager", "strict": True, "lowering": "linear_reference"}
_LENGTH, _PADDED = 40, 13


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    attn_compiler.reset()


def _built(build: Callable[[], Any]) -> Any:
    """A model whose parameters are not all alike, as they are when they were trained."""
    torch.manual_seed(0)
    model = build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.1))
    return model


def _ids() -> torch.Tensor:
    return torch.randint(3, 97, (2, _LENGTH), generator=torch.Generator().manual_seed(0))


def _mask(side: str) -> torch.Tensor:
    mask = torch.ones(2, _LENGTH, dtype=torch.long)
    if side == "left":
        mask[1, :_PADDED] = 0
    elif side == "right":
        mask[1, -_PADDED:] = 0
    return mask


def _close(found: torch.Tensor, wanted: torch.Tensor, within: float) -> None:
    assert float((found - wanted).abs().max()) <= within * float(wanted.abs().max())


_ALL = [family[0] for family in FAMILIES]
_DAILY = [qwen3_next]


@pytest.mark.parametrize("build", further(_ALL, daily=_DAILY), ids=lambda x: x.__name__)
@pytest.mark.parametrize("side", further(["none", "left", "right"], daily=["left"]))
def test_a_training_step_is_eager(build: Callable[[], Any], side: str) -> None:
    model, ids, mask = _built(build).train(), _ids(), _mask(side)
    run = torch.compile(model, backend="attn_compiler", options=_OPTIONS, fullgraph=True)
    noise = torch.randn(2, _LENGTH, 97) * mask[..., None]
    outs, gradients = [], []
    for one in (model, run):
        model.zero_grad()
        out = one(ids, attention_mask=mask, use_cache=False).logits
        (out * noise).sum().backward()
        outs.append(out.detach()[mask.bool()])
        gradients.append({name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None})
    _close(outs[1], outs[0], 2e-5)
    assert gradients[0].keys() == gradients[1].keys()
    for name, wanted in gradients[0].items():
        _close(gradients[1][name], wanted, 5e-3)
    (report,) = attn_compiler.reports()
    assert (report.num_linear, report.num_misses, report.num_sites) == (3, 0, 1)
    assert [path.partition("layers.")[2].partition(".")[0] for path in report.linear[0].modules] == ["0", "1", "2"]


@pytest.mark.parametrize("build", further(_ALL, daily=[bamba]), ids=lambda x: x.__name__)
def test_a_prompt_and_tokens_after_it_are_eager(build: Callable[[], Any]) -> None:
    model, ids = _built(build), _ids()
    run = torch.compile(model, backend="attn_compiler", options=_OPTIONS, dynamic=False)

    def generated(one: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        cache, mask, given, outs = transformers.DynamicCache(config=model.config), _mask("left"), ids, []
        for step in range(3):
            found = one(given, attention_mask=mask, past_key_values=cache, use_cache=True)
            outs.append(found.logits[:, -1])
            given, mask = ids[:, step : step + 1], torch.cat([mask, mask[:, :1] * 0 + 1], 1)
        states = [
            layer.recurrent_states for layer in cache.layers if getattr(layer, "recurrent_states", None) is not None
        ]
        return torch.stack(outs), [x for held in states for x in (held.values() if isinstance(held, dict) else held)]

    with torch.no_grad():
        wanted, found = generated(model), generated(run)
    _close(found[0], wanted[0], 2e-5)
    assert len(found[1]) >= 3
    for one, other in zip(found[1], wanted[1], strict=True):
        _close(one, other, 2e-5)
    reports = attn_compiler.reports()
    assert (reports.num_linear, reports.num_misses) == (3 * len(reports), 0)
    assert {one.spec.length for report in reports for one in report.linear} == {_LENGTH, 1}


@pytest.mark.further
@pytest.mark.parametrize("build", _ALL, ids=lambda x: x.__name__)
def test_generate_gives_the_tokens_of_eager(build: Callable[[], Any]) -> None:
    model, ids = _built(build), _ids()
    given = {"attention_mask": _mask("left"), "max_new_tokens": 4, "do_sample": False}
    wanted = model.generate(ids, **given)
    forward = model.forward
    model.forward = torch.compile(forward, backend="attn_compiler", options=_OPTIONS, dynamic=False)
    assert model.generate(ids, **given).tolist() == wanted.tolist()
    assert attn_compiler.reports().num_linear


def test_one_graph_serves_every_length() -> None:
    model = _built(qwen3_next)
    run = torch.compile(model, backend="attn_compiler", options=_OPTIONS, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for length in (40, 70, 100):
            ids = torch.randint(3, 97, (2, length))
            _close(run(ids, use_cache=False).logits, model(ids, use_cache=False).logits, 2e-5)
    (report,) = attn_compiler.reports()
    assert report.num_linear == 3


@pytest.mark.in_turns(3)
@pytest.mark.parametrize(("build", "function", "remedy"), FAMILIES, ids=lambda x: getattr(x, "__name__", ""))
def test_layers_that_are_not_taken_are_told(build: Callable[[], Any], function: str, remedy: str) -> None:
    model = _built(build)
    run = torch.compile(model, backend="attn_compiler", options={**_OPTIONS, "lowering": "untouched"})
    ids = _ids()[:1, :20]
    with torch.no_grad():
        _close(run(ids, use_cache=False).logits, model(ids, use_cache=False).logits, 2e-5)
    reports = attn_compiler.reports()
    (miss,) = (miss for report in reports for miss in report.misses)
    assert (reports.num_sites, reports.num_misses, reports.num_linear) == (1, 3, 0)
    assert (miss.anchor, miss.reason.code) == (function, Code.LINEAR_ATTENTION)
    assert [path.partition("layers.")[2].partition(".")[0] for path in miss.modules] == ["0", "1", "2"]
    assert remedy in str(miss.reason.remedy)
