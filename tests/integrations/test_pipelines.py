"""`pipeline()` of a model that is compiled in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers

import attn_compiler
from tests.integrations import launching
from tests.integrations.launching import LAYERS, SIZES, WORDS, found, graphs_without_us, llama

SENTENCES = ["the cat sat on a mat", "dogs run", "old dogs run fast in the park the cat", "a cat"]


def _bert() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(**{**SIZES, "vocab_size": len(WORDS)})
    return transformers.BertForSequenceClassification(config).eval()


@pytest.mark.usefixtures("quick")
def test_classification() -> None:
    model, tokenizer = _bert(), launching.tokenizer("right")
    classify = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer)
    eager = classify(SENTENCES, batch_size=2)

    def launch() -> list[dict[str, Any]]:
        names = {"model": _bert(), "tokenizer": tokenizer, "sentences": SENTENCES}
        answers: list[dict[str, Any]] = launching.run("pipeline()", **names)["answers"]
        return answers

    answers = launch()
    assert [a["label"] for a in answers] == [a["label"] for a in eager]
    assert [a["score"] for a in answers] == pytest.approx([a["score"] for a in eager], abs=1e-5)
    (mask,) = found(sites=LAYERS)
    assert mask.endswith(": key padding attention_mask[b, k] (proved)")
    assert len(attn_compiler.reports()) == 1
    assert graphs_without_us(launch) == 1


def test_generation() -> None:
    model = llama(vocab_size=len(WORDS))
    model.generation_config.cache_implementation = "static"
    write = transformers.pipeline("text-generation", model=model, tokenizer=launching.tokenizer("left"))
    settings = {"max_new_tokens": 3, "do_sample": False, "batch_size": 2}
    eager = write(SENTENCES[:2], **settings)
    write.model.compile(backend="attn_compiler", options={"inner": "eager", "strict": True})
    assert write(SENTENCES[:2], **settings) == eager
    assert found(sites=LAYERS) == ["6: not proved", "1: key padding attention_mask[b, 0, 0, k] (proved)"]
