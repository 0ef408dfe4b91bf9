"""DeBERTa-v2 with padding, and labels at padded positions, too: gradients are finite, and eager's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

import attn_compiler

#: real tokens of each row, of LENGTH
LENGTH, REAL = 40, (40, 23, 1)
#: the float32 rule of tests/numerics.py, for a whole model: eager's own error is so small that the sum of its parts counts
_FLOOR = 1e-5


def _model() -> Any:
    torch.manual_seed(0)
    config = transformers.DebertaV2Config(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=199,
        max_position_embeddings=LENGTH,
        type_vocab_size=0,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=16,
        norm_rel_ebd="layer_norm",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )
    return transformers.DebertaV2ForMaskedLM(config).train()


def _batch(device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(1, 199, (len(REAL), LENGTH), generator=generator) for _ in range(2))
    real = (torch.arange(LENGTH) < torch.tensor(REAL)[:, None]).long()
    batch = {"input_ids": ids * real, "attention_mask": real, "labels": labels}
    return {name: tensor.to(device) for name, tensor in batch.items()}


def _gradients(model: Any, run: Any, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Logits of real tokens, and the gradients of all parameters for a loss on all positions."""
    model.zero_grad()
    result = run(**batch)
    result.loss.backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return [result.logits[batch["attention_mask"].bool()].detach(), *(gradient.clone() for gradient in found)]


def _worst(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """The largest error, relative to the largest element of its tensor."""
    assert len(found) == len(exact)
    assert all(x.isfinite().all() for x in found)
    return max(
        ((x.double() - y).abs().max() / y.abs().max().clamp_min(1e-12)).item()
        for x, y in zip(found, exact, strict=True)
    )


def _check(dtype: torch.dtype, device: str, options: dict[str, object]) -> None:
    batch = _batch(device)
    exactly = _model().to(device, torch.float64)
    exact = _gradients(exactly, exactly, batch)
    model = copy.deepcopy(_model()).to(device, dtype)
    eager = _worst(_gradients(model, model, batch), exact)
    attn_compiler.reset()
    torch.compiler.reset()
    compiled = torch.compile(model, backend="attn_compiler", options=options)
    ours = _worst(_gradients(model, compiled, batch), exact)
    (report,) = attn_compiler.reports()
    assert report.num_sites == 2
    assert ours <= 2 * eager + _FLOOR, (ours, eager)


@pytest.mark.parametrize("lowering", [None, "reference"])
def test_labels_on_padding(lowering: str | None) -> None:
    _check(torch.float32, "cpu", {"inner": "eager"} | ({"lowering": lowering} if lowering else {}))


@pytest.mark.gpu
@pytest.mark.parametrize("lowering", [None, "triton", "sdpa_efficient", "sdpa_cudnn", "math"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_labels_on_padding_on_a_gpu(dtype: torch.dtype, lowering: str | None) -> None:
    _check(dtype, "cuda", {"lowering": lowering} if lowering else {})
