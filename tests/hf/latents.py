"""Tiny models of the families of transformers that cache a latent, each as its text model alone, and steps of greedy decoding by them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.hf.family import SEED, spread_weights
from tests.hf.packages import Unavailable, import_package

VOCAB, LAYERS, HEADS, RANK, ROPE, NOPE, V = 64, 2, 4, 32, 8, 16, 12
#: tokens of a padded prompt, and slots of a static cache
PROMPT, SLOTS = 19, 32

_SETTINGS: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": LAYERS,
    "kv_lora_rank": RANK,
    "q_lora_rank": 24,
    "qk_rope_head_dim": ROPE,
    "qk_nope_head_dim": NOPE,
    "v_head_dim": V,
    "max_position_embeddings": 64,
    "index_topk": 64,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_FULL = {"layer_types": ["full_attention"] * LAYERS, "mlp_layer_types": ["dense"] * LAYERS, "linear_head_dim": 8}


@dataclass(frozen=True, kw_only=True)
class LatentFamily:
    """config, model: names in transformers. settings: on top of those of all. impl: the attention implementation.
    is_cut: its own code breaks the graph before the attention."""

    config: str
    model: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    impl: str = "sdpa"
    is_cut: bool = False

    def build(self) -> tuple[Any, nn.Module]:
        """(config, model); raises Unavailable where this transformers does not have the family."""
        folder = self.model.partition(":")[0]
        try:
            import_package("transformers")
            configs = importlib.import_module(f"transformers.models.{folder}.configuration_{folder}")
            models = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
        except ModuleNotFoundError as error:
            raise Unavailable(str(error)) from error
        config = getattr(configs, self.config)(**{**_SETTINGS, **self.settings})
        torch.manual_seed(SEED)
        model = getattr(models, self.model.partition(":")[2])._from_config(config, attn_implementation=self.impl)
        return config, spread_weights(model).eval()


LATENTS: Mapping[str, LatentFamily] = {
    "deepseek_v2": LatentFamily(config="DeepseekV2Config", model="deepseek_v2:DeepseekV2Model"),
    "deepseek_v3": LatentFamily(config="DeepseekV3Config", model="deepseek_v3:DeepseekV3Model"),
    "deepseek_v32": LatentFamily(config="DeepseekV32Config", model="deepseek_v32:DeepseekV32Model"),
    "minicpm3": LatentFamily(config="MiniCPM3Config", model="minicpm3:MiniCPM3Model"),
    "glm4_moe_lite": LatentFamily(config="Glm4MoeLiteConfig", model="glm4_moe_lite:Glm4MoeLiteModel"),
    "glm_moe_dsa": LatentFamily(config="GlmMoeDsaConfig", model="glm_moe_dsa:GlmMoeDsaModel"),
    "glm5_next": LatentFamily(
        config="Glm5NextTextConfig",
        model="glm5_next:Glm5NextTextModel",
        is_cut=True,
        settings={**_FULL, "qk_rope_head_dim": 0, "linear_num_heads": 2, "indexer_types": ["full"] * LAYERS},
    ),
    "mistral4": LatentFamily(config="Mistral4Config", model="mistral4:Mistral4Model"),
    "mistral_large4": LatentFamily(
        config="MistralLarge4TextConfig",
        model="mistral_large4:MistralLarge4TextModel",
        # Both layers read one latent.
        settings={
            "indexer_types": ["full"] * LAYERS,
            "mlp_layer_types": ["dense"] * LAYERS,
            "kv_source_layers": [0, 0],
            "no_rope_layers": [1, 1],
        },
    ),
    "youtu": LatentFamily(config="YoutuConfig", model="youtu:YoutuModel"),
    "axk1": LatentFamily(config="AXK1Config", model="axk1:AXK1Model"),
    "axk2": LatentFamily(config="AXK2Config", model="axk2:AXK2Model"),
    "longcat_flash": LatentFamily(
        config="LongcatFlashConfig",
        model="longcat_flash:LongcatFlashModel",
        settings={
            "num_layers": 1,
            "ffn_hidden_size": 64,
            "expert_ffn_hidden_size": 32,
            "moe_topk": 2,
            "zero_expert_num": 2,
            "head_dim": 8,
        },
    ),
    "dots3_note": LatentFamily(
        config="Dots3NoteTextConfig",
        model="dots3_note:Dots3NoteTextModel",
        settings={"mlp_layer_types": ["dense"] * LAYERS},
    ),
    "kimi_linear": LatentFamily(
        config="KimiLinearConfig",
        model="kimi_linear:KimiLinearModel",
        settings={**_FULL, "model_max_length": 64, "linear_num_heads": 2},
    ),
    "bailing_hybrid": LatentFamily(
        config="BailingHybridConfig",
        model="bailing_hybrid:BailingHybridModel",
        settings={**_FULL, "head_dim": 16, "num_groups": 2},
    ),
    "hy_v4": LatentFamily(config="HYV4Config", model="hy_v4:HYV4Model", impl="eager"),
}


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """tokens: that were chosen, (steps, batch). scores: that they were chosen by."""

    tokens: torch.Tensor
    scores: torch.Tensor


def decoded(
    model: Any, step: Any, config: Any, *, static: bool, steps: int = 3, dtype: torch.dtype | None = None
) -> Decoding:
    """Greedy steps after a prompt that is padded on the left. step: takes the model's place in all calls but the prompt's."""
    transformers = import_package("transformers")
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(3, VOCAB, (2, PROMPT), generator=generator)
    # The text models have no head of their own.
    head = torch.randn(VOCAB, config.hidden_size, generator=generator).to(dtype or torch.float32)
    mask = torch.ones(2, PROMPT, dtype=torch.long)
    mask[0, :2] = 0
    cache = (
        transformers.StaticCache(config=config, max_cache_len=SLOTS)
        if static
        else transformers.DynamicCache(config=config)
    )
    scores, tokens = [], []
    with torch.no_grad():
        for number in range(steps + 1):
            run = model if number == 0 else step
            out = run(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
            logits = out.last_hidden_state[:, -1] @ head.T
            ids = logits.argmax(-1, keepdim=True)
            mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
            scores.append(logits)
            tokens.append(ids[:, 0])
    return Decoding(tokens=torch.stack(tokens), scores=torch.stack(scores))
