"""Options of x-transformers' attention, each by itself, in a decoder of text and an encoder with padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tests.hf.packages import import_package
from tests.hf.today.model import Kwargs
from tests.hf.today.running import Row
from tests.hf.whole.building import run
from tests.hf.whole.running import Subject, not_built

_SIZES = {"first": (2, 512), "second": (3, 384)}
#: einx, which an encoder's padding goes through, wants numbers, in float32
_DEVICE = {"Decoder": "meta", "Encoder": "cpu"}
_DTYPE = {"Decoder": torch.bfloat16, "Encoder": torch.float32}

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    **{
        name: {name: True}
        for name in (
            "alibi_pos_bias", "rel_pos_bias", "dynamic_pos_bias", "rotary_pos_emb", "polar_pos_emb", "residual_attn",
            "add_value_residual", "attn_one_kv_head", "attn_qk_norm", "attn_qk_rmsnorm", "attn_pre_talking_heads",
            "attn_post_talking_heads", "attn_head_scale", "attn_gate_values", "attn_gate_value_heads", "attn_on_attn",
            "attn_l2_distance", "attn_sigmoid", "attn_selective", "attn_cog_signed", "attn_add_zero_kv",
            "attn_head_learned_sink", "attn_data_dependent_alibi", "attn_use_rel_proj_pos_bias", "attn_use_cope",
            "attn_softclamp_logits", "attn_laser", "attn_orthog_projected_values", "attn_inverted_attention",
            "attn_hard", "attn_output_gate", "attn_swiglu_values", "attn_value_rmsnorm",
        )
    },
    "attn_kv_heads=2": {"attn_kv_heads": 2},
    "attn_num_mem_kv=4": {"attn_num_mem_kv": 4},
    "attn_sparse_topk=8": {"attn_sparse_topk": 8},
    "attn_max_attend_past=128": {"attn_max_attend_past": 128},
    "attn_value_dim_head=32": {"attn_value_dim_head": 32},
    "latent": {"attn_use_latent_kv": True, "attn_dim_latent_kv": 128},
    "cross_attend": {"cross_attend": True},
}  # fmt: skip


def units() -> list[str]:
    import_package("x_transformers")
    return list(OPTIONS)


def rows(option: str) -> Iterator[Row]:
    for kind in ("Decoder", "Encoder"):
        for flash in (True, False):
            yield from _of_option(option, kind, flash)


def _of_option(option: str, kind: str, flash: bool) -> Iterator[Row]:
    name, call = f"{option} {kind}", "sdpa" if flash else "eager"
    try:
        model = _build(option, kind, flash)
        _, total = run(model, _inputs(option, kind, *_SIZES["first"]), set())
    except Exception as error:  # noqa: BLE001 - an option that excludes another is a row of the table, not the end of it
        yield not_built(f"{name} {call}", f"{type(error).__name__}: {error}")
        return
    inputs: Any = {
        label: lambda _, batch=batch, length=length: _inputs(option, kind, batch, length)
        for label, (batch, length) in _SIZES.items()
    }
    how: dict[str, Any] = {
        "name": name,
        "call": call,
        "inputs": inputs,
        "totals": (total, total),
        "device": _DEVICE[kind],
    }
    yield from Subject(build=lambda: _build(option, kind, flash), **how).rows()


def _build(option: str, kind: str, flash: bool) -> nn.Module:
    package = import_package("x_transformers")
    with torch.device(_DEVICE[kind]):
        layers = getattr(package, kind)(dim=512, depth=2, heads=8, attn_flash=flash, **OPTIONS[option])
        model: nn.Module = package.TransformerWrapper(num_tokens=256, max_seq_len=1024, attn_layers=layers)
    return model.to(device=_DEVICE[kind], dtype=_DTYPE[kind]).eval()


def _inputs(option: str, kind: str, batch: int, length: int) -> Kwargs:
    device = _DEVICE[kind]
    given: Kwargs = {"x": torch.zeros(batch, length, dtype=torch.long, device=device)}
    if kind == "Encoder":
        given["mask"] = torch.ones(batch, length, dtype=torch.bool, device=device)
    if option == "cross_attend":
        given["context"] = torch.zeros(batch, 77, 512, dtype=_DTYPE[kind], device=device)
    return given
