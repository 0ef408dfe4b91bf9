"""Text encoders, vision models, and encoder-decoders of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from attn_compiler.lowerings.shared.limits.common import torch_release
from tests.hf.family import VOCAB, Family, Kwargs, Size, Uncaptured, hf_builder, noise, text_inputs, token_ids

#: torch 2.15 and newer trace it
_TRACES_REQUIRES_GRAD = torch_release(str(torch.__version__)) >= (2, 15)
_SETS_REQUIRES_GRAD = Uncaptured(
    sites=2, why="it sets position_bias.requires_grad, which breaks the graph in the loop over decoder layers"
)
_NO_CACHE = "an encoder has no key/value cache"
_NOT_TEXT = "its input is an image: nothing is padded"
_BERT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 45,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_SEQ2SEQ: dict[str, Any] = {
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}
_BART: dict[str, Any] = {
    **_SEQ2SEQ,
    "d_model": 45,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 5,
    "decoder_attention_heads": 5,
    "encoder_ffn_dim": 56,
    "decoder_ffn_dim": 56,
}


def _encoder(name: str, model: str, settings: Mapping[str, Any], *, sites: int = 2) -> Family:
    return Family(
        name=name,
        kind="encoder",
        build=hf_builder(model, settings),
        inputs=text_inputs,
        sites=sites,
        mask="attention_mask",
        absent={"static_decode": _NO_CACHE, "no_cache": _NO_CACHE},
    )


def _vision(
    name: str, model: str, settings: Mapping[str, Any], inputs: Callable[[Size], Kwargs], *, sites: int
) -> Family:
    return Family(
        name=name,
        kind="vision",
        build=hf_builder(model, settings),
        inputs=inputs,
        sites=sites,
        absent={"static_decode": _NO_CACHE, "no_cache": _NO_CACHE, "padded": _NOT_TEXT},
    )


def _images(size: Size) -> Kwargs:
    """float32[B, 3, 24, 24]; the sequence length is the image's own, so only the batch varies."""
    return {"pixel_values": noise(size.batch, 3, 24, 24)}


def _clip_inputs(size: Size) -> Kwargs:
    # CLIP pools at the end-of-text token, here the largest id.
    ids = token_ids(size.batch, size.seqlen)
    ids[:, -1] = VOCAB - 1
    return {"input_ids": ids, **_images(size)}


def _seq2seq_inputs(size: Size) -> Kwargs:
    return {
        "input_ids": token_ids(size.batch, size.seqlen),
        "decoder_input_ids": token_ids(size.batch, size.seqlen - 4, seed=1),
    }


def _whisper_inputs(size: Size) -> Kwargs:
    # 2 spectrogram frames become one encoder position; Whisper's encoder takes exactly max_source_positions of them.
    return {
        "input_features": noise(size.batch, 8, 34),
        "decoder_input_ids": token_ids(size.batch, size.seqlen, seed=1),
    }


def _seq2seq(
    name: str,
    model: str,
    settings: Mapping[str, Any],
    *,
    inputs: Callable[[Size], Kwargs] = _seq2seq_inputs,
    mask: str = "attention_mask",
    uncaptured: Mapping[str, Uncaptured] | None = None,
) -> Family:
    # Two encoder layers with one site, two decoder layers with self and cross attention; a decode step runs no encoder.
    return Family(
        name=name,
        kind="encoder_decoder",
        build=hf_builder(model, settings),
        inputs=inputs,
        sites=6,
        sites_in={"static_decode": 4},
        mask=mask,
        uncaptured=dict(uncaptured or {}),
    )


ENCODERS: tuple[Family, ...] = (
    _encoder("bert", "BertModel", _BERT),
    _encoder("roberta", "RobertaModel", _BERT),
    _encoder(
        "distilbert",
        "DistilBertModel",
        {
            "vocab_size": VOCAB,
            "dim": 45,
            "hidden_dim": 56,
            "n_layers": 2,
            "n_heads": 5,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
        },
    ),
    _encoder(
        "modernbert",
        "ModernBertModel",
        {
            **_BERT,
            "hidden_size": 48,
            "num_attention_heads": 3,
            "local_attention": 6,
            "global_attn_every_n_layers": 2,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
    ),
)

VISION: tuple[Family, ...] = (
    _vision(
        "vit",
        "ViTModel",
        {
            "hidden_size": 45,
            "intermediate_size": 56,
            "num_hidden_layers": 2,
            "num_attention_heads": 5,
            "image_size": 24,
            "patch_size": 8,
        },
        _images,
        sites=2,
    ),
    Family(
        name="clip",
        kind="vision",
        build=hf_builder(
            "CLIPModel",
            {
                "text_config": {**_BERT, "bos_token_id": 1, "eos_token_id": VOCAB - 1, "projection_dim": 20},
                "vision_config": {
                    "hidden_size": 42,
                    "intermediate_size": 56,
                    "num_hidden_layers": 3,
                    "num_attention_heads": 3,
                    "image_size": 24,
                    "patch_size": 8,
                    "projection_dim": 20,
                },
                "projection_dim": 20,
            },
        ),
        inputs=_clip_inputs,
        sites=5,
        mask="attention_mask",
        absent={"static_decode": _NO_CACHE, "no_cache": _NO_CACHE},
    ),
    _vision(
        "swin",
        "SwinModel",
        {
            "image_size": 24,
            "patch_size": 2,
            "embed_dim": 12,
            "depths": [2, 2],
            "num_heads": [2, 3],
            "window_size": 3,
            "drop_path_rate": 0.0,
        },
        _images,
        sites=4,
    ),
)

SEQ2SEQ: tuple[Family, ...] = (
    _seq2seq(
        "t5",
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCAB,
            "d_model": 45,
            "d_kv": 7,
            "d_ff": 56,
            "num_layers": 2,
            "num_heads": 5,
            "pad_token_id": 0,
            "eos_token_id": 2,
            "decoder_start_token_id": 0,
            "feed_forward_proj": "gated-gelu",
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 20,
        },
        uncaptured={} if _TRACES_REQUIRES_GRAD else {"checkpoint": _SETS_REQUIRES_GRAD},
    ),
    _seq2seq("bart", "BartForConditionalGeneration", {**_BART, "max_position_embeddings": 64}),
    _seq2seq(
        "whisper",
        "WhisperForConditionalGeneration",
        {
            **_BART,
            "d_model": 50,  # its sinusoidal positions need an even width
            "num_mel_bins": 8,
            "max_source_positions": 17,
            "max_target_positions": 64,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        inputs=_whisper_inputs,
        mask="decoder_attention_mask",
    ),
)
