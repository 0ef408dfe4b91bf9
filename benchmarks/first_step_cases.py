"""Models, the calls of them, and inputs of any length, for `bench_first_step`: what is compiled there, and not how fast it runs.

A model has the heads, head dims and kinds of layers of the real one, 8 layers and as few weights as that leaves. To add one: a row in
MODELS.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from benchmarks.inputs import padding_mask

Kind = Literal["decoder", "encoder", "text2text", "audio", "image"]
Mask = Literal["ones", "right", "left"]
Size = Literal["full", "small"]

LAYERS: Mapping[Size, int] = {"full": 8, "small": 2}
#: tokens of a prompt beside an image, and of Whisper's text
_TEXT = 448
#: "small", divides the widths of a model, not its heads' dims
_SMALLER = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """How a model is called. mask: as a tokenizer makes it (int64, 1 for a token): all of it, or padded on that side; None: no mask is
    given. checkpointing: gradient checkpointing of every layer, not reentrant."""

    name: str
    training: bool = False
    mask: Mask | None = None
    use_cache: bool = False
    checkpointing: bool = False


CALLS: Mapping[str, Call] = {
    call.name: call
    for call in (
        Call(name="prefill"),
        Call(name="prefill_cache", use_cache=True),
        Call(name="prefill_ones", mask="ones"),
        Call(name="prefill_left", mask="left"),
        Call(name="prefill_right", mask="right"),
        Call(name="train", training=True),
        Call(name="train_ones", training=True, mask="ones"),
        Call(name="train_right", training=True, mask="right"),
        Call(name="train_left", training=True, mask="left"),
        Call(name="train_checkpoint", training=True, checkpointing=True),
        Call(name="train_right_checkpoint", training=True, mask="right", checkpointing=True),
    )
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """config: arguments of the configuration. wide: those of them that "small" has an eighth of. per_layer: those that say how many layers.
    of_length: further arguments, from the length. call: arguments of every call. on_cpu: it is measured there, too."""

    name: str
    kind: Kind
    config_class: str
    model_class: str
    config: Mapping[str, Any]
    wide: tuple[str, ...]
    per_layer: tuple[str, ...] = ("num_hidden_layers",)
    of_length: Callable[[int], dict[str, Any]] = lambda _: {}
    call: Mapping[str, Any] = field(default_factory=dict)
    on_cpu: bool = False


def _positions(name: str) -> Callable[[int], dict[str, Any]]:
    return lambda length: {name: length}


def _decoder(name: str, config_class: str, heads: int, kv_heads: int, width: int, **more: Any) -> Model:
    of_model = {key: more.pop(key) for key in ("model_class", "on_cpu") if key in more}
    config = {
        "hidden_size": heads * width,
        "intermediate_size": 4 * heads * width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": 1024,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }
    return Model(
        name=name,
        kind="decoder",
        config_class=config_class,
        model_class=of_model.get("model_class", config_class.removesuffix("Config") + "Model"),
        config=config,
        wide=("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
        of_length=_positions("max_position_embeddings"),
        on_cpu=of_model.get("on_cpu", False),
    )


def _encoder(name: str, config_class: str, *, on_cpu: bool = False, **more: Any) -> Model:
    """Of BERT's kind. Two positions more than tokens: RoBERTa's kind counts from there."""
    return Model(
        name=name,
        kind="encoder",
        config_class=config_class,
        model_class=config_class.removesuffix("Config") + "Model",
        config={"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "vocab_size": 1024}
        | {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, **more},
        wide=("hidden_size", "intermediate_size", "num_attention_heads"),
        of_length=lambda length: {"max_position_embeddings": length + 2},
        on_cpu=on_cpu,
    )


def _sides(**values: Any) -> dict[str, Any]:
    return {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in values.items()}


_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

MODELS: Mapping[str, Model] = {
    model.name: model
    for model in (
        _decoder("llama", "LlamaConfig", 32, 8, 64, head_dim=64, on_cpu=True),
        _decoder("qwen3", "Qwen3Config", 16, 8, 128, head_dim=128),
        _decoder(
            "gemma3",
            "Gemma3TextConfig",
            8,
            8,
            256,
            head_dim=256,
            sliding_window=512,
            model_class="Gemma3TextModel",
        ),
        _decoder("granite", "GraniteConfig", 32, 8, 64),
        _decoder("cohere2", "Cohere2Config", 16, 8, 128, sliding_window=512),
        _decoder(
            "deepseek_v3",
            "DeepseekV3Config",
            16,
            16,
            128,
            # Attention is what differs; every layer is dense.
            first_k_dense_replace=1 << 10,
            q_lora_rank=512,
            kv_lora_rank=256,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
        ),
        Model(
            name="gpt2",
            kind="decoder",
            config_class="GPT2Config",
            model_class="GPT2Model",
            config={"n_embd": 1024, "n_head": 16, "vocab_size": 1024, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
            | {"resid_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2},
            wide=("n_embd", "n_head"),
            per_layer=("n_layer",),
            of_length=_positions("n_positions"),
            on_cpu=True,
        ),
        _encoder("bert", "BertConfig", on_cpu=True),
        _encoder("electra", "ElectraConfig", embedding_size=1024),
        _encoder("nomic_bert", "NomicBertConfig"),
        _encoder("data2vec_text", "Data2VecTextConfig", **_TOKENS),
        Model(
            name="modernbert",
            kind="encoder",
            config_class="ModernBertConfig",
            model_class="ModernBertModel",
            config={"hidden_size": 1024, "intermediate_size": 2624, "num_attention_heads": 16, "vocab_size": 1024}
            | {**_TOKENS, "cls_token_id": 3, "sep_token_id": 4},
            wide=("hidden_size", "intermediate_size", "num_attention_heads"),
            of_length=_positions("max_position_embeddings"),
        ),
        Model(
            name="t5",
            kind="text2text",
            config_class="T5Config",
            model_class="T5Model",
            config={"d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_heads": 16, "vocab_size": 1024}
            | {"dropout_rate": 0.0, "decoder_start_token_id": 0},
            wide=("d_model", "d_ff", "num_heads"),
            per_layer=("num_layers",),
            call={"use_cache": False},
            on_cpu=True,
        ),
        Model(
            name="m2m_100",
            kind="text2text",
            config_class="M2M100Config",
            model_class="M2M100Model",
            config={
                "d_model": 1024,
                **_sides(attention_heads=16, ffn_dim=4096, layerdrop=0.0),
                "vocab_size": 1024,
                **_TOKENS,
            }
            | {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "decoder_start_token_id": 2},
            wide=("d_model", "encoder_attention_heads", "decoder_attention_heads"),
            per_layer=("encoder_layers", "decoder_layers"),
            of_length=_positions("max_position_embeddings"),
            call={"use_cache": False},
        ),
        Model(
            name="whisper",
            kind="audio",
            config_class="WhisperConfig",
            model_class="WhisperModel",
            config={"d_model": 1024, **_sides(attention_heads=16, ffn_dim=4096), "vocab_size": 1024, **_TOKENS}
            | {"decoder_start_token_id": 1, "max_target_positions": _TEXT},
            wide=("d_model", "encoder_attention_heads", "decoder_attention_heads"),
            per_layer=("encoder_layers", "decoder_layers"),
            of_length=_positions("max_source_positions"),
            call={"use_cache": False},
        ),
        Model(
            name="sd3",
            kind="image",
            config_class="",
            model_class="SD3Transformer2DModel",
            config={"attention_head_dim": 64, "num_attention_heads": 16, "joint_attention_dim": 1024}
            | {"caption_projection_dim": 1024, "pooled_projection_dim": 1024, "in_channels": 16, "out_channels": 16}
            | {"pos_embed_max_size": 192},
            wide=("num_attention_heads", "joint_attention_dim", "caption_projection_dim", "pooled_projection_dim"),
            per_layer=("num_layers",),
        ),
    )
}


def applies(model: Model, call: Call) -> bool:
    """Only text has padding here, only a decoder a cache of its own."""
    return not (call.mask and model.kind in ("audio", "image")) and not (call.use_cache and model.kind != "decoder")


def arguments(model: Model, size: Size, length: int) -> dict[str, Any]:
    """Of the configuration."""
    found = {**copy.deepcopy(dict(model.config)), **model.of_length(length)}
    if size == "small":
        found |= {name: max(1, found[name] // _SMALLER) for name in model.wide}
    return found | dict.fromkeys(model.per_layer, LAYERS[size])


def build(name: str, call: Call, size: Size, length: int, *, dtype: torch.dtype, device: str) -> nn.Module:
    """The model with random weights, as the call wants it. Raises KeyError for an unknown one."""
    model, given = MODELS[name], arguments(MODELS[name], size, length)
    with torch.device(device):
        torch.manual_seed(0)
        made = _image_model(model, given, length) if model.kind == "image" else _text_model(model, given)
    made = made.to(dtype=dtype).train(call.training)
    if call.checkpointing:
        _checkpoint(made)
    return made


def _text_model(model: Model, given: dict[str, Any]) -> nn.Module:
    import transformers

    # The implementation of attention is transformers' choice, as for users.
    config = getattr(transformers, model.config_class)(**given)
    made: nn.Module = getattr(transformers, model.model_class)(config)
    return made


def _image_model(model: Model, given: dict[str, Any], length: int) -> nn.Module:
    import diffusers

    made: nn.Module = getattr(diffusers, model.model_class)(sample_size=max(_sides_of(length)), **given)
    return made


def _checkpoint(model: Any) -> None:
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.enable_gradient_checkpointing()


def inputs(
    name: str, call: Call, size: Size, length: int, batch: int, *, dtype: torch.dtype, device: str
) -> dict[str, Any]:
    """Keyword arguments for `build(name, …)`."""
    model, given = MODELS[name], arguments(MODELS[name], size, length)
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(5, 1000, (batch, count), generator=generator).to(device)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(batch, *shape, generator=generator).to(device, dtype)

    found: dict[str, Any] = dict(model.call)
    if model.kind == "image":
        height, width = _sides_of(length)
        found["hidden_states"] = random(given["in_channels"], height, width)
        found["encoder_hidden_states"] = random(min(_TEXT, length), given["joint_attention_dim"])
        found["pooled_projections"] = random(given["pooled_projection_dim"])
        found["timestep"] = torch.full((batch,), 500, device=device)
    elif model.kind == "audio":
        found |= {"input_features": random(80, 2 * length), "decoder_input_ids": tokens(min(_TEXT, length))}
    else:
        found["input_ids"] = tokens(length)
        if model.kind == "text2text":
            found["decoder_input_ids"] = tokens(length)
        if model.kind == "decoder":
            found["use_cache"] = call.use_cache
    mask = _mask(call, batch, length)
    return found if mask is None else {**found, "attention_mask": mask.to(device)}


def _mask(call: Call, batch: int, length: int) -> torch.Tensor | None:
    if call.mask is None:
        return None
    ones = torch.ones(batch, length, dtype=torch.int64)
    return ones if call.mask == "ones" else padding_mask(batch, length, left=call.mask == "left")


def _sides_of(length: int) -> tuple[int, int]:
    """Height and width of a latent image whose patches of 2 x 2 are so many, nearly as high as it is wide."""
    side = int(length**0.5)
    while length % side:
        side -= 1
    return 2 * side, 2 * (length // side)
