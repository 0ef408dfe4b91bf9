"""Settings of configs beside their own: another kind of attention, or what a config lacks. In each file, in the order of trial."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Settings = Mapping[str, Any]

_CROSS: tuple[Settings, ...] = ({"is_decoder": True, "add_cross_attention": True},)

#: sections of a rotary embedding of half a head
_HALF: Settings = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [8, 12, 12],
        "partial_rotary_factor": 0.5,
    }
}

#: blocks of which a length of the survey has enough
_SPARSE: Settings = {"block_size": 16, "num_random_blocks": 1}

SETTINGS: Mapping[str, tuple[Settings, ...]] = {
    **{
        f"{name}/modeling_{file}.py": _CROSS
        for name, file in (
            *((name, name) for name in (
                "bert", "bert_generation", "camembert", "electra", "ernie", "roberta", "roberta_prelayernorm",
                "roc_bert", "xlm_roberta", "xlm_roberta_xl", "xmod",
            )),
            ("data2vec", "data2vec_text"),
        )
    },
    "cohere_compass/modeling_cohere_compass.py": (
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    ),
    "dbrx/modeling_dbrx.py": ({"attn_config": {"kv_n_heads": 4, "rope_theta": 10000.0, "clip_qkv": 8.0}},),
    "deepseek_ocr2/modeling_deepseek_ocr2.py": ({"mlp_layer_types": ["dense"] * 12},),
    "deepseek_v2/modeling_deepseek_v2.py": ({"num_experts_per_tok": 2},),
    "diffusion_gemma/modeling_diffusion_gemma.py": (
        {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 512},
    ),
    "dots1/modeling_dots1.py": ({"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},),
    "esm/modeling_esm.py": ({"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},),
    "gemma3n/modeling_gemma3n.py": ({"num_kv_shared_layers": 0},),
    "glm4v/modeling_glm4v.py": (_HALF,),
    "glm4v_moe/modeling_glm4v_moe.py": (_HALF,),
    "glm_image/modeling_glm_image.py": (_HALF,),
    **{f"hunyuan_{name}/modeling_hunyuan_{name}.py": ({"head_dim": 128},) for name in ("v1_dense", "v1_moe", "vl")},
    "granitemoehybrid/modeling_granitemoehybrid.py": ({"layer_types": ["mamba", "attention"], "num_hidden_layers": 2},),
    "longcat_flash/modeling_longcat_flash.py": (
        {"hidden_size": 1024, "ffn_hidden_size": 1024, "expert_ffn_hidden_size": 256},
    ),
    "mllama/modeling_mllama.py": ({"cross_attention_layers": [0], "num_hidden_layers": 1},),
    "qwen3_omni_moe/modeling_qwen3_omni_moe.py": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [24, 20, 20]}},
    ),
    "informer/modeling_informer.py": ({"prediction_length": 16, "num_time_features": 1},),
    "lfm2_moe/modeling_lfm2_moe.py": ({"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},),
    "ministral/modeling_ministral.py": ({"head_dim": 128},),
    "moonshine_streaming/modeling_moonshine_streaming.py": ({"num_key_value_heads": 8},),
    "patchtsmixer/modeling_patchtsmixer.py": ({"self_attn": True},),
    "zoedepth/modeling_zoedepth.py": (
        {
            "num_patch_transformer_layers": 1,
            "bin_configurations": [
                {"n_bins": 64, "min_depth": 0.001, "max_depth": 10.0, "name": "nyu"},
                {"n_bins": 64, "min_depth": 0.001, "max_depth": 80.0, "name": "kitti"},
            ],
        },
    ),
    "nemotron/modeling_nemotron.py": ({"num_key_value_heads": 8},),
    "qwen4_exp/modeling_qwen4_exp.py": (
        {
            "indexer_n_heads": 4,
            "indexer_kv_heads": 2,
            "indexer_head_dim": 128,
            "indexer_budget": 512,
            "indexer_compress_ratio": 4,
        },
    ),
    "time_series_transformer/modeling_time_series_transformer.py": ({"prediction_length": 16, "num_time_features": 1},),
    "longt5/modeling_longt5.py": ({"encoder_attention_type": "transient-global"},),
    "big_bird/modeling_big_bird.py": ({"attention_type": "original_full"}, _SPARSE),
    "bigbird_pegasus/modeling_bigbird_pegasus.py": ({"attention_type": "original_full"}, _SPARSE),
    "bamba/modeling_bamba.py": ({"attn_layer_indices": [0]},),
    "jamba/modeling_jamba.py": ({"attn_layer_offset": 0, "attn_layer_period": 1, "use_mamba_kernels": False},),
    "recurrent_gemma/modeling_recurrent_gemma.py": ({"block_types": ["attention"]},),
}  # fmt: skip
