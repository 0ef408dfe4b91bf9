"""Tiny models of transformers on several ranks, each with its part of a padded batch, against one process with all of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import attn_compiler
from attn_compiler import ContextParallel
from attn_compiler.reporting import verifications as results

VOCABULARY, LENGTH, PADDED = 99, 40, 9
_BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
    "pad_token_id": 0,
}


@dataclass(frozen=True, kw_only=True)
class Hf:
    """model: the name of a class. given: what its configuration says besides the sizes. experts: how its experts are computed.
    method: of ContextParallel.
    inner: AOTAutograd, which takes as long as everything else, for a model with layers of one kind and for one with two."""

    model: str
    given: Mapping[str, Any] = field(default_factory=dict)
    attention: str = "sdpa"
    experts: str | None = None
    method: Literal["auto", "all_gather", "ring"] = "auto"
    inner: str = "eager"


_MIXED = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
CASES: Mapping[str, Hf] = {
    "Llama": Hf(model="LlamaForCausalLM", given={"num_key_value_heads": 2}, inner="aot_eager"),
    "Mistral": Hf(model="MistralForCausalLM", given={"num_key_value_heads": 2, "sliding_window": 11}),
    "Mistral, halos": Hf(
        model="MistralForCausalLM", given={"num_key_value_heads": 2, "sliding_window": 6}, method="all_gather"
    ),
    "BERT": Hf(model="BertForMaskedLM"),
    "ModernBERT": Hf(
        model="ModernBertForMaskedLM",
        given={"local_attention": 8, "global_attn_every_n_layers": 2}
        | dict.fromkeys(("cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id"), 1),
        inner="aot_eager",
    ),
    "gpt-oss": Hf(
        model="GptOssForCausalLM",
        given={"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2} | _MIXED,
        attention="eager",
        experts="batched_mm",
        method="all_gather",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Found:
    """error: the largest difference of a real position's output. gradient_error: the largest, over the largest gradient. verified: what of
    the sites held in the first call. skipped: what could not be compared.
    halos: sites that exchange one."""

    error: float
    gradient_error: float
    sites: int
    verified: tuple[str, ...]
    skipped: tuple[str, ...]
    halos: int


def measured(names: list[str]) -> list[Found]:
    """To be called on every rank of a group."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return [_measured(mesh, CASES[name]) for name in names]


def _build(case: Hf) -> Any:
    import transformers

    made: Callable[..., Any] = getattr(transformers, case.model)
    config = made.config_class(**_BASE, **case.given)  # type: ignore[attr-defined]
    config._attn_implementation, config._experts_implementation = case.attention, case.experts
    torch.manual_seed(0)
    return made(config).double().eval()


def _measured(mesh: Any, case: Hf) -> Found:
    torch._dynamo.reset()
    attn_compiler.reset()
    results.forget()
    model = _build(case)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (2, LENGTH), generator=generator)
    real = torch.arange(LENGTH) < torch.tensor([LENGTH, LENGTH - PADDED])[:, None]
    weight = torch.randn(2, LENGTH, VOCABULARY, generator=generator, dtype=torch.float64) * real[..., None]
    given = {"use_cache": False} if "Causal" in case.model else {}
    expected = model(input_ids=ids, attention_mask=real.long(), **given).logits
    (expected * weight).sum().backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    cp = ContextParallel(mesh, method=case.method)
    part = cp.shard(input_ids=ids, attention_mask=real.long())
    options = {"context_parallel": cp, "inner": case.inner, "verify": True}
    out = torch.compile(model, backend="attn_compiler", options=options)(**part, **given).logits
    own = part["position_ids"][0]
    (out * weight[:, own]).sum().backward()
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(p.grad)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    largest = max(float(x.abs().max()) for x in wanted.values())
    checks = attn_compiler.verifications()
    return Found(
        error=float(((out - expected[:, own]) * (weight[:, own] != 0)).abs().max()),
        gradient_error=max(float((found[name] - x).abs().nan_to_num(torch.inf).max()) for name, x in wanted.items())
        / largest,
        sites=sum(len(site.modules) for report in attn_compiler.reports() for site in report.sites),
        verified=tuple(sorted({x.subject for x in checks if x.skipped is None})),
        skipped=tuple(sorted({x.subject for x in checks if x.skipped is not None})),
        halos=sum(
            len(site.modules)
            for report in attn_compiler.reports()
            for site in report.sites
            if any("halo of 5 positions before each chunk" in note for note in site.notes)
        ),
    )
