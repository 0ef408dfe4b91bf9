"""What a call gives, by name, and how far two of them are apart."""

from __future__ import annotations

import math
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from attn_compiler.compiling.comparing import results

Pair = namedtuple("Pair", "first second")


@dataclass
class Output:
    logits: torch.Tensor
    cache: Any = None
    note: str = ""


class Layers:
    def __init__(self, x: torch.Tensor) -> None:
        self.layers = [x, x + 1]
        self.owner = self


def test_outputs_are_named_by_their_place() -> None:
    x = torch.ones(1)
    assert list(results.outputs_of(x)) == ["output"]
    assert list(results.outputs_of((x, [x + 1, None], 3))) == ["[0]", "[1][0]"]
    assert list(results.outputs_of(OrderedDict(loss=x, hidden=(x, x)))) == ["loss", "hidden[0]", "hidden[1]"]
    assert list(results.outputs_of(Output(logits=x, cache=Layers(x)))) == [
        "logits",
        "cache.layers[0]",
        "cache.layers[1]",
    ]
    assert list(results.outputs_of(Pair(x, x))) == ["first", "second"]
    assert results.outputs_of(None) == {}


def test_the_loss_is_the_models_own() -> None:
    x = torch.ones(2, requires_grad=True)
    own = (x * 3).sum()
    assert results.loss_of({"logits": x * 2, "loss": own}, {}) is not None
    loss = results.loss_of({"logits": x * 2, "loss": own}, {})
    assert loss is not None
    assert float(loss.detach()) == 6


def test_without_a_loss_every_output_counts_and_the_noise_is_the_same_again() -> None:
    x = torch.ones(2, requires_grad=True)
    noise: dict[str, torch.Tensor] = {}
    losses = [results.loss_of({"a": x * 2, "b": torch.ones(3), "c": x.to(torch.bfloat16)}, noise) for _ in range(2)]
    assert set(noise) == {"a", "c"}
    assert losses[0] is not None
    assert losses[1] is not None
    assert float(losses[0].detach()) == float(losses[1].detach())
    assert results.loss_of({"b": torch.ones(3)}, {}) is None


def test_the_largest_difference_and_where_it_is() -> None:
    own = {"a": torch.tensor([1.0, -8.0]), "b": torch.tensor([True, False]), "c": torch.tensor([1 + 1j])}
    new = {"a": torch.tensor([1.25, -8.0]), "b": torch.tensor([True, False]), "c": torch.tensor([1 + 1j])}
    assert results.apart(own, own) == results.Distance(largest=0.0, where="a", beside=8.0)
    assert results.apart(new, own) == results.Distance(largest=0.25, where="a", beside=8.0)


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_what_is_no_number_on_one_side_alone_is_infinitely_far(odd: float) -> None:
    own, new = {"a": torch.tensor([1.0, 2.0])}, {"a": torch.tensor([odd, 2.0])}
    assert results.apart(new, own).largest == math.inf
    assert results.apart(new, new).largest == 0


def test_what_only_one_has_is_named() -> None:
    one, two = torch.ones(1), torch.ones(2)
    found = results.apart({"a": one, "b": one, "d": two}, {"a": one, "c": one, "d": one})
    assert sorted(found.others) == ["b", "c", "d"]
    assert found.largest == 0


def test_no_gradient_is_one_of_zeros() -> None:
    found = results.apart({"a": None, "b": None}, {"a": torch.tensor([0.0, 0.5]), "b": None})
    assert found == results.Distance(largest=0.5, where="a", beside=0.5)
    assert results.apart({"a": torch.tensor([0.25])}, {"a": None}).largest == 0.25


def test_padding_is_compared_apart_and_in_no_loss() -> None:
    padding = torch.tensor([[True, False, False], [False, False, True]])
    own = {"hidden": torch.zeros(2, 3, 4), "pooled": torch.zeros(2, 4)}
    hidden = torch.zeros(2, 3, 4)
    hidden[padding] = 5.0
    hidden[1, 1, 2] = 0.25
    far = results.apart({"hidden": hidden, "pooled": torch.full((2, 4), 0.125)}, own, padding)
    assert (far.largest, far.where, far.at_padding) == (0.25, "hidden", 5.0)
    assert results.apart({"pooled": torch.ones(2, 4)}, {"pooled": own["pooled"]}, padding).at_padding is None
    hidden.requires_grad_()
    loss = results.loss_of({"hidden": hidden}, {}, padding)
    assert loss is not None
    (grad,) = torch.autograd.grad(loss, hidden)
    assert not grad[padding].any()
    assert grad[~padding].all()


def test_all_of_a_tensor_may_be_padding() -> None:
    far = results.apart({"x": torch.ones(1, 2, 1)}, {"x": torch.zeros(1, 2, 1)}, torch.ones(1, 2, dtype=torch.bool))
    assert (far.largest, far.at_padding) == (0.0, 1.0)


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4, 4)])
def test_classes_and_heads_may_be_as_many_as_tokens(shape: tuple[int, ...]) -> None:
    padding = torch.tensor([[True, False, False], [False, False, True]])
    new = torch.zeros(shape)
    new[padding] = 5.0
    far = results.apart({"x": new}, {"x": torch.zeros(shape)}, padding)
    assert (far.largest, far.at_padding) == (5.0, None)
    new.requires_grad_()
    loss = results.loss_of({"x": new}, {}, padding)
    assert loss is not None
    assert torch.autograd.grad(loss, new)[0].all()


def test_padding_of_an_encoder_is_not_a_decoders() -> None:
    padding = torch.tensor([[True, False, False], [False, False, True]])
    wrong = torch.zeros(2, 3, 4)
    wrong[padding] = 5.0
    own = {"logits": torch.zeros(2, 3, 4), "encoder_last_hidden_state": torch.zeros(2, 3, 4)}
    far = results.apart({"logits": wrong, "encoder_last_hidden_state": own["logits"]}, own, padding)
    assert (far.largest, far.where, far.at_padding) == (5.0, "logits", 0.0)
    far = results.apart({"logits": own["logits"], "encoder_last_hidden_state": wrong}, own, padding)
    assert (far.largest, far.at_padding) == (0.0, 5.0)
