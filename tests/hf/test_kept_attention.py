"""Models of Hugging Face that train under checkpoints, as `gradient_checkpointing_enable` makes them: attention runs once a step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers

import attn_compiler
from tests.lowerings.graph_ops.parting import graphs

SEQLEN, LAYERS = 16, 3


def _model(kind: str) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": LAYERS,
        "use_cache": False,
    }
    sizes |= {"intermediate_size": 64, "vocab_size": 64}
    if kind == "bert":
        plain = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **plain))
    more = {"sliding_window": 5} if kind == "mistral" else {}
    config = {"llama": transformers.LlamaConfig, "mistral": transformers.MistralConfig}[kind]
    made = config(**sizes, **more, num_key_value_heads=2)
    return transformers.AutoModelForCausalLM.from_config(made)


def _batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 64, (2, SEQLEN), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, SEQLEN - 5 :] = 0
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": mask}


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", ["llama", "mistral", "bert"])
def test_each_forward_runs_once(kind: str, use_reentrant: bool) -> None:
    model = _model(kind)
    plain = copy.deepcopy(model).train()
    model.train().gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    options = {"lowering": "reference", "checkpoint": "keep_attention", "strict": True}
    torch._dynamo.reset()
    with graphs() as found:
        loss = torch.compile(model, backend="attn_compiler", options=options)(**_batch()).loss
        loss.backward()
    wanted = plain(**_batch()).loss
    wanted.backward()
    torch.testing.assert_close(loss, wanted)
    for (name, mine), own in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, own.grad, msg=lambda text, name=name: f"{name}: {text}")
    assert sum(found.calls("reference")) == LAYERS
    (report,) = attn_compiler.reports()
    notes = [note for site in report.sites for note in site.notes if note.startswith("checkpoint")]
    size = 2 * SEQLEN * 4 * (8 + 1) * 4 / 1000
    assert notes == [f"checkpoint: its output and lse are kept, {size:.1f} kB a layer; its forward runs once a step"]
