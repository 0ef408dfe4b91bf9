"""Decoder-only language models: two layers each, head counts and dims that are no powers of two where the model allows it.

Smooth activations only, here and in the other families: where rounding flips the sign of a relu's input its gradient jumps,
and the numeric rule would judge that jump instead of the attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.hf.family import VOCAB, Family, Uncaptured, hf_builder, text_inputs

_TOKENS: dict[str, Any] = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA: dict[str, Any] = {
    **_TOKENS,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_NO_SDPA = "transformers has no SDPA implementation of {}: {}"


def _decoder(
    name: str,
    model: str,
    settings: Mapping[str, Any],
    *,
    config: str = "",
    absent: Mapping[str, str] | None = None,
    uncaptured: Mapping[str, Uncaptured] | None = None,
    impls: tuple[str, ...] = ("sdpa", "eager"),
) -> Family:
    return Family(
        name=name,
        kind="decoder",
        build=hf_builder(model, settings, config),
        inputs=text_inputs,
        sites=2,
        mask="attention_mask",
        impls=impls,
        absent=dict(absent or {}),
        uncaptured=dict(uncaptured or {}),
    )


_WINDOWS = ["sliding_attention", "full_attention"]
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}

DECODERS: tuple[Family, ...] = (
    _decoder("llama", "LlamaForCausalLM", _LLAMA),
    _decoder("mistral", "MistralForCausalLM", {**_LLAMA, "sliding_window": 5, "head_dim": 10}),
    _decoder("mixtral", "MixtralForCausalLM", {**_LLAMA, **_EXPERTS}),
    _decoder("qwen2", "Qwen2ForCausalLM", _LLAMA),
    _decoder("qwen3", "Qwen3ForCausalLM", {**_LLAMA, "head_dim": 12}),
    _decoder("gemma", "GemmaForCausalLM", {**_LLAMA, "num_key_value_heads": 1, "head_dim": 10}),
    _decoder(
        "gemma2",
        "Gemma2ForCausalLM",
        {**_LLAMA, "head_dim": 10, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 2.0, "sliding_window": 7},
        impls=("eager",),
        absent={"sdpa": _NO_SDPA.format("Gemma-2", "it caps the scores")},
    ),
    _decoder(
        "gemma3",
        "Gemma3ForCausalLM",
        {**_LLAMA, "head_dim": 10, "query_pre_attn_scalar": 12, "sliding_window": 12, "layer_types": _WINDOWS},
        config="Gemma3TextConfig",
    ),
    _decoder("phi3", "Phi3ForCausalLM", {**_LLAMA, "partial_rotary_factor": 0.5}),
    _decoder(
        "gpt2",
        "GPT2LMHeadModel",
        {**_TOKENS, "n_embd": 45, "n_head": 5, "n_layer": 2, "n_positions": 64, "n_inner": 56},
    ),
    _decoder(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        {
            **_TOKENS,
            "hidden_size": 48,
            "intermediate_size": 56,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "max_position_embeddings": 64,
        },
    ),
    _decoder(
        "opt",
        "OPTForCausalLM",
        {
            **_TOKENS,
            "hidden_size": 45,
            "word_embed_proj_dim": 45,
            "activation_function": "gelu",
            "ffn_dim": 56,
            "num_hidden_layers": 2,
            "num_attention_heads": 5,
            "max_position_embeddings": 64,
        },
    ),
    _decoder(
        "bloom",
        "BloomForCausalLM",
        {**_TOKENS, "hidden_size": 45, "n_layer": 2, "n_head": 5},
        impls=("eager",),
        absent={"sdpa": _NO_SDPA.format("Bloom", "it adds ALiBi inside baddbmm")},
    ),
    _decoder(
        "mpt",
        "MptForCausalLM",
        {**_TOKENS, "d_model": 48, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
        impls=("eager",),
        absent={"sdpa": _NO_SDPA.format("MPT", "it adds ALiBi to the scores")},
        uncaptured={
            "static_decode": Uncaptured(
                sites=4, why="it slices its ALiBi by the cache's length, a tensor, between the scores and their softmax"
            )
        },
    ),
    _decoder(
        "falcon",
        "FalconForCausalLM",
        {**_TOKENS, "hidden_size": 50, "num_hidden_layers": 2, "num_attention_heads": 5, "alibi": False},
    ),
    _decoder(
        "falcon_alibi",
        "FalconForCausalLM",
        {**_TOKENS, "hidden_size": 50, "num_hidden_layers": 2, "num_attention_heads": 5, "alibi": True},
        absent={
            "static_decode": "transformers itself fails: Falcon's ALiBi is as long as the tokens, not as the cache"
        },
    ),
    _decoder(
        "gpt_oss",
        "GptOssForCausalLM",
        {**_LLAMA, **_EXPERTS, "head_dim": 12, "sliding_window": 8, "layer_types": _WINDOWS},
        impls=("eager",),
        absent={"sdpa": _NO_SDPA.format("gpt-oss", "it has attention sinks")},
    ),
    _decoder("olmo2", "Olmo2ForCausalLM", _LLAMA),
    _decoder(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        {
            **_LLAMA,
            "num_key_value_heads": 6,
            "moe_intermediate_size": 24,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 20,
            "kv_lora_rank": 18,
            "qk_rope_head_dim": 6,
            "qk_nope_head_dim": 8,
            "v_head_dim": 11,
        },
    ),
    _decoder("cohere", "CohereForCausalLM", {**_LLAMA, "use_qk_norm": True}),
)
