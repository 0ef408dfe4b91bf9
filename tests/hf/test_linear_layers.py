"""Models with layers of linear attention: each of these layers is named in the report, beside the attention that is a site."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

import attn_compiler
from attn_compiler.reasons.codes import Code

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


@pytest.mark.in_turns(3)
@pytest.mark.parametrize(
    ("build", "function", "remedy", "training"),
    [*((*family, False) for family in FAMILIES), (*FAMILIES[0], True)],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_three_of_four_layers_are_told(build: Callable[[], Any], function: str, remedy: str, training: bool) -> None:
    torch.manual_seed(0)
    model = build().train(training)
    torch._dynamo.reset()
    attn_compiler.reset()
    run = torch.compile(model, backend="attn_compiler", options={"inner": "eager", "strict": True})
    ids = torch.randint(3, 97, (1, 20))
    with torch.set_grad_enabled(training):
        torch.testing.assert_close(
            run(ids, use_cache=False).logits, model(ids, use_cache=False).logits, atol=2e-5, rtol=1e-4
        )
    reports = attn_compiler.reports()
    (miss,) = (miss for report in reports for miss in report.misses)
    assert (reports.num_sites, reports.num_misses) == (1, 3)
    assert (miss.anchor, miss.reason.code) == (function, Code.LINEAR_ATTENTION)
    assert [path.partition("layers.")[2].partition(".")[0] for path in miss.modules] == ["0", "1", "2"]
    assert remedy in str(miss.reason.remedy)
