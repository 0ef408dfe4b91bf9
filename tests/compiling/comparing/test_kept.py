"""What a model and its inputs held is given back, whatever a run did to it."""

from __future__ import annotations

import functools
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from attn_compiler.compiling.comparing.kept import HeldState, Inputs, modules_of
from attn_compiler.reasons.errors import CannotCompare


class Writing(nn.Module):
    """Writes to all that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("mean", torch.tensor([1.0, float("nan")]))
        self.register_buffer("replaced", torch.zeros(2))
        self.plain = torch.zeros(3)
        self.calls = 0
        self.history: list[int] = []
        self.table: dict[str, Any] = {"kept": 1, "inside": [torch.zeros(2)]}
        self.last: deque[int] = deque([1, 2], maxlen=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.add_(1)
            self.frozen.data = torch.full((2,), 7.0)
            self.mean.add_(1)
            self.plain.resize_(5)
            self.table["inside"][0].add_(1)
        self.replaced = self.replaced + 1
        self.calls += 1
        self.history.append(self.calls)
        self.last.append(3)
        self.table["new"] = self.table.pop("kept")
        self.later = x
        self.train(not self.training)
        return x @ self.weight


def _seen(model: Writing) -> dict[str, Any]:
    names = set(vars(model))
    return {
        "names": names,
        "weight": model.weight.tolist(),
        "frozen": model.frozen.tolist(),
        "mean": str(model.mean.tolist()),
        "replaced": (id(model.replaced), model.replaced.tolist()),
        "plain": model.plain.tolist(),
        "calls": model.calls,
        "history": list(model.history),
        "table": {key: str(value) for key, value in model.table.items()},
        "last": list(model.last),
        "training": model.training,
    }


def test_all_that_a_model_writes_to_is_given_back() -> None:
    model = Writing()
    model.weight.grad = gradient = torch.full((2, 2), 5.0)
    before, parameter, memory = _seen(model), model.frozen, model.frozen.data_ptr()
    kept = HeldState([model])
    assert not kept.written
    assert model.weight.grad is None
    model(torch.ones(1, 2))
    assert kept.written
    assert _seen(model) != before
    kept.give_back()
    kept.give_back_gradients()
    assert _seen(model) == before
    assert not kept.written
    assert model.frozen is parameter
    assert model.frozen.data_ptr() == memory
    assert model.weight.grad is gradient


def test_what_is_not_written_to_keeps_its_version() -> None:
    model = nn.Linear(2, 2)
    kept, version = HeldState([model]), model.weight._version
    model(torch.ones(1, 2)).sum().backward()
    kept.give_back()
    kept.give_back_gradients()
    assert model.weight._version == version
    assert model.weight.grad is None


def test_a_buffer_that_was_made_in_inference_mode_is_given_back() -> None:
    model = nn.Module()
    with torch.inference_mode():
        model.register_buffer("table", torch.zeros(2))
    kept = HeldState([model])
    with torch.inference_mode():
        model.table.add_(1)  # type: ignore[operator]
    kept.give_back()
    assert model.table.tolist() == [0, 0]  # type: ignore[operator]


def test_tensors_without_memory_are_left_alone() -> None:
    model = nn.Linear(2, 2, device="meta")
    kept = HeldState([model])
    kept.give_back()
    assert not kept.written


def test_modules_of_what_is_called() -> None:
    model = nn.Sequential(nn.ReLU())
    every = list(model.modules())
    assert modules_of(model) == every
    assert modules_of(model.forward) == every
    assert modules_of(functools.partial(model.forward, torch.ones(1))) == every
    assert modules_of(lambda x: model(x)) == every
    assert modules_of(torch.sin) == []


@dataclass
class Cache:
    keys: list[torch.Tensor] = field(default_factory=list)


def test_a_call_that_writes_to_its_inputs_gets_new_ones_each_time() -> None:
    x = torch.zeros(2, requires_grad=True)
    inputs = Inputs([x, 3], {"mask": None, "scale": torch.ones(1)})
    first, _ = inputs.of_a_call()
    assert first[0] is not x
    assert first[0].requires_grad
    inputs.look()
    again, kwargs = inputs.of_a_call()
    assert again[0] is first[0]
    kwargs["scale"].add_(1)
    inputs.look()
    third, kwargs = inputs.of_a_call()
    assert third[0] is not first[0]
    assert kwargs["scale"].tolist() == [1]


def test_an_object_is_copied_for_each_call() -> None:
    cache = Cache()
    inputs = Inputs([], {"cache": cache})
    for _ in range(2):
        _, kwargs = inputs.of_a_call()
        assert kwargs["cache"].keys == []
        kwargs["cache"].keys.append(torch.ones(1))
    assert cache.keys == []


def test_inputs_keep_their_strides_and_their_aliases() -> None:
    whole = torch.arange(8.0)
    inputs = Inputs([whole[::2], whole.expand(3, 8)], {})
    (even, expanded), _ = inputs.of_a_call()
    assert even.stride() == (2,)
    assert expanded.stride() == (0, 1)
    even.zero_()
    assert expanded[0, :4].tolist() == [0, 1, 0, 3]


def test_inputs_are_named() -> None:
    inputs = Inputs(
        [torch.zeros(2, dtype=torch.int64), [True]], {"mask": torch.zeros(1, 3), "none": None, "cache": Cache()}
    )
    assert inputs.words == ["input 0 int64[2]", "input 1[0] = True", "mask float32[1, 3]", "cache Cache"]


def test_an_input_that_cant_be_copied_is_said_to_be_one() -> None:
    with pytest.raises(CannotCompare, match=r"inputs that can't be copied \(lock: .*AC918"):
        Inputs([threading.Lock()], {})


def test_padding_is_where_the_mask_of_tokens_is_zero() -> None:
    mask = torch.tensor([[0, 1], [1, 1]])
    assert Inputs([], {"attention_mask": mask}).padding.tolist() == [[True, False], [False, False]]  # type: ignore[union-attr]
    assert Inputs([], {"attention_mask": torch.ones(2, 2)}).padding is None
    assert Inputs([], {"attention_mask": torch.ones(2, 2, dtype=torch.int64)}).padding is None
    assert Inputs([], {"attention_mask": mask[:, None, None, :]}).padding is None
    assert Inputs([mask], {}).padding is None
