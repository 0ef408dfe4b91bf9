"""Language models that people download now, at their real widths and with two or three layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.hf.packages import import_package
from tests.hf.today.model import TOKENS, Call, FromConfig, Kwargs, Model, integers

BATCH, LENGTH = 4, 4096


def _padded(model: Any) -> Kwargs:
    tokens = integers(model, BATCH, LENGTH)
    return {"input_ids": tokens, "attention_mask": integers(model, BATCH, LENGTH, value=1), "use_cache": False}


def _training(model: Any) -> Kwargs:
    return {**_padded(model), "labels": integers(model, BATCH, LENGTH)}


def _decode(model: Any) -> Kwargs:
    """A step of a padded batch, with a static cache."""
    config = model.config.get_text_config()
    return {
        "input_ids": integers(model, BATCH, 1),
        "attention_mask": integers(model, BATCH, LENGTH, value=1),
        "past_key_values": import_package("transformers").StaticCache(config=config, max_cache_len=LENGTH),
        "position_ids": integers(model, BATCH, 1),
        "use_cache": True,
    }


CALLS = (
    Call(name="prefill padded", inputs=_padded),
    Call(name="training", inputs=_training, training=True),
    Call(name="decode with a cache", inputs=_decode),
)

_SLIDING = ["sliding_attention", "full_attention"]
_LINEAR = ["linear_attention", "full_attention"]
_SPARSE = ["dense", "sparse"]
_LATENT: Mapping[str, Any] = {"n_routed_experts": 8, "n_group": 1, "topk_group": 1}


def _heads(count: int, kv: int, dim: int | None = None) -> dict[str, int]:
    width = {} if dim is None else {"head_dim": dim}
    return {"num_attention_heads": count, "num_key_value_heads": kv, **width}


#: models that have a cache of their own, which a StaticCache can't take the place of
_OWN_CACHE = frozenset({"DeepseekV4", "MiniMax"})


def _decoder(name: str, model: str, settings: Mapping[str, Any], config: str = "", impl: str = "sdpa") -> Model:
    """model: the class without "ForCausalLM". config: that of its config, where it is not the same with "Config"."""
    given = {**TOKENS, "num_hidden_layers": 2, **settings}
    made = FromConfig(model=f"{model}ForCausalLM", config=config or f"{model}Config", settings=given, impl=impl)
    calls = CALLS[:-1] if model in _OWN_CACHE else CALLS
    return Model(name=name, package="transformers", make=made, calls=calls)


DECODERS: tuple[Model, ...] = (
    _decoder("Qwen3 8B", "Qwen3", {"hidden_size": 4096, **_heads(32, 8, 128), "intermediate_size": 512}),
    _decoder("Qwen3 30B A3B", "Qwen3Moe", {"hidden_size": 2048, **_heads(32, 4, 128)}),
    _decoder("Qwen3.5 9B", "Qwen3_5", {"layer_types": _LINEAR}, "Qwen3_5TextConfig"),
    _decoder("Qwen3 Next 80B", "Qwen3Next", {"layer_types": _LINEAR, "num_experts": 8, "num_experts_per_tok": 2}),
    _decoder(
        "Gemma 3 12B",
        "Gemma3",
        {"hidden_size": 3840, **_heads(16, 8, 256), "sliding_window": 1024, "layer_types": _SLIDING},
        "Gemma3TextConfig",
    ),
    _decoder(
        "Gemma 4 E4B",
        "Gemma4",
        {
            "hidden_size": 2560,
            **_heads(8, 2, 256),
            "global_head_dim": 512,
            "sliding_window": 512,
            "vocab_size_per_layer_input": TOKENS["vocab_size"],
            "layer_types": _SLIDING,
        },
        "Gemma4TextConfig",
    ),
    _decoder("Llama 3.1 8B", "Llama", {"hidden_size": 4096, **_heads(32, 8)}),
    _decoder(
        "Llama 4 Scout",
        "Llama4",
        {"num_local_experts": 2, "no_rope_layers": [1, 0], "layer_types": ["chunked_attention", "full_attention"]},
        "Llama4TextConfig",
    ),
    _decoder("Ministral 3 8B", "Ministral3", {}),
    _decoder("Mistral Small 4", "Mistral4", {"n_routed_experts": 8}),
    _decoder("gpt-oss 120B", "GptOss", {"num_local_experts": 4, "layer_types": _SLIDING}, impl="eager"),
    _decoder("DeepSeek V3", "DeepseekV3", {**_LATENT, "first_k_dense_replace": 1}),
    _decoder(
        "DeepSeek V3.2",
        "DeepseekV32",
        {**_LATENT, "mlp_layer_types": _SPARSE, "layer_types": ["indexed_attention"] * 2},
    ),
    _decoder(
        "DeepSeek V4",
        "DeepseekV4",
        {
            "n_routed_experts": 8,
            "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
            "mlp_layer_types": ["moe", "moe"],
        },
        impl="eager",
    ),
    _decoder("GLM 4.6", "Glm4Moe", {"hidden_size": 5120, **_heads(96, 8, 128), "n_routed_experts": 8}),
    _decoder(
        "GLM 5",
        "GlmMoeDsa",
        {
            "n_routed_experts": 8,
            "mlp_layer_types": _SPARSE,
            "layer_types": ["indexed_attention"] * 2,
            "indexer_types": ["full"] * 2,
        },
    ),
    _decoder(
        "Kimi Linear 48B",
        "KimiLinear",
        {"num_experts": 8, "mlp_layer_types": _SPARSE, "layer_types": _LINEAR},
    ),
    _decoder("MiniMax M2", "MiniMaxM2", {"num_local_experts": 8}),
    _decoder(
        "Nemotron 3 Nano",
        "NemotronH",
        {
            "num_hidden_layers": 3,
            "hidden_size": 2688,
            **_heads(32, 2, 128),
            "layers_block_type": [*_LINEAR, "mlp"],
            "mamba_num_heads": 64,
            "mamba_head_dim": 64,
        },
    ),
    _decoder(
        "Granite 4 H Small",
        "GraniteMoeHybrid",
        {**_heads(32, 8), "attention_multiplier": 0.0078125, "layer_types": _LINEAR},
    ),
    _decoder("LFM2 2.6B", "Lfm2", {"hidden_size": 2048, **_heads(32, 8), "layer_types": ["conv", "full_attention"]}),
    _decoder("LFM3", "Lfm3", {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "sliding_attention"]}),
    _decoder(
        "OLMo 3 7B",
        "Olmo3",
        {"layer_types": _SLIDING, "sliding_window": 4096, "max_position_embeddings": 65536},
    ),
    _decoder("OLMo Hybrid 7B", "OlmoHybrid", {"layer_types": _LINEAR}),
    _decoder("SmolLM3 3B", "SmolLM3", {"no_rope_layers": [1, 0]}),
    _decoder(
        "Phi 4 mini",
        "Phi3",
        {
            "hidden_size": 3072,
            **_heads(24, 8),
            "partial_rotary_factor": 0.75,
            "sliding_window": 262144,
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
        },
    ),
    _decoder("Hunyuan 7B", "HunYuanDenseV1", _heads(32, 8, 128)),
    _decoder("ERNIE 4.5 0.3B", "Ernie4_5", {}),
    _decoder(
        "Falcon H1 7B",
        "FalconH1",
        {
            "hidden_size": 3072,
            **_heads(12, 2, 128),
            "mamba_d_ssm": 3072,
            "mamba_n_heads": 24,
            "mamba_d_head": 128,
        },
    ),
    _decoder(
        "MiniMax Text 01",
        "MiniMax",
        {"hidden_size": 6144, **_heads(64, 8, 128), "num_local_experts": 2, "layer_types": _LINEAR},
    ),
    _decoder(
        "MiniMax M3",
        "MiniMaxM3VL",
        {
            "num_local_experts": 8,
            "mlp_layer_types": _SPARSE,
            "layer_types": ["full_attention", "minimax_m3_sparse"],
        },
        "MiniMaxM3VLTextConfig",
    ),
    _decoder(
        "GPT-J 6B",
        "GPTJ",
        {"n_embd": 4096, "n_layer": 2, "n_head": 16, "rotary_dim": 64, "n_positions": 8192},
        impl="eager",
    ),
    _decoder(
        "CodeGen 16B",
        "CodeGen",
        {"n_embd": 6144, "n_layer": 2, "n_head": 24, "rotary_dim": 64, "n_positions": 8192, "n_ctx": 8192},
        impl="eager",
    ),
)
