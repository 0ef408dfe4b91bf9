"""A model that is called with many lengths: as many graphs as with a backend that does nothing, and equal numbers. Without padding, too."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import attn_compiler
from attn_compiler.passes.unpad import packing
from attn_compiler.torch_private import inductor as torch_inductor

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


@pytest.mark.in_turns(2)
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


def _gradient(found: torch.Tensor, model: Any, mask: torch.Tensor) -> torch.Tensor:
    """Of the first weight that is trained, by the cube of what stands at real tokens."""
    (gradient,) = torch.autograd.grad(found[mask.bool()].pow(3).sum(), [model.get_input_embeddings().weight])
    return gradient


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_without_padding_50_lengths_are_two_graphs_that_are_compiled_once(
    name: str, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No kernel for a CPU leaves out other rows where lengths are symbols.
    monkeypatch.setattr(packing, "LEAVING_OUT", ("reference",))
    attn_compiler.reset()
    model = _model(name).requires_grad_(training)
    counter = CompileCounterWithBackend("eager")
    theirs = torch.compile(_model(name).requires_grad_(training), backend=counter)
    options = {"inner": "eager", "strict": True, "unpad": True}
    ours = torch.compile(model, backend="attn_compiler", options=options)
    compiled, counts = torch_inductor.compile_with_backend, []
    with mock.patch.object(torch_inductor, "compile_with_backend", side_effect=compiled) as inner:
        for length in LENGTHS:
            ids = torch.randint(0, 64, (2, length))
            mask = torch.ones_like(ids)
            # All tokens of some batches are real ones.
            mask[0, length - length // random.Random(length).choice([2, 3, length + 1]) :] = 0
            given = {"input_ids": ids, "attention_mask": mask}
            theirs(**given)
            expected, found = (called(**given).last_hidden_state for called in (model, ours))
            torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], atol=1e-4, rtol=1e-4)
            if training:
                torch.testing.assert_close(
                    _gradient(found, model, mask), _gradient(expected, model, mask), atol=1e-3, rtol=1e-3
                )
            counts.append(inner.call_count)
    assert counter.frame_count == 2
    assert 0 < counts[0] < counts[1] == counts[-1]
    reports = attn_compiler.reports()
    assert len(reports) == 2
    for report in reports:
        assert report.unpad is not None
        assert report.unpad.kept is None
        assert report.unpad.last[-1].failed == ()
