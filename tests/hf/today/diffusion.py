"""Transformers and UNets of diffusers that people download now, at their real widths and with one or two layers of each kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.hf.today.model import Call, FromArguments, Kwargs, Model, integers, zeros

Inputs = Callable[[Any], Kwargs]


def _model(name: str, cls: str, settings: Mapping[str, Any], inputs: Inputs) -> Model:
    calls = (
        Call(name="step", inputs=inputs),
        Call(name="training", inputs=inputs, training=True),
    )
    return Model(name=name, package="diffusers", make=FromArguments(model=cls, settings=settings), calls=calls)


def _flux(model: Any) -> Kwargs:
    given = model.config
    ids = 4 if "Flux2" in type(model).__name__ else 3
    inputs = {
        "hidden_states": zeros(model, 1, 4096, given.in_channels),
        "encoder_hidden_states": zeros(model, 1, 512, given.joint_attention_dim),
        "timestep": zeros(model, 1),
        "guidance": zeros(model, 1),
        "img_ids": zeros(model, 4096, ids).float(),
        "txt_ids": zeros(model, 512, ids).float(),
    }
    return inputs if ids == 4 else {**inputs, "pooled_projections": zeros(model, 1, given.pooled_projection_dim)}


def _qwen(model: Any) -> Kwargs:
    given = model.config
    return {
        "hidden_states": zeros(model, 2, 4096, given.in_channels),
        "encoder_hidden_states": zeros(model, 2, 512, given.joint_attention_dim),
        "timestep": zeros(model, 2),
        "img_shapes": [[(1, 64, 64)]] * 2,
    }


def _wan(model: Any) -> Kwargs:
    given = model.config
    return {
        "hidden_states": zeros(model, 1, given.in_channels, 21, 60, 104),
        "timestep": integers(model, 1, value=1),
        "encoder_hidden_states": zeros(model, 1, 512, given.text_dim),
    }


def _hunyuan(model: Any) -> Kwargs:
    given = model.config
    return {
        "hidden_states": zeros(model, 1, given.in_channels, 17, 60, 104),
        "timestep": integers(model, 1, value=1),
        "encoder_hidden_states": zeros(model, 1, 256, given.text_embed_dim),
        "encoder_attention_mask": integers(model, 1, 256, value=1),
        "pooled_projections": zeros(model, 1, given.pooled_projection_dim),
        "guidance": zeros(model, 1),
    }


def _ltx(model: Any) -> Kwargs:
    given = model.config
    return {
        "hidden_states": zeros(model, 1, 16 * 16 * 24, given.in_channels),
        "encoder_hidden_states": zeros(model, 1, 128, given.caption_channels),
        "timestep": integers(model, 1, value=1),
        "encoder_attention_mask": integers(model, 1, 128, value=1),
        "num_frames": 16,
        "height": 16,
        "width": 24,
    }


def _sd3(model: Any) -> Kwargs:
    given = model.config
    return {
        "hidden_states": zeros(model, 2, given.in_channels, 128, 128),
        "encoder_hidden_states": zeros(model, 2, 333, given.joint_attention_dim),
        "pooled_projections": zeros(model, 2, given.pooled_projection_dim),
        "timestep": integers(model, 2, value=1),
    }


def _sdxl(model: Any) -> Kwargs:
    given = model.config
    pooled = given.projection_class_embeddings_input_dim - 6 * given.addition_time_embed_dim
    return {
        "sample": zeros(model, 2, 4, 128, 128),
        "timestep": integers(model, 2, value=1),
        "encoder_hidden_states": zeros(model, 2, 77, given.cross_attention_dim),
        "encoder_attention_mask": integers(model, 2, 77, value=1),
        "added_cond_kwargs": {"text_embeds": zeros(model, 2, pooled), "time_ids": zeros(model, 2, 6)},
    }


def _pixart(model: Any) -> Kwargs:
    given = model.config
    return {
        "hidden_states": zeros(model, 2, 4, 128, 128),
        "encoder_hidden_states": zeros(model, 2, 300, given.caption_channels),
        "timestep": integers(model, 2, value=1),
        "encoder_attention_mask": integers(model, 2, 300, value=1),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def _z_image(model: Any) -> Kwargs:
    given = model.config
    return {
        "x": [zeros(model, given.in_channels, 1, 128, 128) for _ in range(2)],
        "t": zeros(model, 2),
        "cap_feats": [zeros(model, length, given.cap_feat_dim) for length in (512, 503)],
    }


def _auraflow(model: Any) -> Kwargs:
    return {
        "hidden_states": zeros(model, 2, 4, 128, 128),
        "encoder_hidden_states": zeros(model, 2, 256, model.config.joint_attention_dim),
        "timestep": zeros(model, 2),
    }


def _sana(model: Any) -> Kwargs:
    given = model.config
    return {
        "hidden_states": zeros(model, 2, given.in_channels, 32, 32),
        "encoder_hidden_states": zeros(model, 2, 300, given.caption_channels),
        "timestep": zeros(model, 2),
        "encoder_attention_mask": integers(model, 2, 300, value=1),
    }


def _cogvideo(model: Any) -> Kwargs:
    given = model.config
    return {
        "hidden_states": zeros(model, 1, 13, given.in_channels, 60, 90),
        "encoder_hidden_states": zeros(model, 1, 226, given.text_embed_dim),
        "timestep": integers(model, 1, value=1),
    }


_BLOCKS = {"num_layers": 1, "num_single_layers": 1}
_SDXL: Mapping[str, Any] = {
    "sample_size": 128,
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "layers_per_block": 1,
    "transformer_layers_per_block": (1, 1, 1),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
_SD3: Mapping[str, Any] = {
    "num_layers": 2,
    "num_attention_heads": 38,
    "caption_projection_dim": 2432,
    "pos_embed_max_size": 192,
    "qk_norm": "rms_norm",
}
_PIXART: Mapping[str, Any] = {"num_layers": 2, "caption_channels": 4096, "use_additional_conditions": False}
_AURAFLOW: Mapping[str, Any] = {"num_mmdit_layers": 1, "num_single_dit_layers": 1, "pos_embed_max_size": 9216}

DIFFUSION: tuple[Model, ...] = (
    _model("FLUX.1", "FluxTransformer2DModel", {**_BLOCKS, "guidance_embeds": True}, _flux),
    _model("FLUX.2", "Flux2Transformer2DModel", _BLOCKS, _flux),
    _model("Qwen Image", "QwenImageTransformer2DModel", {"num_layers": 2}, _qwen),
    _model("Wan 2.1 14B", "WanTransformer3DModel", {"num_layers": 2}, _wan),
    _model("HunyuanVideo", "HunyuanVideoTransformer3DModel", {**_BLOCKS, "num_refiner_layers": 1}, _hunyuan),
    _model("LTX Video", "LTXVideoTransformer3DModel", {"num_layers": 2}, _ltx),
    _model("SD 3.5 large", "SD3Transformer2DModel", _SD3, _sd3),
    _model("SDXL", "UNet2DConditionModel", _SDXL, _sdxl),
    _model("PixArt Sigma", "PixArtTransformer2DModel", _PIXART, _pixart),
    _model("Z Image", "ZImageTransformer2DModel", {"n_layers": 1, "n_refiner_layers": 1}, _z_image),
    _model("AuraFlow", "AuraFlowTransformer2DModel", _AURAFLOW, _auraflow),
    _model("Sana 1.6B", "SanaTransformer2DModel", {"num_layers": 2}, _sana),
    _model("CogVideoX 5B", "CogVideoXTransformer3DModel", {"num_attention_heads": 48, "num_layers": 2}, _cogvideo),
)
