"""What is run of each side, with plain functions in the place of what is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from attn_compiler.compiling.comparing import sides
from attn_compiler.compiling.comparing.kept import HeldState, Inputs
from attn_compiler.compiling.comparing.sides import EAGER, INDUCTOR, OURS, FirstStep, Task
from attn_compiler.reasons.errors import CannotCompare


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
