"""Encoders of text, images and sound that people download now, at their real widths and with few layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tests.hf.family import config_of
from tests.hf.today.model import TOKENS, Call, FromConfig, Kwargs, Model, integers, zeros

Inputs = Callable[[Any], Kwargs]


def _calls(infer: Inputs, training: Inputs | None = None) -> tuple[Call, ...]:
    return (
        Call(name="inference", inputs=infer),
        Call(name="training", inputs=training or infer, training=True),
    )


def _model(name: str, model: str, settings: Mapping[str, Any], calls: tuple[Call, ...], impl: str = "sdpa") -> Model:
    made = FromConfig(model=model, config=config_of(model), settings=settings, impl=impl)
    return Model(name=name, package="transformers", make=made, calls=calls)


def _text(
    name: str, model: str, settings: Mapping[str, Any], batch: int = 8, length: int = 2048, impl: str = "sdpa"
) -> Model:
    """model: the class without "Model"; its config's has the same name."""

    def padded(of: Any) -> Kwargs:
        return {"input_ids": integers(of, batch, length), "attention_mask": integers(of, batch, length, value=1)}

    given = {**TOKENS, "num_hidden_layers": 2, **settings}
    return _model(name, f"{model}Model", given, _calls(padded), impl)


def _images(batch: int, size: int, **further: int) -> Inputs:
    """further: int64 tensors [batch, size, size] of one value."""

    def images(of: Any) -> Kwargs:
        others = {name: integers(of, batch, size, size, value=value) for name, value in further.items()}
        return {"pixel_values": zeros(of, batch, 3, size, size), **others}

    return images


_BASE = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
_LARGE = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
_VIT = {"num_hidden_layers": 2, "num_attention_heads": 16}
_DEBERTA = {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "position_biased_input": False,
    "type_vocab_size": 0,
}

TEXT: tuple[Model, ...] = (
    _text(
        "ModernBERT base",
        "ModernBert",
        {"num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
        batch=16,
    ),
    _text(
        "EmbeddingGemma 2",
        "EmbeddingGemma2Text",
        {"layer_types": ["sliding_attention", "full_attention"]},
        batch=16,
    ),
    _text("BGE large (BERT)", "Bert", _LARGE, batch=32, length=512),
    _text("BGE M3 (XLM-R)", "XLMRoberta", {**_LARGE, "max_position_embeddings": 8194}),
    _text("Jina v3", "JinaEmbeddingsV3", _LARGE),
    _text("GTE multilingual", "Gte", _BASE),
    _text("Nomic BERT", "NomicBert", _BASE),
    _text("DeBERTa v3 base", "DebertaV2", {**_BASE, **_DEBERTA}, batch=32, length=512, impl="eager"),
    _text("EuroBERT 210M", "EuroBert", {**_BASE, "num_key_value_heads": 12}),
)


def _dinov2(hidden: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "dinov2",
        "hidden_size": hidden,
        "num_hidden_layers": 4,
        "num_attention_heads": heads,
        "image_size": 518,
        "patch_size": 14,
        "out_indices": [1, 2, 3, 4],
        "apply_layernorm": True,
        "reshape_hidden_states": False,
    }


_RESNET = {
    "model_type": "resnet",
    "embedding_size": 64,
    "hidden_sizes": [64, 64, 64, 128],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
    "out_features": ["stage4"],
}
_OWN_BACKBONE = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}


def _naflex(of: Any) -> Kwargs:
    return {
        "pixel_values": zeros(of, 16, 256, 768),
        "pixel_attention_mask": integers(of, 16, 256, value=1),
        "spatial_shapes": torch.tensor([[16, 16]] * 16),
    }


def _points(of: Any) -> Kwargs:
    return {
        "pixel_values": zeros(of, 1, 3, 1024, 1024),
        "input_points": zeros(of, 1, 1, 1, 2),
        "input_labels": integers(of, 1, 1, 1, value=1),
    }


VISION: tuple[Model, ...] = (
    _model(
        "DINOv3 L", "DINOv3ViTModel", {"hidden_size": 1024, **_VIT, "num_register_tokens": 4}, _calls(_images(8, 512))
    ),
    _model(
        "SAM B, images",
        "SamVisionModel",
        {"num_hidden_layers": 2, "global_attn_indexes": [1]},
        _calls(_images(2, 1024)),
    ),
    _model(
        "SAM B, images, eager",
        "SamVisionModel",
        {"num_hidden_layers": 2, "global_attn_indexes": [1]},
        _calls(_images(2, 1024)),
        impl="eager",
    ),
    _model("SAM 2.1", "Sam2Model", {}, _calls(_points)[:1]),
    _model(
        "Swin v2 tiny",
        "Swinv2Model",
        {"depths": [2, 2, 2, 2], "image_size": 256, "window_size": 8, "drop_path_rate": 0.0},
        _calls(_images(8, 256)),
        impl="eager",
    ),
    _model(
        "CLIP L, images",
        "CLIPVisionModel",
        {"hidden_size": 1024, **_VIT, "image_size": 336, "patch_size": 14},
        _calls(_images(32, 336)),
    ),
    _model(
        "SigLIP so400m",
        "SiglipVisionModel",
        {"hidden_size": 1152, **_VIT, "image_size": 384, "patch_size": 14},
        _calls(_images(16, 384)),
    ),
    _model("SigLIP 2 NaFlex B", "Siglip2VisionModel", {"num_hidden_layers": 2}, _calls(_naflex)),
    _model(
        "Depth Anything v2 S",
        "DepthAnythingForDepthEstimation",
        {"backbone_config": _dinov2(384, 6)},
        _calls(_images(8, 518)),
        impl="eager",
    ),
    _model(
        "DETR R50",
        "DetrForObjectDetection",
        {**_OWN_BACKBONE, "backbone_config": _RESNET, "encoder_layers": 2, "decoder_layers": 2},
        _calls(_images(4, 800))[:1],
        impl="eager",
    ),
)


def _sound(width: int, length: int, batch: int = 8) -> Inputs:
    def sound(of: Any) -> Kwargs:
        features = zeros(of, batch, length, width)
        return {"input_features": features, "attention_mask": integers(of, batch, length, value=1)}

    return sound


def _speech(of: Any) -> Kwargs:
    return {"input_features": zeros(of, 16, 128, 3000), "decoder_input_ids": integers(of, 16, 64), "use_cache": False}


def _labelled(of: Any) -> Kwargs:
    return {"input_features": zeros(of, 16, 128, 3000), "labels": integers(of, 16, 448), "use_cache": False}


def _wave(of: Any) -> Kwargs:
    return {"input_values": zeros(of, 8, 320_000), "attention_mask": integers(of, 8, 320_000, value=1)}


_FEW = {"num_hidden_layers": 2, "layerdrop": 0.0}
_UNAUGMENTED = {**_FEW, "apply_spec_augment": False}

SOUND: tuple[Model, ...] = (
    _model(
        "Whisper large v3",
        "WhisperForConditionalGeneration",
        {
            **TOKENS,
            "decoder_start_token_id": 1,
            "num_mel_bins": 128,
            "d_model": 1280,
            **{f"{part}_layers": 2 for part in ("encoder", "decoder")},
            **{f"{part}_attention_heads": 20 for part in ("encoder", "decoder")},
            **{f"{part}_ffn_dim": 5120 for part in ("encoder", "decoder")},
        },
        _calls(_speech, _labelled),
    ),
    _model("wav2vec2 BERT", "Wav2Vec2BertModel", _UNAUGMENTED, _calls(_sound(160, 1500))),
    _model("Parakeet CTC 1.1B", "ParakeetEncoder", _FEW, _calls(_sound(80, 3000))),
    _model(
        "wav2vec2 large",
        "Wav2Vec2Model",
        {**_LARGE, **_UNAUGMENTED, "mask_time_prob": 0.0, "feat_extract_norm": "layer", "do_stable_layer_norm": True},
        _calls(_wave),
    ),
)

ENCODERS: tuple[Model, ...] = (*TEXT, *VISION, *SOUND)
