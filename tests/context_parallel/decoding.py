"""`generate` of transformers with a cache that several ranks share, against one process with a cache of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import attn_compiler
from attn_compiler import ContextParallel

VOCABULARY, NEW = 99, 4


@dataclass(frozen=True, kw_only=True)
class Run:
    """kind: "Llama", "Qwen3". prompt: its length. padded: how much of the second row is padding, on the left.
    compiled: each step, but not the prompt."""

    kind: str = "Llama"
    attention: str = "sdpa"
    prompt: int = 7
    padded: int = 0
    compiled: bool = False
    inner: str = "aot_eager"
    verify: bool = False
    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        how = f"{self.inner}{', verified' * self.verify}" if self.compiled else "as it is"
        return f"{self.kind} · {self.attention} · {self.prompt} · {self.padded} padded · {how}"


@dataclass(frozen=True, kw_only=True)
class Found:
    """error: the largest difference of a logit. tokens: what was generated. expected: by one process. slots: that the rank keeps.
    notes: of all sites."""

    error: float
    tokens: list[list[int]]
    expected: list[list[int]]
    slots: int
    notes: tuple[str, ...]


RUNS = [
    Run(),
    Run(attention="eager", prompt=5),
    Run(kind="Qwen3", prompt=8, padded=3),
    Run(compiled=True),
    Run(attention="eager", prompt=5, compiled=True),
    Run(kind="Qwen3", prompt=8, padded=3, compiled=True, verify=True),
]


def measured(runs: list[Run]) -> list[Found]:
    """To be called on every rank of a group."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return [_measured(ContextParallel(mesh), run) for run in runs]


def build(run: Run) -> Any:
    import transformers

    config = getattr(transformers, f"{run.kind}Config")(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=96,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=None,
        **run.given,
    )
    config._attn_implementation = run.attention
    torch.manual_seed(0)
    return getattr(transformers, f"{run.kind}ForCausalLM")(config).double().eval()


def inputs(run: Run) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, VOCABULARY, (2, run.prompt), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, : run.padded] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def _measured(cp: ContextParallel, run: Run) -> Found:
    from transformers import CompileConfig

    from attn_compiler.integrations.transformers_cache import ShardedCache

    torch._dynamo.reset()
    attn_compiler.reset()
    model, given = build(run), inputs(run)
    told = {"max_new_tokens": NEW, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected = model.generate(**given, **told)
    how: dict[str, Any] = {"disable_compile": True}
    if run.compiled:
        options = {"context_parallel": cp, "inner": run.inner, "verify": run.verify}
        config = CompileConfig(fullgraph=True, backend="attn_compiler", mode=None, options=options)
        config._compile_all_devices = True
        how = {"compile_config": config}
    cache = ShardedCache(model.config, cp, max_cache_len=run.prompt + NEW)
    found = model.generate(**given, **told, **how, past_key_values=cache)
    reports = attn_compiler.reports()
    return Found(
        error=max(float((a - b).abs().max()) for a, b in zip(found.logits, expected.logits, strict=True)),
        tokens=found.sequences.tolist(),
        expected=expected.sequences.tolist(),
        slots=cache.layers[0].keys.shape[2],
        notes=tuple(note for report in reports for site in report.sites for note in site.notes),
    )
