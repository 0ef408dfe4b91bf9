"""What models of today get on each machine when lengths change: at the first length, at the second, which Dynamo makes a symbol, and later.

Real head dims and numbers of heads, two layers, on the meta device: what is decided of a site needs no memory and no GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from attn_compiler.lowerings.shared.calls import cudnn_called
from attn_compiler.lowerings.shared.parts import site_parts as parts
from attn_compiler.options.options import Options
from attn_compiler.passes import rewrite
from attn_compiler.passes.writing.select import decide
from attn_compiler.reporting.report import Report
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.target import Target
from attn_compiler.torch_private import known_masks

transformers = pytest.importorskip("transformers")

#: batch and length of each call
CALLS = ((4, 4096), (4, 3000), (4, 2000), (4, 777), (4, 1536))
MACHINES = {f"sm{sm}": Target.fake(sm=sm) for sm in (80, 89, 90, 100, 120)}
OPTIONS = Options(inner="eager", lowerings=("sdpa_cpu_flash", "math"))

_TOKENS = {"vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_hidden_layers": 2}
_LAYERS = ["sliding_attention", "full_attention"]
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _decoder(name: str, config: str, impl: str = "sdpa", **sizes: Any) -> Any:
    return pytest.param(name, config, impl, {**_TOKENS, "intermediate_size": 512, **sizes}, id=name)


MODELS = (
    _decoder(
        "Qwen3ForCausalLM", "Qwen3Config", hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, head_dim=128
    ),
    _decoder(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        hidden_size=3840,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=256,
        sliding_window=1024,
        layer_types=_LAYERS,
    ),
    _decoder(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        "eager",
        hidden_size=3584,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=256,
        sliding_window=1024,
        layer_types=_LAYERS,
    ),
    _decoder("GptOssForCausalLM", "GptOssConfig", "eager", num_local_experts=4, layer_types=_LAYERS),
    _decoder(
        "Lfm2ForCausalLM",
        "Lfm2Config",
        hidden_size=2048,
        num_attention_heads=32,
        num_key_value_heads=8,
        layer_types=["full_attention", "full_attention"],
    ),
    _decoder(
        "BertForMaskedLM",
        "BertConfig",
        hidden_size=1024,
        num_attention_heads=16,
        max_position_embeddings=8192,
        **_NO_DROPOUT,
    ),
    _decoder(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        hidden_size=1024,
        num_attention_heads=16,
        layer_types=_LAYERS,
        local_attention=128,
        sep_token_id=3,
        cls_token_id=4,
    ),
)


class Recorder:
    """A backend that rewrites and runs eagerly, and keeps what was found."""

    def __init__(self) -> None:
        self.reports: list[Report] = []

    def __call__(self, gm: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        rewritten = rewrite(gm, OPTIONS)
        self.reports.append(rewritten.report)
        gm.recompile()
        return known_masks.wrap(gm.forward, rewritten.known)


def reads_a_dense_mask(spec: AttentionSpec, lowering: str, target: Target) -> bool:
    """Whether a kernel reads an element for each score, or the scores are written to memory."""
    if lowering == "untouched":
        return True
    if lowering.startswith("sdpa_"):
        told = cudnn_called.with_flag(spec, target) if lowering == "sdpa_cudnn" else spec
        return told.added_tensor is not None
    return bool(parts.parts(spec).kinds & {"mask", "bias"})


def _calls(model: Any, backend: Any) -> Iterator[None]:
    """Compiles a model, and stops after the call of each length."""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    for batch, length in CALLS:
        ids = torch.zeros(batch, length, dtype=torch.long, device="meta")
        given = {"labels": ids} if model.training else {}
        if type(model).__name__ not in ("BertForMaskedLM", "ModernBertForMaskedLM"):
            given["use_cache"] = False
        with torch.set_grad_enabled(model.training):
            compiled(input_ids=ids, attention_mask=torch.ones_like(ids), **given)
        yield


@pytest.mark.in_turns(7)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(("name", "config", "impl", "sizes"), MODELS)
def test_a_kernel_that_reads_no_dense_mask_is_kept_at_every_length(
    name: str, config: str, impl: str, sizes: dict[str, Any], training: bool
) -> None:
    made = getattr(transformers, config)(**sizes)
    with torch.device("meta"):
        model: Any = getattr(transformers, name)._from_config(made, attn_implementation=impl, dtype=torch.bfloat16)
    model.train(training)
    recorder, counter = Recorder(), CompileCounter()
    # A backend that asks nothing of sizes has the fewest graphs that there can be.
    fewest = [counter.frame_count for _ in _calls(model, counter)]
    reports = [tuple(recorder.reports) for _ in _calls(model, recorder)]
    assert list(map(len, reports)) == fewest
    # One graph for the first length, and one for all others.
    assert [len([report for report in so_far if report.sites]) for so_far in reports] == [1, 2, 2, 2, 2]
    sites = [[site.spec for site in report.sites] for report in recorder.reports if report.sites]
    assert [{isinstance(spec.seqlen_q, int) for spec in found} for found in sites] == [{True}, {False}]
    dense = []
    for place, found in zip(("first", "others"), sites, strict=True):
        for spec in (dataclasses.replace(one, device="cuda") for one in found):
            assert spec.mask.reason is None
            assert spec.needs_grad == training
            for machine, target in MACHINES.items():
                chosen = decide(spec, target, Options()).lowering
                if reads_a_dense_mask(spec, chosen, target):
                    dense.append((place, machine, chosen, spec.mask.words, spec.score.words))
    assert dense == []
