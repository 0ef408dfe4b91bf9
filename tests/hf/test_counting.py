"""The survey's independent counter: what it takes for an attention, and what not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.hf.counting import AttentionCounter

Q, K, V = (torch.randn(2, 3, 7, 8) for _ in range(3))


def _count(function: object, *args: object) -> list[str]:
    counter = AttentionCounter()
    with counter, torch.no_grad():
        function(*args)  # type: ignore[operator]
    return counter.calls


def _decomposed() -> torch.Tensor:
    scores = (Q @ K.transpose(-1, -2) * 0.3).masked_fill(torch.ones(7, 7).triu(1).bool(), -1e9)
    return F.softmax(scores.float(), dim=-1).to(Q.dtype) @ V


def test_a_decomposed_attention_is_one_site() -> None:
    assert _count(_decomposed) == ["softmax"]


def test_a_fused_call_is_one_site() -> None:
    assert _count(F.scaled_dot_product_attention, Q, K, V) == ["scaled_dot_product_attention"]


@pytest.mark.parametrize("product", [torch.matmul, torch.bmm])
def test_every_spelling_of_the_product_counts(product: object) -> None:
    q, k = Q.flatten(0, 1), K.flatten(0, 1)
    assert _count(lambda: product(q, k.transpose(1, 2)).softmax(-1)) == ["softmax"]  # type: ignore[operator]


def test_einsum_counts() -> None:
    assert _count(lambda: torch.einsum("bhqd,bhkd->bhqk", Q, K).softmax(-1)) == ["softmax"]


def test_two_layers_are_two_sites() -> None:
    assert len(_count(lambda: (_decomposed(), _decomposed()))) == 2


def test_a_router_is_no_attention() -> None:
    router = nn.Linear(8, 4)
    experts = nn.Parameter(torch.randn(4, 8, 8))

    def mixture() -> torch.Tensor:
        attended = F.scaled_dot_product_attention(Q, K, V)
        weights = F.softmax(router(attended), dim=-1)
        return F.softmax(attended.flatten(0, 1) @ experts[0], dim=-1) @ experts[1] + weights.sum()

    assert _count(mixture) == ["scaled_dot_product_attention"]


def test_a_softmax_over_a_classifier_after_attention_is_none() -> None:
    head = nn.Linear(8, 5)
    assert _count(lambda: head(_decomposed()).softmax(-1)) == ["softmax"]


@pytest.mark.parametrize("training", [True, False])
def test_torch_nn_modules_count_once_a_layer(training: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).train(training)
    assert len(_count(model, torch.randn(2, 7, 8))) == 3
