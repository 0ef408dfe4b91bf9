"""Train a small, randomly initialised Llama on real text, byte by byte, eagerly and through attn_compiler: the losses agree."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from pydoc_data.topics import topics

import torch
from rich.progress import track
from transformers import LlamaConfig, LlamaForCausalLM

import attn_compiler

STEPS, BATCH, SEQLEN = 25, 8, 128


def batches(seed: int = 0) -> Iterator[torch.Tensor]:
    """Windows of Python's own language reference as bytes: int64 (BATCH, SEQLEN), the same for the same seed."""
    text = torch.frombuffer(bytearray(" ".join(topics.values()).encode()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - SEQLEN, (BATCH,), generator=generator).tolist()
        yield torch.stack([text[start : start + SEQLEN] for start in starts])


def build() -> LlamaForCausalLM:
    """Four layers, grouped-query attention (8 query heads, 2 key-value heads), a vocabulary of the 256 bytes."""
    torch.manual_seed(0)
    width = {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 8, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=4, use_cache=False, **width))


def train(step: Callable[..., object], model: LlamaForCausalLM, name: str, steps: int = STEPS) -> list[float]:
    """The loss of every step, in nats a byte."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for ids in track(itertools.islice(batches(), steps), description=f"{name:>14}", total=steps):
        loss = step(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    model = build()
    ours = copy.deepcopy(model)
    eager_losses = train(model, model, "eager")
    losses = train(torch.compile(ours, backend="attn_compiler"), ours, "attn_compiler")
    print(attn_compiler.reports())
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f} nats a byte in {STEPS} steps")
    print(f"largest difference from eager: {max(abs(a - b) for a, b in zip(losses, eager_losses, strict=True)):.1e}")


if __name__ == "__main__":
    main()
