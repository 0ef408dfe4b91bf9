"""Shapes of real models as data, and the function that makes a model out of a row.

A `Family` names a configuration and a model class of transformers, and holds one set of their arguments a size: "full" is the
real model's width (with fewer layers, which all look alike), "small" runs on two CPU cores. Weights are random, from a fixed seed.
To add a model: one row in FAMILIES.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

Size = Literal["full", "small"]
#: an `attn_implementation` that only reads q, k and v and writes as much as attention does: what is left is the rest of the model
NOTHING = "nothing"
Inputs = Literal["decoder", "encoder", "image", "patches", "audio", "text2text"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The inputs of one size: batch of a forward (a training step takes half), seqlen in tokens or mel frames, arguments of the config."""

    batch: int
    seqlen: int
    config: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One model family.

    shared: arguments of the configuration in every size.
    softcap: attention scores go through tanh. SDPA has none: with it, such a family has other numbers, or no such implementation.
    sinks: the softmax has them. SDPA has none either.
    implementations: those of its attention, if not all.
    """

    name: str
    config: str
    model: str
    inputs: Inputs
    sizes: Mapping[Size, Shape]
    shared: Mapping[str, Any] = field(default_factory=dict)
    softcap: bool = False
    sinks: bool = False
    implementations: tuple[str, ...] | None = None


def _decoder(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int, **more: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 8192,
        "vocab_size": 1024,
        **more,
    }


def _encoder(hidden: int, inner: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **more,
    }


def _whisper(width: int, inner: int, layers: int, heads: int, frames: int, text: int) -> dict[str, Any]:
    sides = ("encoder", "decoder")
    return {
        "d_model": width,
        **{f"{side}_layers": layers for side in sides},
        **{f"{side}_attention_heads": heads for side in sides},
        **{f"{side}_ffn_dim": inner for side in sides},
        # The encoder's convolution halves the frames.
        "max_source_positions": frames // 2,
        "max_target_positions": text,
        "vocab_size": 1024,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    }


_SMALL_DECODER = _decoder(256, 512, 2, 8, 2, 32)
_GEMMA_LAYERS = ["sliding_attention", "full_attention"] * 2

FAMILIES: Mapping[str, Family] = {
    f.name: f
    for f in (
        Family(
            name="llama",
            config="LlamaConfig",
            model="LlamaModel",
            inputs="decoder",
            sizes={
                "full": Shape(batch=4, seqlen=4096, config=_decoder(2048, 8192, 8, 32, 8, 64)),
                "small": Shape(batch=2, seqlen=1024, config=_decoder(256, 768, 4, 8, 2, 32)),
            },
        ),
        Family(
            name="qwen3",
            config="Qwen3Config",
            model="Qwen3Model",
            inputs="decoder",
            sizes={
                "full": Shape(batch=4, seqlen=4096, config=_decoder(2048, 6144, 8, 16, 8, 128)),
                "small": Shape(batch=2, seqlen=256, config=_SMALL_DECODER),
            },
        ),
        Family(
            name="mistral",
            config="MistralConfig",
            model="MistralModel",
            inputs="decoder",
            sizes={
                "full": Shape(batch=2, seqlen=4096, config=_decoder(4096, 14336, 4, 32, 8, 128, sliding_window=1024)),
                "small": Shape(batch=2, seqlen=256, config={**_SMALL_DECODER, "sliding_window": 64}),
            },
        ),
        Family(
            name="gemma2",
            config="Gemma2Config",
            model="Gemma2Model",
            inputs="decoder",
            softcap=True,
            sizes={
                "full": Shape(batch=4, seqlen=4096, config=_decoder(2304, 9216, 4, 8, 4, 256, sliding_window=1024)),
                "small": Shape(batch=2, seqlen=256, config={**_SMALL_DECODER, "sliding_window": 64}),
            },
        ),
        Family(
            name="gpt2",
            config="GPT2Config",
            model="GPT2Model",
            inputs="decoder",
            shared={"vocab_size": 1024, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
            sizes={
                "full": Shape(
                    batch=4, seqlen=4096, config={"n_embd": 768, "n_head": 12, "n_layer": 8, "n_positions": 4096}
                ),
                "small": Shape(
                    batch=2, seqlen=256, config={"n_embd": 256, "n_head": 4, "n_layer": 2, "n_positions": 256}
                ),
            },
        ),
        Family(
            name="gptj",
            config="GPTJConfig",
            model="GPTJModel",
            inputs="decoder",
            shared={"vocab_size": 1024, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
            implementations=("eager",),
            sizes={
                "full": Shape(
                    batch=2,
                    seqlen=6144,
                    config={"n_embd": 4096, "n_head": 16, "n_layer": 4, "n_positions": 6144, "rotary_dim": 64},
                ),
                "small": Shape(
                    batch=2,
                    seqlen=256,
                    config={"n_embd": 256, "n_head": 4, "n_layer": 2, "n_positions": 256, "rotary_dim": 16},
                ),
            },
        ),
        Family(
            name="gpt_neo",
            config="GPTNeoConfig",
            model="GPTNeoModel",
            inputs="decoder",
            shared={"vocab_size": 1024, "attention_dropout": 0.0, "embed_dropout": 0.0, "resid_dropout": 0.0},
            implementations=("eager",),
            sizes={
                "full": Shape(
                    batch=2,
                    seqlen=6144,
                    config={
                        "hidden_size": 2048,
                        "num_heads": 16,
                        "num_layers": 4,
                        "attention_types": [[["global", "local"], 2]],
                        "window_size": 256,
                        "max_position_embeddings": 6144,
                    },
                ),
                "small": Shape(
                    batch=2,
                    seqlen=256,
                    config={
                        "hidden_size": 256,
                        "num_heads": 4,
                        "num_layers": 2,
                        "attention_types": [[["global", "local"], 1]],
                        "window_size": 32,
                        "max_position_embeddings": 256,
                    },
                ),
            },
        ),
        Family(
            name="bert",
            config="BertConfig",
            model="BertModel",
            inputs="encoder",
            shared={"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "vocab_size": 1024},
            sizes={
                "full": Shape(batch=32, seqlen=512, config=_encoder(768, 3072, 8, 12)),
                "small": Shape(batch=4, seqlen=128, config=_encoder(256, 512, 2, 4)),
            },
        ),
        Family(
            name="vit",
            config="ViTConfig",
            model="ViTModel",
            inputs="image",
            shared={"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0},
            sizes={
                "full": Shape(batch=128, seqlen=197, config=_encoder(768, 3072, 8, 12, image_size=224, patch_size=16)),
                "small": Shape(batch=2, seqlen=65, config=_encoder(128, 256, 2, 4, image_size=64, patch_size=8)),
            },
        ),
        Family(
            name="whisper",
            config="WhisperConfig",
            model="WhisperModel",
            inputs="audio",
            sizes={
                "full": Shape(batch=16, seqlen=3000, config=_whisper(768, 3072, 4, 12, 3000, 448)),
                "small": Shape(batch=2, seqlen=256, config=_whisper(128, 256, 2, 4, 256, 64)),
            },
        ),
        Family(
            name="t5",
            config="T5Config",
            model="T5Model",
            inputs="text2text",
            shared={"dropout_rate": 0.0, "vocab_size": 1024, "decoder_start_token_id": 0},
            sizes={
                "full": Shape(
                    batch=16,
                    seqlen=512,
                    config={"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_heads": 12, "num_layers": 4},
                ),
                "small": Shape(
                    batch=2,
                    seqlen=64,
                    config={"d_model": 128, "d_kv": 32, "d_ff": 256, "num_heads": 4, "num_layers": 2},
                ),
            },
        ),
        Family(
            name="bloom",
            config="BloomConfig",
            model="BloomModel",
            inputs="decoder",
            shared={"vocab_size": 1024, "hidden_dropout": 0.0, "attention_dropout": 0.0},
            sizes={
                "full": Shape(batch=4, seqlen=2048, config={"hidden_size": 1024, "n_head": 16, "n_layer": 4}),
                "small": Shape(batch=2, seqlen=128, config={"hidden_size": 128, "n_head": 4, "n_layer": 2}),
            },
        ),
        Family(
            name="gpt_oss",
            config="GptOssConfig",
            model="GptOssModel",
            inputs="decoder",
            sinks=True,
            shared={"num_local_experts": 4, "num_experts_per_tok": 2},
            sizes={
                "full": Shape(batch=2, seqlen=4096, config=_decoder(2880, 2880, 2, 64, 8, 64, sliding_window=128)),
                "small": Shape(batch=2, seqlen=128, config={**_SMALL_DECODER, "sliding_window": 32}),
            },
        ),
        Family(
            name="gemma4",
            config="Gemma4TextConfig",
            model="Gemma4TextModel",
            inputs="decoder",
            # Heads of 512 dims see all keys, and those of 256 a window.
            shared={"vocab_size_per_layer_input": 1024, "hidden_size_per_layer_input": 64, "global_head_dim": 512},
            sizes={
                "full": Shape(
                    batch=2,
                    seqlen=4096,
                    config=_decoder(2560, 10240, 4, 8, 2, 256, sliding_window=512, layer_types=_GEMMA_LAYERS),
                ),
                "small": Shape(
                    batch=2,
                    seqlen=128,
                    config={**_SMALL_DECODER, "sliding_window": 32, "layer_types": _GEMMA_LAYERS[-2:]},
                ),
            },
        ),
        Family(
            name="deepseek_v32",
            config="DeepseekV32Config",
            model="DeepseekV32Model",
            inputs="decoder",
            shared={"layer_types": ["indexed_attention"] * 2, "mlp_layer_types": ["dense"] * 2},
            sizes={
                "full": Shape(batch=1, seqlen=4096, config=_decoder(7168, 4096, 2, 128, 128, 64, index_topk=1024)),
                "small": Shape(
                    batch=1,
                    seqlen=64,
                    config=_decoder(256, 512, 2, 4, 4, 64, index_topk=16, index_n_heads=4, q_lora_rank=64),
                ),
            },
        ),
        Family(
            name="qwen3_vl_vision",
            config="Qwen3VLVisionConfig",
            model="Qwen3VLVisionModel",
            inputs="patches",
            shared={"deepstack_visual_indexes": [0]},
            sizes={
                "full": Shape(batch=16, seqlen=1024, config={"depth": 4}),
                "small": Shape(
                    batch=2,
                    seqlen=64,
                    config={"depth": 2, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4},
                ),
            },
        ),
        Family(
            name="sam",
            config="SamVisionConfig",
            model="SamVisionModel",
            inputs="image",
            sizes={
                "full": Shape(
                    batch=4,
                    seqlen=4096,
                    config={"num_hidden_layers": 4, "global_attn_indexes": [1, 3], "image_size": 1024},
                ),
                "small": Shape(
                    batch=1,
                    seqlen=64,
                    config={
                        "hidden_size": 96,
                        "num_hidden_layers": 2,
                        "num_attention_heads": 2,
                        "global_attn_indexes": [1],
                        "image_size": 128,
                        "window_size": 5,
                    },
                ),
            },
        ),
    )
}


def is_known(name: str) -> bool:
    """Whether the installed transformers has the family's model."""
    import transformers

    return hasattr(transformers, FAMILIES[name].model)


def build(
    name: str,
    size: Size,
    attn_implementation: str,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> nn.Module:
    """The model of a family with random weights, in eval mode. The weights are drawn on `device`, so they differ from one to another.

    Raises KeyError for an unknown family or size, and transformers' own ValueError where the family has no such
    `attn_implementation` ("sdpa", "eager", "flex_attention" or NOTHING; Bloom has only the second).
    """
    import transformers

    transformers.AttentionInterface.register(NOTHING, nothing)

    family = FAMILIES[name]
    # Nested dicts of a config (rope) are changed in place by transformers: FAMILIES must stay as it is.
    arguments = copy.deepcopy({**family.shared, **family.sizes[size].config})
    config = getattr(transformers, family.config)(attn_implementation=attn_implementation, **arguments)
    with torch.random.fork_rng(devices=[] if device in ("cpu", "meta") else [device]), torch.device(device):
        torch.manual_seed(seed)
        model: nn.Module = getattr(transformers, family.model)(config)
    return model.to(dtype=dtype).eval()


def nothing(
    _module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: Any, **_: Any
) -> tuple[torch.Tensor, None]:
    """NOTHING for transformers: q + k + v in place of attention. q, k, v: (batch, heads, seqlen, head_dim), of k and v maybe fewer heads,
    and another seqlen. Returns (batch, seqlen_q, heads_q, head_dim) and no weights."""
    both = key + value
    missing = query.shape[2] - both.shape[2]
    both = nn.functional.pad(both, (0, 0, 0, missing)) if missing > 0 else both[:, :, : query.shape[2]]
    groups = query.shape[1] // both.shape[1]
    grouped = torch.unflatten(query, 1, (both.shape[1], groups)) + both.unsqueeze(2)
    return grouped.flatten(1, 2).transpose(1, 2).contiguous(), None
