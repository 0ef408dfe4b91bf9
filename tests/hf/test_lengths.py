"""A model that is called with many lengths: as many graphs as with a backend that does nothing, and equal numbers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import attn_compiler

transformers = pytest.importorskip("transformers")

LENGTHS = random.Random(1).sample(range(3, 300), 50)


def _model(name: str) -> Any:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    if name == "bert":
        return transformers.BertModel(transformers.BertConfig(**sizes, max_position_embeddings=300)).eval()
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, use_cache=False)
    return transformers.LlamaModel(config).eval()


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_50_lengths_are_two_graphs(name: str) -> None:
    attn_compiler.reset()
    model = _model(name)
    counter = CompileCounterWithBackend("eager")
    theirs = torch.compile(_model(name), backend=counter)
    ours = torch.compile(_model(name), backend="attn_compiler", options={"inner": "eager", "strict": True})
    for length in LENGTHS:
        ids = torch.randint(0, 64, (2, length))
        mask = torch.ones_like(ids)
        mask[0, : length // 3] = 0
        given = {"input_ids": ids, "attention_mask": mask}
        with torch.no_grad():
            theirs(**given)
            expected, found = model(**given).last_hidden_state, ours(**given).last_hidden_state
        torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], atol=1e-4, rtol=1e-4)
    assert counter.frame_count == 2
    reports = attn_compiler.reports()
    assert len(reports) == 2
    assert all(len(report.sites) == 1 for report in reports)
