"""What attn_compiler finds and chooses in a GPT-2 and a Gemma-2 (softcap, sliding window), without running the compiled models."""

from __future__ import annotations

import torch
from rich.console import Console
from transformers import Gemma2Config, Gemma2Model, GPT2Config, GPT2Model, PreTrainedModel

import attn_compiler


def gpt2() -> PreTrainedModel:
    """Two layers with one fused projection for q, k and v; attention through scaled_dot_product_attention."""
    return GPT2Model(GPT2Config(n_embd=128, n_head=4, n_layer=2, vocab_size=256, bos_token_id=0, eos_token_id=0))


def gemma2() -> PreTrainedModel:
    """Two layers, the first with a sliding window; scores go through tanh, so attention is written out op by op."""
    config = Gemma2Config(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=16,
        vocab_size=256,
    )
    return Gemma2Model(config)


def main() -> None:
    console = Console()
    input_ids = torch.arange(2 * 64).reshape(2, 64)
    # The second sequence is 48 tokens long: 16 tokens of padding come first.
    attention_mask = torch.ones_like(input_ids)
    attention_mask[1, :16] = 0
    for model in (gpt2(), gemma2()):
        console.rule(type(model).__name__)
        with torch.no_grad():
            reports = attn_compiler.explain(model.eval(), input_ids, attention_mask=attention_mask, use_cache=False)
        print(reports.details())


if __name__ == "__main__":
    main()
