"""Continuous batching: all attentions of all layers in few graphs, and eager's tokens.

On a CPU transformers runs it as on a GPU, but for CUDA graphs and the kernels that read a paged cache in place.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("transformers")

import transformers

import attn_compiler
from attn_compiler.passes.recovering.recover import OF_REQUESTS
from attn_compiler.reasons.codes import Code
from tests.integrations import launching
from tests.integrations.launching import graphs_without_us, llama

PROMPTS = [[3, 4, 5, 6, 7], [8, 9, 10], [11, 12, 13, 14, 15, 16, 17, 18, 19]]
TOKENS = 4


def _config() -> Any:
    return transformers.GenerationConfig(max_new_tokens=TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)


def _launched(model: Any) -> list[list[int]]:
    given = launching.run("Continuous batching", model=model, prompts=PROMPTS, generation_config=_config())
    return [answer.generated_tokens for answer in given["answers"].values()]


def _one_by_one(model: Any) -> list[list[int]]:
    given = [torch.tensor([prompt]) for prompt in PROMPTS]
    settings = {"max_new_tokens": TOKENS, "do_sample": False}
    return [model.generate(ids, **settings)[0, ids.shape[1] :].tolist() for ids in given]


@pytest.mark.further
@pytest.mark.usefixtures("quick")
def test_layers_share_few_graphs() -> None:
    model = llama()
    eager = _one_by_one(model)
    attention, calls = torch.nn.functional.scaled_dot_product_attention, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            calls.append(args)
        return attention(*args, **kwargs)

    with mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", counted):
        assert _launched(model) == eager
    reports = attn_compiler.reports()
    (site,) = [site for report in reports for site in report.sites]
    assert reports.num_misses == 0
    assert not any(report.faults or report.failure for report in reports)
    # The library's own mask, made outside of compiled code.
    assert site.spec.mask.words.startswith("dense additive float32")
    assert [note for note in site.notes if "mask" in note] == [OF_REQUESTS]
    # No layer ran outside of that graph.
    assert calls == []
    graphs = len(reports)
    assert _launched(model) == eager
    assert [report.num_sites for report in attn_compiler.reports()[graphs:]] in ([], [1])
    assert graphs <= graphs_without_us(lambda: _launched(model))


@pytest.mark.usefixtures("quick")
def test_eager_attention_is_found_and_returns_its_weights() -> None:
    model = llama()
    eager = _one_by_one(model)
    model.set_attn_implementation("eager")
    assert _launched(model) == eager
    (site,) = [site for report in attn_compiler.reports() for site in report.sites]
    assert attn_compiler.reports().num_misses == 0
    assert site.spec.returns_weights
    reasons = [reason.code for refusal in site.decision.refusals for reason in refusal.reasons]
    assert Code.WEIGHTS_READ in reasons
