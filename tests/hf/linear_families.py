"""The families of transformers 5.24 with layers of linear attention that are taken: a tiny model of each, and the same in float64."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.hf.family import config_of
from tests.hf.packages import import_package

VOCAB = 97
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LAYERS = ["linear_attention", "linear_attention", "full_attention"]
_OF_LAYERS: dict[str, Any] = {**_SIZES, "num_hidden_layers": 3, "layer_types": _LAYERS}
_DELTA: dict[str, Any] = {
    **_OF_LAYERS,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "head_dim": 16,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    # The one that takes float64 and does not break the graph.
    "experts_implementation": "batched_mm",
}
_INDEXER: dict[str, Any] = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
_LATENTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "mlp_layer_types": ["dense"] * 3,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_chunk_size": 16,
    "mamba_expand": 2,
}


@dataclass(frozen=True, kw_only=True)
class LinearFamily:
    """A model of three layers, of which one has a softmax where the family has such layers.

    name: that of its folder in transformers. kind: the recurrence, in words. model, config: its classes. settings: of the config.
    text: settings of the config of its language model, where that is one of several. linear: layers of linear attention.
    sites: attentions with a softmax. whole: Dynamo makes one graph of it.
    has_gated_steps: its function for one token multiplies by a gate, too, which no template has, so such calls stay the model's.
    """

    name: str
    kind: str
    model: str
    config: str
    settings: Mapping[str, Any]
    text: str = ""
    linear: int = 2
    sites: int = 1
    whole: bool = True
    has_gated_steps: bool = False

    def build(self, dtype: torch.dtype = torch.float32, folder: Path | None = None) -> Any:
        """The model in eval mode, with parameters that are not all alike, as they are when they were trained.

        dtype: with float64, the model's file is taken with float64 in the place of float32, and written to `folder`.
        """
        torch.manual_seed(0)
        model = getattr(_module(self.name), self.model)(self._config()).float()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.1))
        if dtype == torch.float64:
            wide = getattr(_wide_module(self.name, folder), self.model)(self._config()).double()
            wide.load_state_dict(model.state_dict())
            model = wide
        return model.eval()

    def _config(self) -> Any:
        transformers = import_package("transformers")
        made = getattr(transformers, self.config)
        return made(**{self.text: dict(self.settings)}, **_VISION) if self.text else made(**self.settings)


_VISION: dict[str, Any] = {"vision_config": {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}}

_GATED, _CHANNEL, _SPACE = "gated delta rule", "Kimi's delta attention", "state space"


def _family(
    name: str, kind: str, model: str, settings: Mapping[str, Any], *, config: str = "", **how: Any
) -> LinearFamily:
    """config: where it is not called as the model is."""
    return LinearFamily(name=name, kind=kind, model=model, config=config or config_of(model), settings=settings, **how)


FAMILIES: tuple[LinearFamily, ...] = (
    _family("qwen3_next", _GATED, "Qwen3NextForCausalLM", {**_DELTA, **_EXPERTS, "mlp_only_layers": [0, 1, 2]}),
    _family("qwen3_5", _GATED, "Qwen3_5ForCausalLM", _DELTA, config="Qwen3_5TextConfig"),
    _family("qwen3_5_moe", _GATED, "Qwen3_5MoeForCausalLM", {**_DELTA, **_EXPERTS}, config="Qwen3_5MoeTextConfig"),
    _family(
        "qwen4_exp",
        _GATED,
        "Qwen4ExpForCausalLM",
        {**_DELTA, **_EXPERTS, **_INDEXER, "hc_count": 2, "hc_lowrank": 8},
        config="Qwen4ExpTextConfig",
        whole=False,
    ),
    _family(
        "olmo_hybrid", _GATED, "OlmoHybridForCausalLM", {**_DELTA, "num_key_value_heads": 4, "linear_num_key_heads": 4}
    ),
    _family("lara_mini", _GATED, "LaraMiniForCausalLM", {**_DELTA, **_EXPERTS}),
    _family(
        "kimi_linear",
        _CHANNEL,
        "KimiLinearForCausalLM",
        {**_OF_LAYERS, **_LATENTS, "linear_num_heads": 4, "linear_head_dim": 16},
    ),
    _family("bailing_hybrid", _CHANNEL, "BailingHybridForCausalLM", {**_OF_LAYERS, **_LATENTS, "head_dim": 16}),
    _family(
        "glm5_next",
        _CHANNEL,
        "Glm5NextForConditionalGeneration",
        {
            **_OF_LAYERS,
            **_LATENTS,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 0,
            "linear_num_heads": 4,
            "linear_head_dim": 16,
            "index_topk": 16,
            "index_kpool": 4,
            "index_head_dim": 16,
            "index_n_heads": 2,
            "hc_mult": 2,
        },
        text="text_config",
    ),
    _family(
        "mamba2",
        _SPACE,
        "Mamba2ForCausalLM",
        {
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 12,
            "n_groups": 2,
            "chunk_size": 16,
            "pad_token_id": 0,
        },
        sites=0,
    ),
    _family(
        "bamba", _SPACE, "BambaForCausalLM", {**_SIZES, **_MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [2]}
    ),
    _family(
        "falcon_h1",
        _SPACE,
        "FalconH1ForCausalLM",
        {**_SIZES, **_MAMBA, "num_hidden_layers": 2, "mamba_d_ssm": 128, "head_dim": 16},
        sites=2,
        has_gated_steps=True,
    ),
    _family(
        "granitemoehybrid",
        _SPACE,
        "GraniteMoeHybridForCausalLM",
        {**_OF_LAYERS, **_MAMBA, "num_local_experts": 0, "shared_intermediate_size": 64},
    ),
    _family(
        "nemotron_h",
        _SPACE,
        "NemotronHForCausalLM",
        {
            **_SIZES,
            "layers_block_type": ["mamba", "mamba", "attention"],
            "head_dim": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 12,
            "chunk_size": 16,
            "expand": 2,
        },
    ),
    _family(
        "zamba2",
        _SPACE,
        "Zamba2ForCausalLM",
        {
            **_SIZES,
            "num_hidden_layers": 2,
            "layers_block_type": ["linear_attention", "hybrid"],
            "num_key_value_heads": 4,
            "mamba_d_state": 12,
            "mamba_ngroups": 2,
            "n_mamba_heads": 8,
            "chunk_size": 16,
        },
    ),
)
FAMILY = {family.name: family for family in FAMILIES}


def _module(name: str) -> types.ModuleType:
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def _wide_module(name: str, folder: Path | None) -> types.ModuleType:
    """The model's file with float64 in the place of float32, as a module beside the other."""
    called = f"transformers.models.{name}.modeling_{name}_wide"
    if called in sys.modules:
        return sys.modules[called]
    assert folder is not None
    text = Path(str(_module(name).__file__)).read_text()
    for before, after in (
        ("torch.float32", "torch.float64"),
        (".float()", ".double()"),
        ("torch.float)", "torch.double)"),
    ):
        text = text.replace(before, after)
    path = folder / f"modeling_{name}_wide.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(called, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[called] = made
    spec.loader.exec_module(made)
    return made
