from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from rich.progress import Progress

from benchmarks import bench_decode_models
from benchmarks.bench_decode_models import Case

pytest.importorskip("transformers")

TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
}
CASE = Case(name="tiny", family="Llama", batch=2, length=32, filled=(20, 5))


def test_a_step_reads_the_cache_up_to_the_length_that_was_asked_for() -> None:
    with mock.patch.dict(bench_decode_models.SIDES, {"inductor": {"backend": "eager"}}):
        made = bench_decode_models.stepper(CASE, "inductor", None, "cpu", **TINY)
    assert bench_decode_models.error(made, 5) < 1e-5
    made.fill(5)
    short = made.step()
    assert made.cache.layers[0].cumulative_length == 6
    made.fill(20)
    assert not torch.allclose(made.step(), short)
    made.fill(5)
    assert torch.equal(made.step(), short)


def test_generate_counts_its_tokens() -> None:
    model = bench_decode_models.build(CASE, "inductor", "cpu", **TINY)
    ids = torch.randint(3, 1000, (2, 5))
    with Progress(disable=True) as bar, mock.patch.object(torch.cuda, "synchronize"):
        seconds, found = bench_decode_models.generate(model, ids, 3, "inductor", bar)
        (task,) = bar.tasks
    assert found.shape == (2, 8)
    assert seconds > 0
    assert task.completed == 3
