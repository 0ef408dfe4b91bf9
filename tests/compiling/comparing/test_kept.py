"""What is kept of each side while it runs."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from attn_compiler.compiling.comparing import sides
from attn_compiler.compiling.comparing.kept import HeldState, Inputs, modules_of
from attn_compiler.compiling.comparing.sides import EAGER, INDUCTOR, OURS, FirstStep, Task
from attn_compiler.reasons.errors import CannotCompare


# What a model and its inputs held is given back, whatever a run did to it.
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
    first, _ = inputs.for_call()
    assert first[0] is not x
    assert first[0].requires_grad
    inputs.check_writes()
    again, kwargs = inputs.for_call()
    assert again[0] is first[0]
    kwargs["scale"].add_(1)
    inputs.check_writes()
    third, kwargs = inputs.for_call()
    assert third[0] is not first[0]
    assert kwargs["scale"].tolist() == [1]


def test_an_object_is_copied_for_each_call() -> None:
    cache = Cache()
    inputs = Inputs([], {"cache": cache})
    for _ in range(2):
        _, kwargs = inputs.for_call()
        assert kwargs["cache"].keys == []
        kwargs["cache"].keys.append(torch.ones(1))
    assert cache.keys == []


def test_inputs_keep_their_strides_and_their_aliases() -> None:
    whole = torch.arange(8.0)
    inputs = Inputs([whole[::2], whole.expand(3, 8)], {})
    (even, expanded), _ = inputs.for_call()
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


# What is run of each side, with plain functions in the place of what is compiled.
def _task(model: nn.Module, *args: Any, training: bool = False) -> Task:
    kept = HeldState(list(model.modules()))
    names = {id(x): name for name, x in model.named_parameters()}
    return Task(
        inputs=Inputs(args, {}),
        kept=kept,
        names={id(x): names.get(id(x), "") for x in kept.tensors},
        training=training,
        devices=[torch.device("cpu")],
    )


def _measured(models: dict[str, Callable[..., Any]], task: Task) -> list[FirstStep]:
    firsts = [sides.with_memory(sides.first_step(name, model, task), model, task) for name, model in models.items()]
    return sides.in_turns(firsts, models, task, seconds=0)


def test_every_side_is_timed_and_compared() -> None:
    model = nn.Linear(4, 4)
    models = {EAGER: model, INDUCTOR: lambda x: model(x) + 0.5, OURS: model}
    task = _task(model, torch.ones(2, 4))
    eager, inductor, ours = sides.compared(_measured(models, task))
    assert eager.outputs is None
    assert inductor.outputs is not None
    assert abs(inductor.outputs.largest - 0.5) < 1e-6
    assert ours.outputs is not None
    assert ours.outputs.largest == 0
    assert inductor.ratio == 1
    assert all(side.first_seconds and side.milliseconds and side.rounds == 5 for side in (eager, inductor, ours))
    assert {side.peak_bytes for side in (eager, inductor, ours)} == {None}


def test_a_training_step_has_gradients_of_parameters_and_inputs_and_leaves_none() -> None:
    model = nn.Linear(4, 4)
    x = torch.ones(2, 4, requires_grad=True)
    task = _task(model, x, training=True)
    found = sides.first_step(EAGER, model, task).found
    assert found is not None
    assert found.gradients is not None
    assert list(found.gradients) == ["gradient of weight", "gradient of bias", "gradient of input 0"]
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in found.gradients.values())
    assert model.weight.grad is None
    assert x.grad is None


def test_a_forward_makes_no_graph() -> None:
    seen: list[bool] = []

    def model(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.is_grad_enabled())
        return x

    sides.first_step(EAGER, model, _task(nn.Module(), torch.ones(1)))
    assert seen == [False]
    assert torch.is_grad_enabled()


def _failing(after: int) -> Callable[[torch.Tensor], torch.Tensor]:
    calls = 0

    def model(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls > after:
            raise RuntimeError("no such\nkernel\n\nSet TORCH_LOGS for more")
        return x

    return model


@pytest.mark.parametrize("after", [0, 1, 2, 4])
def test_a_side_that_fails_is_a_row_and_the_others_are_timed(after: int) -> None:
    models = {EAGER: torch.sin, INDUCTOR: _failing(after), OURS: torch.sin}
    eager, inductor, ours = (first.side for first in _measured(models, _task(nn.Module(), torch.ones(1))))
    assert inductor.failure == "RuntimeError: no such kernel"
    assert inductor.milliseconds is None
    assert (inductor.first_seconds is None) == (after == 0)
    assert eager.milliseconds is not None
    assert ours.milliseconds is not None
    assert ours.ratio is None


def test_differences_are_not_known_where_the_model_itself_fails() -> None:
    models = {EAGER: _failing(0), INDUCTOR: torch.sin, OURS: torch.sin}
    eager, inductor, _ = sides.compared(_measured(models, _task(nn.Module(), torch.ones(1))))
    assert eager.failure is not None
    assert inductor.outputs is None
    assert inductor.milliseconds is not None


def test_random_numbers_are_the_same_for_each_side_and_for_whoever_draws_next() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    models = {EAGER: lambda x: x + torch.rand(1), INDUCTOR: lambda x: x + torch.rand(1)}
    firsts = _measured(models, _task(nn.Module(), torch.ones(1)))
    assert [first.drew for first in firsts] == [True, True]
    difference = sides.compared(firsts)[1].outputs
    assert difference is not None
    assert difference.largest == 0
    assert torch.equal(torch.rand(1), expected)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return x + self.seen


def test_each_step_begins_with_the_models_own_buffers() -> None:
    model = Counting()
    given: list[float] = []

    def noting(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(x)
        given.append(float(found))
        return found

    firsts = _measured({EAGER: noting, INDUCTOR: noting}, _task(model, torch.ones(1)))
    assert [first.writes for first in firsts] == [True, True]
    assert set(given) == {2.0}
    assert model.seen.tolist() == [0.0]


def test_a_training_step_of_what_is_frozen_is_refused() -> None:
    with pytest.raises(CannotCompare, match="none needs a gradient"):
        sides.first_step(EAGER, torch.sin, _task(nn.Module(), torch.ones(1), training=True))
