"""Softmaxes over what a linear layer gave choose among experts or classes: they are no misses, unless a product takes their weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.passes.compiling import compiled

B, S, E, N = 2, 8, 16, 4


class Model(nn.Module):
    def __init__(self, choose: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.gate, self.choose = nn.Linear(E, N), choose
        self.register_buffer("balance", torch.randn(N))

    def forward(self, x: Tensor) -> Tensor:
        attended = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)[:, 0]
        return attended.sum() + self.choose(self, x)


def mixtral(model: Any, x: Tensor) -> Tensor:
    weights, chosen = torch.topk(F.softmax(model.gate(x).flatten(0, 1).float(), dim=-1), 2, dim=-1)
    return (weights / weights.sum(-1, keepdim=True)).sum() + chosen.sum()


def of_the_best(model: Any, x: Tensor) -> Tensor:
    """gpt-oss."""
    best, chosen = torch.topk(model.gate(x), 2, dim=-1)
    return F.softmax(best, dim=-1).sum() + chosen.sum()


def balanced(model: Any, x: Tensor) -> Tensor:
    logits = model.gate(x) + model.balance
    return F.softmax(logits.masked_fill(logits < -1, float("-inf")), dim=-1).sum()


def classes(model: Any, x: Tensor) -> Tensor:
    return model.gate(x).softmax(-1)


def weighs_values(model: Any, x: Tensor) -> Tensor:
    return F.softmax(model.gate(x), dim=-1) @ x[:, :N]


def of_a_product(model: Any, x: Tensor) -> Tensor:
    return F.softmax(x @ x.mT, dim=-1).amax()


def of_an_input(model: Any, x: Tensor) -> Tensor:
    return F.softmax(x, dim=-1)


def of_a_layer_and_an_input(model: Any, x: Tensor) -> Tensor:
    return F.softmax(model.gate(x) + x[..., :N], dim=-1)


@pytest.mark.parametrize(
    ("choose", "misses"),
    [
        (mixtral, 0),
        (of_the_best, 0),
        (balanced, 0),
        (classes, 0),
        (weighs_values, 1),
        (of_a_product, 1),
        (of_an_input, 1),
        (of_a_layer_and_an_input, 1),
    ],
)
def test_what_is_a_miss(choose: Callable[[Any, Tensor], Tensor], misses: int) -> None:
    model = Model(choose)
    run = compiled(model)
    x = torch.randn(B, S, E)
    torch.testing.assert_close(run(x), model(x))
    assert run.report.num_sites == 1
    assert len(run.report.misses) == misses
