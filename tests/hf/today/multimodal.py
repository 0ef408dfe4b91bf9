"""Models of text with images or sound that people download now: tiny, on the CPU, since their code reads the sizes of images."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from tests.hf.today.model import VOCAB, Call, FromConfig, Kwargs, Model

IMAGE = 150
BATCH, TEXT = 2, 32
LATENT: Mapping[str, Any] = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "qk_nope_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_TEXT: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TOWER: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
_VIDEO = {"video_token_id": 151, "vision_start_token_id": 152, "vision_end_token_id": 153}
_SLIDING = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
_GRID = [[1, 4, 4], [1, 4, 4]]


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


def _calls(tokens: int, given: Mapping[str, torch.Tensor]) -> tuple[Call, ...]:
    """tokens: of an image, in each row."""

    def inputs(model: Any, padding: slice) -> Kwargs:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(3, 120, (BATCH, tokens + TEXT), generator=generator)
        ids[0, 10 : 10 + tokens] = ids[1, 2 : 2 + tokens] = IMAGE
        valid = torch.ones_like(ids)
        valid[0, padding] = 0
        kinds = {
            name: (ids == IMAGE).long()
            for name in ("mm_token_type_ids", "token_type_ids")
            if name in inspect.signature(model.forward).parameters
        }
        return {"input_ids": ids, "attention_mask": valid, **kinds, **given}

    def padded(model: Any) -> Kwargs:
        return inputs(model, slice(0, 6))

    def training(model: Any) -> Kwargs:
        found = inputs(model, slice(-6, None))
        ids = found["input_ids"]
        return {
            **found,
            "labels": ids.masked_fill((found["attention_mask"] == 0) | (ids == IMAGE), -100),
            "use_cache": False,
        }

    return (
        Call(name="prefill padded", inputs=padded),
        Call(name="training", inputs=training, training=True),
        Call(name="training, checkpoints", inputs=training, training=True, checkpoint=True),
    )


def _model(
    name: str,
    cls: str,
    settings: Mapping[str, Any],
    given: Mapping[str, torch.Tensor],
    *,
    text: Mapping[str, Any] | None = None,
    tokens: int = 4,
    image: str = "image_token_id",
    impl: str = "sdpa",
) -> Model:
    """cls: the class without "ForConditionalGeneration". text: what its text model has of its own. image: the name of the image's token."""
    config = {"text_config": {**_TEXT, **(text or {})}, image: IMAGE, **settings}
    made = FromConfig(model=f"{cls}ForConditionalGeneration", config=f"{cls}Config", settings=config, impl=impl)
    return Model(name=name, package="transformers", make=made, calls=_calls(tokens, given), device="cpu")


def _rope(*sections: int) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "mrope_section": list(sections), "rope_theta": 1e4}}


def _qwen(patch: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": _noise(32, 3 * 2 * patch * patch), "image_grid_thw": torch.tensor(_GRID)}


_QWEN_TOWER = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
_PATCHES = torch.stack(torch.meshgrid(torch.arange(6), torch.arange(6), indexing="ij"), -1).flip(-1).reshape(1, 36, 2)
_POOLED = torch.arange(16).view(4, 4).unfold(0, 2, 2).unfold(1, 2, 2).reshape(4, 4)

MULTIMODAL: tuple[Model, ...] = (
    _model(
        "Qwen2.5-VL",
        "Qwen2_5_VL",
        {"vision_config": {**_QWEN_TOWER, "window_size": 28, "fullatt_block_indexes": [1]}, **_VIDEO},
        _qwen(14),
        text=_rope(2, 3, 3),
    ),
    _model(
        "Qwen3-VL",
        "Qwen3VL",
        {"vision_config": {**_QWEN_TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}, **_VIDEO},
        _qwen(16),
        text={"head_dim": 16, **_rope(4, 2, 2)},
    ),
    _model(
        "Gemma 3 VL",
        "Gemma3",
        {
            "vision_config": {**_TOWER, "image_size": 56, "patch_size": 14},
            "mm_tokens_per_image": 4,
            "boi_token_index": 151,
            "eoi_token_index": 152,
        },
        {"pixel_values": _noise(2, 3, 56, 56)},
        text={"head_dim": 16, **_SLIDING},
        image="image_token_index",
    ),
    _model(
        "Gemma 4 VL",
        "Gemma4",
        {
            "vision_config": {**_TOWER, "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 16},
            "audio_config": None,
            "boi_token_id": 151,
            "eoi_token_id": 152,
            "video_token_id": 153,
            "boa_token_id": 154,
            "eoa_token_index": 155,
            "audio_token_id": 156,
        },
        {
            "pixel_values": _noise(2, 36, 3 * 16 * 16).sigmoid(),
            "image_position_ids": _PATCHES.repeat(2, 1, 1),
        },
        text={
            "head_dim": 16,
            **_SLIDING,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
        },
    ),
    _model(
        "InternVL 3",
        "InternVL",
        {"vision_config": {**_TOWER, "image_size": [56, 56], "patch_size": [14, 14]}, "image_seq_length": 4},
        {"pixel_values": _noise(2, 3, 56, 56)},
        text={"model_type": "qwen2"},
    ),
    _model(
        "SmolVLM 2",
        "SmolVLM",
        {"vision_config": {**_TOWER, "image_size": 64, "patch_size": 16}, "scale_factor": 2, "pad_token_id": 0},
        {
            "pixel_values": _noise(2, 1, 3, 64, 64),
            "pixel_attention_mask": torch.ones(2, 1, 64, 64, dtype=torch.long),
        },
        text={"model_type": "llama"},
    ),
    _model(
        "PaliGemma 2",
        "PaliGemma",
        {
            "vision_config": {
                **_TOWER,
                "model_type": "siglip_vision_model",
                "image_size": 28,
                "patch_size": 14,
                "projection_dim": 64,
            },
            "projection_dim": 64,
            "hidden_size": 64,
            "vocab_size": VOCAB,
            "pad_token_id": 0,
        },
        {"pixel_values": _noise(2, 3, 28, 28)},
        text={"model_type": "gemma2", "head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16},
        image="image_token_index",
        impl="eager",
    ),
    _model(
        "Kimi K2.5",
        "Kimi_K25",
        {
            "vision_config": {**_TOWER, "pos_emb_height": 8, "pos_emb_width": 8},
            "projection_hidden_size": 32,
            **_VIDEO,
        },
        {"pixel_values": _noise(32, 3, 14, 14), "image_grid_thw": torch.tensor(_GRID)},
        text=LATENT,
    ),
    _model(
        "LFM2-VL",
        "Lfm2Vl",
        {
            "vision_config": {**_TOWER, "model_type": "siglip2_vision_model", "patch_size": 16, "num_patches": 16},
            "downsample_factor": 2,
            "projector_hidden_size": 32,
        },
        {
            "pixel_values": _noise(2, 16, 768),
            "pixel_attention_mask": torch.ones(2, 16, dtype=torch.long),
            "spatial_shapes": torch.tensor([[4, 4], [4, 4]]),
        },
        text={"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
    ),
    _model(
        "Molmo 2",
        "Molmo2",
        {
            "vision_config": {
                **_TOWER,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "image_size": [56, 56],
                "patch_size": 14,
                "num_position_embeddings": 16,
            },
            "adapter_config": {
                "vision_feature_layer": [-1, -2],
                "hidden_size": 32,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "intermediate_size": 32,
                "text_hidden_size": 64,
            },
            "image_start_token_id": 151,
            "image_end_token_id": 152,
            "low_res_image_start_token_id": 153,
            "frame_start_token_id": 154,
            "frame_end_token_id": 155,
        },
        {
            "pixel_values": _noise(2, 16, 14 * 14 * 3),
            "image_token_pooling": torch.cat([_POOLED, _POOLED]),
            "image_grids": torch.tensor([[0, 0, 2, 2]] * 2),
            "image_num_crops": torch.tensor([1, 1]),
        },
        text={"head_dim": 16, "additional_vocab_size": 8},
        image="image_patch_id",
    ),
    _model(
        "Voxtral mini",
        "Voxtral",
        {
            "audio_config": {**_TOWER, "intermediate_size": 128, "num_mel_bins": 8, "max_source_positions": 16},
        },
        {"input_features": _noise(2, 8, 32)},
        text={"model_type": "llama"},
        image="audio_token_id",
    ),
    _model(
        "Qwen3-ASR",
        "Qwen3ASR",
        {
            "audio_config": {
                "num_mel_bins": 16,
                "encoder_layers": 2,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 32,
                "d_model": 32,
                "n_window": 50,
                "n_window_infer": 800,
                "output_dim": 64,
                "downsample_hidden_size": 8,
            },
            "timestamp_token_id": 151,
        },
        {
            "input_features": _noise(2, 16, 200),
            "input_features_mask": torch.ones(2, 200, dtype=torch.long),
        },
        text={"head_dim": 16},
        tokens=26,
        image="audio_token_id",
    ),
)
