"""Attention outside transformers: torch.nn's own modules, a timm vision transformer, a diffusers transformer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from tests.hf.family import SEED, Family, Kwargs, Size, noise, spread_weights
from tests.hf.packages import import_package

_NO_CACHE = "the module has no key/value cache"
_NO_CHECKPOINT = "the module has no gradient checkpointing of its own"
_NO_WEIGHTS = "the module can't return attention weights"
_NOT_TEXT = "its input is an image: nothing is padded"
# torch.nn's inference fast path takes an even number of heads only.
_EVEN, _EVEN_HEADS = 44, 4
_NN_ABSENT: dict[str, str] = {"static_decode": _NO_CACHE, "no_cache": _NO_CACHE, "checkpoint": _NO_CHECKPOINT}


class SelfAttention(nn.Module):
    """nn.MultiheadAttention as self attention on (B, S, 44), with a residual so that the output is not the values alone."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(_EVEN, _EVEN_HEADS, batch_first=True)

    def forward(
        self, x: torch.Tensor, key_padding_mask: torch.Tensor | None = None, output_attentions: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        attended, weights = self.attention(
            x, x, x, key_padding_mask=key_padding_mask, need_weights=output_attentions, average_attn_weights=False
        )
        return x + attended, weights


class CrossAttention(nn.Module):
    """nn.MultiheadAttention from (B, S, 45) to a longer memory of other widths, sequence first as is torch.nn's default."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(45, 3, kdim=21, vdim=17)

    def forward(
        self,
        x: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        output_attentions: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        attended, weights = self.attention(
            x.transpose(0, 1),
            key.transpose(0, 1),
            value.transpose(0, 1),
            key_padding_mask=key_padding_mask,
            need_weights=output_attentions,
        )
        return attended.transpose(0, 1), weights


class CausalEncoder(nn.Module):
    """nn.TransformerEncoder of two layers under a causal mask, as language models on torch.nn are written."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(45, 5, 56, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.encoder(x, mask=mask, is_causal=True)  # type: ignore[no-any-return]


def _nn_builder(make: Callable[[], nn.Module]) -> Callable[[str], nn.Module]:
    def build(impl: str) -> nn.Module:
        torch.manual_seed(SEED)
        return spread_weights(make())

    return build


def _encoder_layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(_EVEN, _EVEN_HEADS, 56, activation="gelu", batch_first=True)


def _encoder() -> nn.Module:
    return nn.TransformerEncoder(_encoder_layer(), 2)


def _decoder() -> nn.Module:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(45, 5, 56, activation="gelu", batch_first=True), 2)


def _states(name: str, width: int = _EVEN) -> Callable[[Size], Kwargs]:
    return lambda size: {name: noise(size.batch, size.seqlen, width)}


def _cross_inputs(size: Size) -> Kwargs:
    return {
        "x": noise(size.batch, size.seqlen - 4, 45),
        "key": noise(size.batch, size.seqlen, 21, seed=1),
        "value": noise(size.batch, size.seqlen, 17, seed=2),
    }


def _decoder_inputs(size: Size) -> Kwargs:
    return {"tgt": noise(size.batch, size.seqlen - 4, 45), "memory": noise(size.batch, size.seqlen, 45, seed=1)}


def _nn(
    name: str,
    make: Callable[[], nn.Module],
    inputs: Callable[[Size], Kwargs],
    *,
    sites: int,
    mask: str = "",
    absent: Mapping[str, str] | None = None,
) -> Family:
    return Family(
        name=name,
        kind="module",
        build=_nn_builder(make),
        inputs=inputs,
        sites=sites,
        mask=mask,
        mask_true_is_padding=True,
        impls=("torch",),
        absent={**_NN_ABSENT, **(absent or {})},
    )


_NO_WEIGHTS_ABSENT = {"output_attentions": _NO_WEIGHTS}

TORCH_MODULES: tuple[Family, ...] = (
    _nn("mha_self", SelfAttention, _states("x"), sites=1, mask="key_padding_mask"),
    _nn("mha_cross", CrossAttention, _cross_inputs, sites=1, mask="key_padding_mask"),
    _nn(
        "encoder_layer",
        _encoder_layer,
        _states("src"),
        sites=1,
        mask="src_key_padding_mask",
        absent=_NO_WEIGHTS_ABSENT,
    ),
    _nn("encoder", _encoder, _states("src"), sites=2, mask="src_key_padding_mask", absent=_NO_WEIGHTS_ABSENT),
    _nn(
        "encoder_causal",
        CausalEncoder,
        _states("x", 45),
        sites=2,
        absent={**_NO_WEIGHTS_ABSENT, "padded": "the wrapper takes a causal mask only"},
    ),
    _nn(
        "transformer_decoder",
        _decoder,
        _decoder_inputs,
        sites=4,
        mask="memory_key_padding_mask",
        absent=_NO_WEIGHTS_ABSENT,
    ),
)


def _timm_vit(impl: str) -> nn.Module:
    timm = import_package("timm")
    torch.manual_seed(SEED)
    model: nn.Module = timm.create_model(
        "vit_tiny_patch16_224", img_size=24, patch_size=8, depth=2, embed_dim=45, num_heads=5, num_classes=11
    )
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            setattr(module, "fused_attn", impl == "sdpa")  # noqa: B010 - nn.Module types its attributes as tensors
    return spread_weights(model)


def _dit(impl: str) -> nn.Module:
    diffusers = import_package("diffusers")
    processors = import_package("diffusers.models.attention_processor")
    torch.manual_seed(SEED)
    model: nn.Module = diffusers.DiTTransformer2DModel(
        num_attention_heads=3,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        norm_num_groups=1,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
    )
    processor = processors.AttnProcessor2_0 if impl == "sdpa" else processors.AttnProcessor
    for module in model.modules():
        if isinstance(module, processors.Attention):
            module.set_processor(processor())
    return spread_weights(model)


def _dit_inputs(size: Size) -> Kwargs:
    return {
        "hidden_states": noise(size.batch, 4, 8, 8),
        "timestep": torch.arange(size.batch) * 7 + 3,
        "class_labels": torch.arange(size.batch) % 10,
    }


_IMAGE_ABSENT = {
    "static_decode": _NO_CACHE,
    "no_cache": _NO_CACHE,
    "padded": _NOT_TEXT,
    "output_attentions": _NO_WEIGHTS,
}

OTHER_LIBRARIES: tuple[Family, ...] = (
    Family(
        name="timm_vit",
        kind="vision",
        build=_timm_vit,
        inputs=lambda size: {"x": noise(size.batch, 3, 24, 24)},
        sites=2,
        absent=_IMAGE_ABSENT,
    ),
    Family(
        name="diffusers_dit",
        kind="vision",
        build=_dit,
        inputs=_dit_inputs,
        sites=2,
        absent=_IMAGE_ABSENT,
    ),
)
