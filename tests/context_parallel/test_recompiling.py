"""What is compiled again, and what transformers sees of a shared sequence."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from attn_compiler import ContextParallel
from attn_compiler.context_parallel import batches
from attn_compiler.context_parallel.layout import Layout
from tests.context_parallel import recompiling
from tests.context_parallel.recompiling import OPTIONS, OTHERS, Outcome
from tests.distributed import processes
from tests.meshes import fake_mesh
from tests.thinned import asked_for, in_full

# A compilation that not all ranks make is an error on all of them, at once, and they may go on together.

#: the group's own timeout is minutes
_SECONDS = 20
#: what one rank does otherwise, and which rank. By default each rank has a quarter of what there is.
_WAYS = in_full(
    ((name, who) for name in OTHERS for who in (0, 1)),
    daily={(name, at % 2) for at, name in enumerate(list(OTHERS)[::2])},
)


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> list[dict[tuple[str, int], Outcome]]:
    return processes.run(recompiling.measured, None, asked_for(request, "way"))


@pytest.fixture(scope="module")
def of_options(request: pytest.FixtureRequest) -> list[dict[str, Outcome]]:
    return processes.run(recompiling.with_other_options, asked_for(request, "name"))


@pytest.mark.parametrize("way", _WAYS)
def test_all_ranks_raise_and_say_what_differs(
    found: list[dict[tuple[str, int], Outcome]], way: tuple[str, int]
) -> None:
    name, _ = way
    for outcomes in found:
        outcome = outcomes[way]
        assert outcome.error is not None
        assert re.search(OTHERS[name][1], outcome.error), outcome.error
        assert outcome.seconds < _SECONDS


@pytest.mark.parametrize("way", _WAYS)
def test_the_error_names_the_rank(found: list[dict[tuple[str, int], Outcome]], way: tuple[str, int]) -> None:
    _, who = way
    waiting = found[1 - who][way].error
    assert waiting is not None
    assert f"rank {who}: co" in waiting  # "compiles", "could not compile"
    assert f"rank {1 - who}: runs graph" in waiting


@pytest.mark.parametrize("way", _WAYS)
def test_ranks_go_on_together(found: list[dict[tuple[str, int], Outcome]], way: tuple[str, int]) -> None:
    assert all(outcomes[way].after for outcomes in found)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("name", OPTIONS)
def test_other_options_on_one_rank_are_refused_by_name(of_options: list[dict[str, Outcome]], name: str) -> None:
    option = name.split(" ")[0]
    for outcomes in of_options:
        outcome = outcomes[name]
        assert outcome.error is not None
        assert f"{option}: " in outcome.error
        assert outcome.seconds < _SECONDS


# A model of transformers computes the same loss of what is made of a batch before it is cut.
_SMALL: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}


def _model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**_SMALL)).double().eval()
    return BertForMaskedLM(BertConfig(**_SMALL)).double().eval()


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_the_loss_of_the_whole_batch_is_the_models(kind: str, padding: str | None) -> None:
    ids = torch.randint(40, (2, 13))
    batch = {"input_ids": ids, "labels": ids.where(torch.rand(2, 13) < 0.7, -100)}
    if padding is not None:
        batch["attention_mask"] = torch.ones(2, 13, dtype=torch.long)
        batch["attention_mask"][0, :3] = 0
        if padding == "right":
            batch["attention_mask"] = batch["attention_mask"].flip(-1)
        # A first token is predicted from padding.
        starts = batch["attention_mask"].cumsum(-1) == 1
        batch["labels"] = batch["labels"].where((batch["attention_mask"] == 1) & ~starts, -100)
    model = _model(kind)
    expected = model(**batch)
    whole = batches.whole(batch, Layout(size=3, balanced=True), pad_id=5)
    found = model(**whole.tensors)
    assert found.logits.shape == (2, 18, 40)
    # What is at padding depends on the length, in SDPA's kernel too.
    real = batch.get("attention_mask", torch.ones_like(ids)).bool()
    torch.testing.assert_close(found.logits[:, :13][real], expected.logits[real], rtol=0, atol=1e-12)
    # Losses of transformers are float32's.
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=0)


def test_a_loss_that_is_a_sum_has_the_models_mean() -> None:
    """As docs/context_parallel.md writes it."""
    ids = torch.randint(40, (2, 13))
    model = _model("llama")
    with fake_mesh(1) as mesh:
        cp = ContextParallel(mesh)
        batch = cp.shard(input_ids=ids, labels=ids)
        out = model(**batch, use_cache=False, num_items_in_batch=1)
        loss = cp.mean(out.loss, (batch["shift_labels"] != -100).sum())
    torch.testing.assert_close(loss, model(input_ids=ids, labels=ids).loss)
