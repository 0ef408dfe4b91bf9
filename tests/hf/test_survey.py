"""The survey of model families: every attention site found, outputs and gradients equal to eager's.

`pytest tests/hf` runs CROSS_SECTION, at least one case of each form; `pytest tests/hf -m survey` or `python -m tests.hf` run all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import attn_compiler
from attn_compiler.reporting.report import Reports
from tests.hf import survey
from tests.hf.survey import Case, Result, cases, run_case, why_absent
from tests.thinned import further

# Each line is here for what its comment says; other cases repeat these forms.
CROSS_SECTION = (
    "llama-no_mask-sdpa-fp32",  # is_causal and native GQA
    "llama-padded-eager-fp32",  # additive mask, repeated keys and values
    "llama-static_decode-sdpa-bf16",  # keys and values written in place, bool mask
    "llama-dynamic-eager-fp32",  # symbolic sizes and scale
    "llama-checkpoint-sdpa-fp32",  # the attention is in a higher-order body, its mask enters as an argument
    "llama-output_attentions-eager-fp32",  # the weights have another reader
    "mistral-padded-sdpa-fp32",  # sliding window
    "mistral-static_decode-eager-fp32",  # a full sliding cache: rolled and copied back
    "mixtral-training-sdpa-fp32",  # a router's softmax is no attention
    "gemma2-training-eager-fp32",  # softcap
    "gemma2-no_mask-eager-bf16",  # softcap, with casts that float32 does not show
    "gemma3-static_decode-sdpa-fp32",  # window and full layers in one model
    "gpt2-training-eager-amp",  # autocast, fused QKV
    "bloom-training-eager-fp32",  # ALiBi inside baddbmm
    "mpt-padded-eager-fp32",  # ALiBi, then masked_fill
    "falcon_alibi-no_mask-sdpa-fp32",  # ALiBi and mask as one float mask
    "gpt_oss-training-eager-fp32",  # sinks
    "deepseek_v3-training-eager-fp32",  # multi-head latent attention: head_dim_qk differs from head_dim_v
    "modernbert-padded-eager-fp32",  # two-sided window
    "clip-padded-eager-fp32",  # two towers
    "encoder-no_mask-torch-fp32",  # torch.nn's inference fast path
)
#: further families and ways of running them, which CI has
_BESIDE = (
    "t5-training-eager-fp32",  # learned bucketed bias, no scale, cross attention
    "whisper-checkpoint-sdpa-fp32",
    "swin-training-eager-fp32",  # windows, learned relative bias
    "bart-padded-eager-fp32",  # cross attention of unequal lengths
    "llama-training-sdpa-bf16",
    "llama-ddp-sdpa-fp32",
    "gpt2-dropout-sdpa-fp32",
    "gpt_neox-no_cache-eager-fp32",
    "opt-padded-sdpa-fp32",
    "deepseek_v3-no_mask-sdpa-bf16",
    "bert-padded-sdpa-fp32",
    "distilbert-dropout-eager-fp32",
    "vit-no_mask-sdpa-fp32",
    "t5-static_decode-sdpa-fp32",
    "encoder_causal-training-torch-fp32",
    "mha_self-output_attentions-torch-fp32",
    "mha_cross-padded-torch-fp32",
    "timm_vit-training-sdpa-fp32",
    "diffusers_dit-no_mask-eager-fp32",
)
BY_ID = {case.id: case for case in cases()}


def _check(case: Case) -> Result:
    result = run_case(case)
    if result.status == "unavailable":
        pytest.skip(result.detail)
    assert result.status == "ok", f"{result.status}: {result.detail} {' | '.join(result.misses)}"
    assert result.found == result.expected
    assert result.found + result.uncaptured > 0
    return result


#: where what AOTAutograd makes of the rewritten graph matters: gradients, recomputation, writes into a cache
BEHIND_AOT_AUTOGRAD = ("training", "checkpoint", "ddp", "static_decode")


@pytest.mark.parametrize("name", further([*CROSS_SECTION, *_BESIDE], daily=CROSS_SECTION))
def test_cross_section(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole survey has AOTAutograd everywhere. It takes a third of the time."""
    if BY_ID[name].scenario not in BEHIND_AOT_AUTOGRAD:
        monkeypatch.setattr(survey, "OPTIONS", {**survey.OPTIONS, "inner": "eager"})
    _check(BY_ID[name])


@pytest.mark.survey
@pytest.mark.parametrize("name", [case.id for case in cases() if why_absent(case) is None])
def test_whole_survey(name: str) -> None:
    _check(BY_ID[name])


def test_eager_attention_without_weights_is_fused() -> None:
    assert _check(BY_ID["llama-padded-eager-fp32"]).lowerings != ("untouched",)


CASE = BY_ID["bert-no_mask-sdpa-fp32"]


def test_a_lost_site_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = attn_compiler.reports

    def without_sites() -> Reports:
        return Reports(replace(report, sites=report.sites[:-1]) for report in real())

    monkeypatch.setattr(attn_compiler, "reports", without_sites)
    result = run_case(CASE)
    assert result.status == "sites"
    assert result.found < result.expected == 2


def _recorder_that_returns(change: Callable[[torch.Tensor], torch.Tensor]) -> type[survey.Recorder]:
    class Wrong(survey.Recorder):
        def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
            right = super().__call__(gm, example_inputs)
            return lambda *args: tuple(change(value) for value in right(*args))

    return Wrong


def test_a_wrong_output_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "Recorder", _recorder_that_returns(lambda value: value * 1.001))
    result = run_case(CASE)
    assert result.status == "numbers"
    assert "is off by" in result.detail


def test_a_graph_that_runs_twice_counts_twice() -> None:
    class Block(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    recorder = survey.Recorder()
    block = torch.compile(Block(), backend=recorder)
    block(block(torch.randn(1, 2, 5, 8)))
    assert recorder.found == 2


def test_an_absent_case_has_its_reason() -> None:
    for name in (case.id for case in cases() if why_absent(case) is not None):
        result = run_case(BY_ID[name])
        assert result.status == "absent"
        assert len(result.detail.split()) > 4, name
